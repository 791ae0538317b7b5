"""Where samples come from: folders of images with captions, tables, files of records."""
