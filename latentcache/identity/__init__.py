"""The same? Content hashes, encoder fingerprints, entry keys and the memo of source stats."""
