"""Content hashes, keys, named noise and the memo of source stats."""
