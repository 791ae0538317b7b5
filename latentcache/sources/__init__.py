"""From where? Folders of pictures with captions, and tables beside them."""
