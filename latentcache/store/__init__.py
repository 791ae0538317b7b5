"""Entries, LMDB shards, columns, snapshots and the reader of items. No torch."""
