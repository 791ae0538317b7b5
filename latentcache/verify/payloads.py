"""Checks that read every byte: payloads against their checksums, values that are not finite, pages of a shard.

Guarantee: what passes here cannot fail in a loader: headers are held by the same function, and a batch in which
anything is odd is read again, entry by entry, by the reader of single entries, which says why. Nothing is mapped.
Memory does not grow with the number of payloads: each of two threads has one buffer.
Cost beside reading and xxh3: two passes for the largest exponent, and 6 µs per entry for the pages.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import MissingEntryError, StoreError
from latentcache.failpoint import failpoint
from latentcache.geometry.sizes import latent_size
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.store.entry import FACTS_BYTES, HEADER_BYTES, RECORD_BYTES, numpy_dtype, pack_record
from latentcache.store.generation import Generation
from latentcache.store.headers import KEYED_BYTES, headers_hold, keyed_headers, payload_checksums
from latentcache.store.index import ShardIndex, load_index
from latentcache.store.layout import CacheLayout
from latentcache.store.pages import read_meta, slots
from latentcache.store.reader import EntryReader
from latentcache.verify.entries import words

Message = dict[str, Any]
"""``{"shard": n}`` before a shard; ``{"row", "category", "reason", "found"}`` and ``{"pages": n, "found"}``: damage;
``{"upto": rows, "bytes": b}`` for what was read of the shard so far; ``{"end": n}`` after it. JSON values only."""

#: Words that carry one value, their exponent bits, and what has the sign as well.
_EXPONENT = {
    "float16": ("<u2", "<i2", 0x7C00, 0xFC00),
    "bfloat16": ("<u2", "<i2", 0x7F80, 0xFF80),
    "float32": ("<u4", "<i4", 0x7F80_0000, 0xFF80_0000),
}
_BATCH = 256
#: Reading and hashing let go of the interpreter's lock.
_THREADS = 2
#: Bytes read at once, and the largest gap between two entries that is read over.
_READ_BYTES, _GAP_BYTES = 1 << 20, 1 << 15


def scan_shards(
    layout: CacheLayout,
    generation: Generation,
    shards: list[int],
    *,
    chosen: NDArray[np.bool_] | None = None,
    pages: bool = True,
    over: Callable[[], bool] = bool,
) -> Iterator[Message]:
    """Read the payloads of some shards.

    Args:
        layout: The cache.
        generation: What the entries should be.
        shards: Positions in the generation's list.
        chosen: (R,) which rows to read; all where it is not given.
        pages: Also walk the pages of each shard.
        over: Asked before each batch whether to stop.
    """
    reader = EntryReader(layout, generation)
    try:
        for number in shards:
            yield {"shard": number}
            failpoint("scan-shard")
            rows = reading_order(generation, number, chosen)
            yield from _payloads(reader, rows, over)
            if over():
                return
            found = _pages(layout, generation.shards[number], over) if pages else ""
            if found:
                yield {"pages": number, "found": found}
            yield {"end": number}
    finally:
        reader.close()


def reading_order(generation: Generation, shard: int, chosen: NDArray[np.bool_] | None) -> NDArray[np.intp]:
    """The rows of one shard by bucket and then by place, as they are read."""
    wanted = generation.rows.shard == shard
    rows = np.flatnonzero(wanted if chosen is None else wanted & chosen)
    order: NDArray[np.intp] = rows[np.lexsort((generation.rows.offset[rows], generation.rows.bucket[rows]))]
    return order


def not_finite(words_of: NDArray[Any], dtype: str) -> bool:
    """Whether any value is NaN or infinite, by its exponent bits: largest as signed words, and as unsigned ones.

    Args:
        words_of: Values of a storage type in any shape, as unsigned words.
        dtype: The storage type.
    """
    unsigned, signed, plus, minus = _EXPONENT[dtype]
    return bool(words_of.view(signed).max() >= plus or words_of.view(unsigned).max() >= minus)


def _payloads(reader: EntryReader, rows: NDArray[np.intp], over: Callable[[], bool]) -> Iterator[Message]:
    """Rows whose entry a loader would refuse, or that holds NaN or infinity, and how far it came."""
    buckets = reader.generation.rows.bucket[rows]
    starts = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(rows)]
    batches = [
        rows[start : min(start + _BATCH, last)]
        for first, last in pairwise(starts)
        for start in range(first, last, _BATCH)
    ]
    own, done = threading.local(), 0

    def look(batch: NDArray[np.intp]) -> list[Message] | None:
        return None if over() else _look(reader, batch, own)

    pool = ThreadPoolExecutor(_THREADS)
    try:
        for batch, found in zip(batches, pool.map(look, batches), strict=True):
            if found is None:
                return
            yield from found[:-1]
            done += len(batch)
            yield {"upto": done, **found[-1]}
    finally:
        pool.shutdown(cancel_futures=True)


def _look(reader: EntryReader, batch: NDArray[np.intp], own: threading.local) -> list[Message]:
    """What is wrong in one batch of one shape; in the end how many bytes it has."""
    spec, generation = reader.generation.recipe.encoder, reader.generation
    cells = latent_size(generation.buckets[int(generation.rows.bucket[batch[0]])], spec.factor)
    out = np.empty((spec.stored_channels, cells.height, cells.width), dtype=numpy_dtype(spec.storage_dtype))
    length = HEADER_BYTES + out.nbytes
    if getattr(own, "buffer", None) is None or len(own.buffer) < _READ_BYTES + length:
        own.buffer = bytearray(_READ_BYTES + length)
    well = _all_well(reader, batch, out.shape, length, memoryview(own.buffer))
    found = [] if well else list(_one_by_one(reader, batch, out))
    return [*found, {"bytes": len(batch) * length}]


def _all_well(
    reader: EntryReader, rows: NDArray[np.intp], shape: tuple[int, ...], length: int, buffer: memoryview
) -> bool:
    """Whether a batch of one shape is whole and finite. Says nothing of which entry is not."""
    generation, dtype = reader.generation, reader.generation.recipe.encoder.storage_dtype
    keyed = keyed_headers(generation.rows.key[rows])
    heads, sums = keyed.reshape(-1).data, list[int]()
    try:
        file = reader.descriptor(int(generation.rows.shard[rows[0]]))
        for run in _runs(generation.rows.offset[rows].tolist(), length):
            span = run[-1] + length - run[0]
            if os.preadv(file, [buffer[:span]], run[0]) != span:
                return False
            for offset in run:
                start = offset - run[0]
                place = len(sums) * KEYED_BYTES + KEY_BYTES
                heads[place : place + HEADER_BYTES] = buffer[start : start + HEADER_BYTES]
                payload = buffer[start + HEADER_BYTES : start + length]
                sums.append(checksum(payload))
                if not_finite(np.frombuffer(payload, dtype=_EXPONENT[dtype][0]), dtype):
                    return False
    except (OSError, StoreError):
        return False
    return payload_checksums(keyed) == sums and headers_hold(keyed, shape, dtype)


def _runs(offsets: list[int], length: int) -> Iterator[list[int]]:
    """Entries that lie so close together that they are read at once, as far as the buffer goes."""
    run: list[int] = []
    for offset in offsets:
        if run and (offset + length - run[0] > _READ_BYTES or offset - run[-1] > length + _GAP_BYTES):
            yield run
            run = []
        run.append(offset)
    if run:
        yield run


def _one_by_one(reader: EntryReader, rows: NDArray[np.intp], out: NDArray[Any]) -> Iterator[Message]:
    """What is wrong with which entry of a batch."""
    dtype = reader.generation.recipe.encoder.storage_dtype
    for row in rows.tolist():
        try:
            reader.read_into(row, out)
        except MissingEntryError as error:
            yield {"row": row, "category": "missing", "reason": "entry-lost", "found": error.what}
        except StoreError as error:
            yield {"row": row, "category": "corrupt", "reason": "payload", "found": error.why or error.what}
        else:
            if not_finite(out.view(_EXPONENT[dtype][0]), dtype):
                why = "it holds NaN or infinity"
                yield {"row": row, "category": "corrupt", "reason": "non-finite", "found": why}


def _pages(layout: CacheLayout, shard: str, over: Callable[[], bool]) -> str:
    """What is wrong with the pages of a shard, held against its index; empty where nothing is."""
    try:
        index = load_index(layout.shards / shard)
        return "" if _pages_agree(index, over) else "pages and index disagree"
    except (OSError, StoreError) as error:
        return words(error)


def _pages_agree(index: ShardIndex, over: Callable[[], bool]) -> bool:
    """Whether both databases of a shard hold what its index says, entry by entry, and no more; or time is over."""
    meta, count = read_meta(index.data), 0
    keys = index.keys()
    offsets = index.rows["offset"].tolist()
    with index.data.open("rb", buffering=0) as file:
        walks = zip(slots(index.data, "head", meta), slots(index.data, "blob", meta), strict=True)
        try:
            for head, blob in walks:
                if count >= len(keys) or not head.key == blob.key == keys[count] or blob.offset != offsets[count]:
                    return False
                row = index.rows[count]
                header, facts = row["header"].tobytes(), row["facts"][:FACTS_BYTES].tobytes()
                record = os.pread(file.fileno(), min(head.length, RECORD_BYTES + 1), head.offset)
                payload_bytes = int.from_bytes(header[16:24], "little")
                if record != pack_record(header, facts, blob.key) or blob.length != HEADER_BYTES + payload_bytes:
                    return False
                count += 1
                if not count % _BATCH and over():
                    return True
        except ValueError:  # one database has more entries than the other
            return False
    return count == len(keys)
