"""Content hashes, weight fingerprints, keys and the memo of source stats."""
