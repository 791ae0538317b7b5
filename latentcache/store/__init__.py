"""Entries, LMDB shards, columns, snapshots and the reader of items. No torch.

Errors of the system come as DiskFullError, CacheReadOnlyError or StoreError (``atomic_io.as_store_error``) everywhere
here and in ``verify``; ``Raises`` names the others.
"""
