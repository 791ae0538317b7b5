"""Sources of samples: folders of images with captions, tables, files of records."""
