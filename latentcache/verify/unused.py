"""Payloads that no sample needs: a later build that needs such an entry finds it by its key and takes it as it is.

Guarantee: every entry of a shard in use that the generation does not need is held against its header, its checksum
and its values, whatever recipe made it. Nothing is mapped. Cost: reading them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.failpoint import failpoint
from latentcache.identity.content import checksum
from latentcache.store.durable import open_file
from latentcache.store.entry import HEADER_BYTES, unpack_header
from latentcache.store.index import open_index
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import AnyGeneration
from latentcache.verify.payloads import EXPONENT, Message, not_finite
from latentcache.verify.portions import of_shard

#: Entries between two words on how far it came.
_BATCH = 256


def scan_unused(
    layout: CacheLayout, generation: AnyGeneration, shard: str, *, over: Callable[[], bool] = bool
) -> Iterator[Message]:
    """Read what nobody needs of one shard, in the messages of ``scan_shards``; damage is ``{"unused": shard, ...}``.

    Args:
        layout: The cache.
        generation: Whose entries are left out: they are read with their samples.
        shard: Name of a sealed shard that is in use.
        over: Asked before each entry whether to stop.
    """
    yield {"shard": shard}
    failpoint("scan-shard")
    try:
        descriptor = open_file(layout.shards / shard / "data.mdb")
    except OSError as error:
        yield {"unused": shard, "key": "", "reason": "unused", "found": error.strerror or str(error)}
        return
    try:
        count = num_bytes = 0
        for entry in _entries(layout, generation, shard):
            if over():
                return
            found, size = _look(descriptor, entry)
            if found:
                yield {"unused": shard, "key": entry["key"].tobytes().hex(), **found}
            count, num_bytes = count + 1, num_bytes + size
            if not count % _BATCH:
                yield {"upto": count, "bytes": num_bytes}
                num_bytes = 0
        yield {"upto": count, "bytes": num_bytes}
    except (OSError, StoreError) as error:
        yield {"unused": shard, "key": "", "reason": "unused", "found": str(error)}
        return
    finally:
        os.close(descriptor)
    yield {"end": shard}


def _entries(layout: CacheLayout, generation: AnyGeneration, shard: str) -> Iterator[Any]:
    """The rows of a shard's index that the generation does not point to."""
    index = open_index(layout.shards / shard)
    if shard not in generation.shards:
        for part in index.slices():
            yield from part
        return
    for met in of_shard(generation, generation.shards.index(shard)):
        needed = np.sort(met.portion.offset)
        for part in index.slices(contents=met.contents):
            yield from part[_unneeded(part["offset"], needed)]


def _unneeded(offsets: NDArray[np.uint64], needed: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """(n,) which offsets are not in ``needed``, which is sorted."""
    if not len(needed):
        return np.ones(len(offsets), dtype=np.bool_)
    place = np.minimum(np.searchsorted(needed, offsets), len(needed) - 1)
    free: NDArray[np.bool_] = needed[place] != offsets
    return free


def _look(descriptor: int, entry: Any) -> tuple[dict[str, str], int]:
    """What is wrong with one entry, if anything, and its size in bytes."""
    packed = entry["header"].tobytes()
    try:
        header = unpack_header(packed, entry["key"].tobytes())
        size = HEADER_BYTES + header.payload_bytes
        if int(entry["offset"]) + size > os.fstat(descriptor).st_size:
            return {"reason": "unused", "found": "it lies beyond the end of the file"}, 0
        value = memoryview(os.pread(descriptor, size, int(entry["offset"])))
    except (OSError, StoreError, OverflowError) as error:
        return {"reason": "unused", "found": str(error)}, 0
    if len(value) != size or value[:HEADER_BYTES] != packed:
        return {"reason": "unused", "found": "its header is not the one in the index"}, size
    payload, found = value[HEADER_BYTES:], checksum(value[HEADER_BYTES:])
    if found != header.payload_checksum:
        return {
            "reason": "unused",
            "found": f"checksum: expected {header.payload_checksum:016x}, found {found:016x}",
        }, size
    words = EXPONENT.get(header.dtype)
    if words is not None and not_finite(np.frombuffer(payload, dtype=words[0]), header.dtype):
        return {"reason": "unused-non-finite", "found": "it holds NaN or infinity"}, size
    return {}, size
