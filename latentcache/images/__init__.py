"""File bytes to pixels of a bucket: headers, decoding, resizing, color."""
