"""The pages of a shard against its index: do both databases hold what the index says, entry by entry, and no more?

Guarantee: yes is said only where the walk entry by entry would say yes; where many pages at a time give any doubt,
that walk decides, and says what is wrong. Cost: 1 µs per entry of a whole shard, 6 µs where something is unusual.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.store.durable import open_file
from latentcache.store.entry import FACTS_BYTES, HEADER_BYTES, RECORD_BYTES, pack_record
from latentcache.store.index import IndexFile, open_index
from latentcache.store.layout import CacheLayout
from latentcache.store.leaves import LeafBlock, leaf_blocks
from latentcache.store.pages import Meta, read_meta, slots
from latentcache.verify.entries import words

#: Entries between two questions whether time is over.
_BATCH = 256
#: Bytes of a record with its key before it, as far as its checksum reaches; where a header has its payload's length.
_SIGNED_BYTES = KEY_BYTES + HEADER_BYTES + FACTS_BYTES
_PAYLOAD_BYTES = slice(16, 24)


def pages_found(layout: CacheLayout, shard: str, over: Callable[[], bool]) -> str:
    """What is wrong with the pages of a shard, held against its index; empty where nothing is, or time was over.

    Args:
        layout: The cache.
        shard: Name of the shard's folder.
        over: Asked now and then whether to stop.
    """
    try:
        index = open_index(layout.shards / shard)
        meta = read_meta(index.data)
        if _leaves_agree(index, meta, over) or _slots_agree(index, meta, over):
            return ""
        return "pages and index disagree"
    except (OSError, StoreError) as error:
        return words(error)


def _leaves_agree(index: IndexFile, meta: Meta, over: Callable[[], bool]) -> bool:
    """Whether both databases are as the index has it, many pages at a time; or time is over."""
    heads = leaf_blocks(index.data, "head", meta, key_bytes=KEY_BYTES, value_bytes=RECORD_BYTES)
    blobs = leaf_blocks(index.data, "blob", meta, key_bytes=KEY_BYTES)
    try:
        for blocks, agree in ((heads, _heads_agree), (blobs, _blobs_agree)):
            count = 0
            for block in blocks:
                if count + len(block.fronts) > index.entries:
                    return False
                rows = index.rows(count, len(block.fronts))
                if not agree(rows, block):
                    return False
                count += len(rows)
                if over():
                    return True
            if count != index.entries:
                return False
    except (OSError, ValueError):
        return False
    return True


def _heads_agree(rows: NDArray[np.void], block: LeafBlock) -> bool:
    """Whether keys, headers and facts are those of the index, and each record's checksum holds."""
    parts = (rows["key"], rows["header"], rows["facts"])
    if (np.concatenate(parts, axis=1) != block.fronts[:, :_SIGNED_BYTES]).any():
        return False
    flat, width = block.fronts.reshape(-1).data, KEY_BYTES + RECORD_BYTES
    stored: list[int] = np.ascontiguousarray(block.fronts[:, _SIGNED_BYTES:]).view("<u8")[:, 0].tolist()
    return [checksum(flat[at : at + _SIGNED_BYTES]) for at in range(0, len(flat), width)] == stored


def _blobs_agree(rows: NDArray[np.void], block: LeafBlock) -> bool:
    """Whether keys and places are those of the index, and each length is the one its header says."""
    payload_bytes = np.ascontiguousarray(rows["header"][:, _PAYLOAD_BYTES]).view("<u8")[:, 0]
    same = block.lengths.astype(np.uint64) - np.uint64(HEADER_BYTES) == payload_bytes
    places = block.offsets.astype(np.uint64) == rows["offset"]
    return bool(same.all() and places.all() and (rows["key"] == block.fronts).all())


def _slots_agree(index: IndexFile, meta: Meta, over: Callable[[], bool]) -> bool:
    """Whether both databases of a shard hold what its index says, entry by entry, and no more; or time is over."""
    count, rows = 0, chain.from_iterable(index.slices(_BATCH))
    with os.fdopen(open_file(index.data), "rb", buffering=0) as file:
        walks = zip(slots(index.data, "head", meta), slots(index.data, "blob", meta), strict=True)
        try:
            for head, blob in walks:
                row = next(rows, None)
                if row is None or not head.key == blob.key == row["key"].tobytes() or blob.offset != row["offset"]:
                    return False
                header, facts = row["header"].tobytes(), row["facts"].tobytes()
                record = os.pread(file.fileno(), min(head.length, RECORD_BYTES + 1), head.offset)
                payload_bytes = int.from_bytes(header[_PAYLOAD_BYTES], "little")
                if record != pack_record(header, facts, blob.key) or blob.length != HEADER_BYTES + payload_bytes:
                    return False
                count += 1
                if not count % _BATCH and over():
                    return True
        except ValueError:  # one database has more entries than the other
            return False
    return count == index.entries
