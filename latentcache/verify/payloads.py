"""Checks that read every byte: payloads against their checksums, values that are not finite, pages of a shard.

Guarantee: what passes here cannot fail in a loader: headers are held by the same function, and a batch in which
anything is odd is read again, entry by entry, by the reader of single entries, which says why. Nothing is mapped.
Memory does not grow with the number of payloads: each of two threads has one buffer.
Cost beside reading and xxh3: two passes for the largest exponent, and 1 µs per entry for the pages.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import MissingEntryError, StoreError
from latentcache.failpoint import failpoint
from latentcache.geometry.sizes import latent_size
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.store.entry import HEADER_BYTES, numpy_dtype
from latentcache.store.generation import Generation
from latentcache.store.headers import KEYED_BYTES, headers_hold, keyed_headers, payload_checksums
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader
from latentcache.store.token_generation import AnyGeneration
from latentcache.verify.portions import Portion, by_place
from latentcache.verify.trees import pages_found

Message = dict[str, Any]
"""``{"shard": n}`` before a shard; ``{"row", "category", "reason", "found"}`` and ``{"pages": n, "found"}``: damage;
``{"upto": rows, "bytes": b}`` for what was read of the shard so far; ``{"end": n}`` after it. JSON values only."""

#: Words that carry one value, their exponent bits, and what has the sign as well.
EXPONENT = {
    "float16": ("<u2", "<i2", 0x7C00, 0xFC00),
    "bfloat16": ("<u2", "<i2", 0x7F80, 0xFF80),
    "float32": ("<u4", "<i4", 0x7F80_0000, 0xFF80_0000),
}
#: Rows that are looked at together: a read has three parts for each, and no system lets it have more than 1024.
_BATCH = 256
#: Reading and hashing let go of the interpreter's lock.
_THREADS = 2
#: Bytes read at once, and the largest gap between two entries that is read over.
_READ_BYTES, _GAP_BYTES = 1 << 21, 1 << 15


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
    with ThreadPoolExecutor(_THREADS) as pool:
        look = _Look(reader=reader, over=over)
        try:
            for number in shards:
                portions = by_place(generation, number, chosen)
                found = _payloads(pool, look, portions)
                yield from scan_shard(layout, generation, number, found, pages=pages, over=over)
        finally:
            pool.shutdown(cancel_futures=True)
            reader.close()


def scan_shard(
    layout: CacheLayout,
    generation: AnyGeneration,
    number: int,
    payloads: Iterator[Message],
    *,
    pages: bool,
    over: Callable[[], bool],
) -> Iterator[Message]:
    """One shard, whatever its entries hold.

    Args:
        layout: The cache.
        generation: What the entries should be.
        number: Position of the shard in the generation's list.
        payloads: What reading its payloads says.
        pages: Whether to walk its pages.
        over: Whether to stop.
    """
    yield {"shard": number}
    failpoint("scan-shard")
    yield from payloads
    if over():
        return
    found = pages_found(layout, generation.shards[number], over) if pages else ""
    if found:
        yield {"pages": number, "found": found}
    yield {"end": number}


def not_finite(words_of: NDArray[Any], dtype: str) -> bool:
    """Whether any value is NaN or infinite, by its exponent bits: largest as signed words, and as unsigned ones.

    Args:
        words_of: Values of a storage type in any shape, as unsigned words.
        dtype: The storage type.
    """
    unsigned, signed, plus, minus = EXPONENT[dtype]
    largest = np.maximum.reduce
    return bool(
        largest(words_of.view(signed), axis=None) >= plus or largest(words_of.view(unsigned), axis=None) >= minus
    )


def _payloads(pool: ThreadPoolExecutor, look: _Look, portions: Iterator[Portion]) -> Iterator[Message]:
    """What is wrong in one portion after the other, until there is no time."""
    done = 0
    for portion in portions:
        yield from _portion(pool, look, portion, done)
        done += len(portion)
        if look.over():
            return


def _portion(pool: ThreadPoolExecutor, look: _Look, rows: Portion, done: int) -> Iterator[Message]:
    """Rows whose entry a loader would refuse, or that holds NaN or infinity, and how far it came after ``done``."""
    starts = [0, *(np.flatnonzero(np.diff(rows.bucket)) + 1).tolist(), len(rows)]
    batches = [
        rows[start : min(start + _BATCH, last)]
        for first, last in pairwise(starts)
        for start in range(first, last, _BATCH)
    ]
    for batch, found in zip(batches, pool.map(look, batches), strict=True):
        if found is None:
            return
        yield from found[:-1]
        done += len(batch)
        yield {"upto": done, **found[-1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """Looks at a batch of one shape; each thread has a buffer of its own."""

    reader: EntryReader
    over: Callable[[], bool]
    own: threading.local = field(default_factory=threading.local)

    def __call__(self, batch: Portion) -> list[Message] | None:
        """What is wrong in it, and in the end how many bytes it has; None where there is no time."""
        if self.over():
            return None
        spec, generation = self.reader.generation.recipe.encoder, self.reader.generation
        cells = latent_size(generation.buckets[int(batch.bucket[0])], spec.factor)
        out = np.empty((spec.stored_channels, cells.height, cells.width), dtype=numpy_dtype(spec.storage_dtype))
        length = HEADER_BYTES + out.nbytes
        wanted = max(_READ_BYTES, length) + _GAP_BYTES
        if len(getattr(self.own, "buffer", b"")) < wanted:
            self.own.buffer = bytearray(wanted)
        well = _all_well(self.reader, batch, out.shape, length, memoryview(self.own.buffer))
        found = [] if well else list(_one_by_one(self.reader, batch.row, out))
        return [*found, {"bytes": len(batch) * length}]


def _all_well(reader: EntryReader, rows: Portion, shape: tuple[int, ...], length: int, buffer: memoryview) -> bool:
    """Whether a batch of one shape is whole and finite. Says nothing of which entry is not."""
    dtype = reader.generation.recipe.encoder.storage_dtype
    distinct = _distinct(rows.offset, rows.key)
    if distinct is None:
        return False
    rows = rows[distinct]
    keyed, sums = keyed_headers(rows.key), list[int]()
    try:
        file = reader.descriptor(int(rows.shard[0]))
        for run in _runs(rows.offset.astype(np.int64), length):
            heads = keyed[len(sums) : len(sums) + len(run)]
            payloads = _read_run(file, run, heads, length, buffer)
            if payloads is None:
                return False
            sums += map(checksum, payloads)
            values = buffer[: len(run) * (length - HEADER_BYTES)]
            if not_finite(np.frombuffer(values, dtype=EXPONENT[dtype][0]), dtype):
                return False
    except (OSError, StoreError):
        return False
    return payload_checksums(keyed) == sums and headers_hold(keyed, shape, dtype)


def _distinct(offsets: NDArray[np.uint64], keys: NDArray[np.uint8]) -> NDArray[np.bool_] | None:
    """(B,) the rows to be read where several share an entry, by offset; None where their keys contradict that."""
    again = offsets[1:] == offsets[:-1]
    if (keys[1:] != keys[:-1])[again].any():
        return None
    return np.concatenate(([True], ~again))


def _read_run(
    file: int, run: list[int], heads: NDArray[np.uint8], length: int, buffer: memoryview
) -> list[memoryview] | None:
    """Entries read at once: headers into their rows, payloads one behind the other. None where the file ends."""
    payload_bytes, end, parts = length - HEADER_BYTES, run[0], list[memoryview]()
    payloads = [buffer[at : at + payload_bytes] for at in range(0, len(run) * payload_bytes, payload_bytes)]
    flat, between = heads.reshape(-1).data, buffer[-_GAP_BYTES:]
    for place, offset, payload in zip(range(KEY_BYTES, len(flat), KEYED_BYTES), run, payloads, strict=True):
        parts += between[: offset - end], flat[place : place + HEADER_BYTES], payload
        end = offset + length
    return payloads if os.preadv(file, parts, run[0]) == end - run[0] else None


def _runs(offsets: NDArray[np.int64], length: int) -> Iterator[list[int]]:
    """Entries that lie so close together that they are read at once, as far as the buffer goes."""
    gaps = np.diff(offsets) - length
    for part in np.split(offsets, np.flatnonzero((gaps < 0) | (gaps > _GAP_BYTES)) + 1):
        first = 0
        while first < len(part):
            last = int(np.searchsorted(part, part[first] + (_READ_BYTES - length), side="right"))
            yield part[first : max(last, first + 1)].tolist()
            first = max(last, first + 1)


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
            if not_finite(out.view(EXPONENT[dtype][0]), dtype):
                why = "it holds NaN or infinity"
                yield {"row": row, "category": "corrupt", "reason": "non-finite", "found": why}
