"""The column index of a sealed shard: every key with its header, its facts and the place of its value.

``index.npy`` is one packed array, sorted by key; ``shard.json`` beside it says how large the shard is and which
transaction it ends with, so that offsets are trusted only while the file is the one they were taken from.
With it nothing but payloads is ever read from ``data.mdb``: 300 000 headers load in 2 ms instead of 0.8 s.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError
from latentcache.identity.content import HASH_BYTES, checksum, checksum_of
from latentcache.identity.key import KEY_BYTES
from latentcache.store.columns import checked_bytes, npy_array, npy_bytes, npy_form
from latentcache.store.durable import open_file, read_json, write_atomically, write_json
from latentcache.store.entry import FACTS_BYTES, HEADER_BYTES, RECORD_BYTES, unpack_record
from latentcache.store.pages import Meta, Slot, read_meta, slots

INDEX_DTYPE = np.dtype(
    [
        ("key", "u1", (KEY_BYTES,)),
        ("header", "u1", (HEADER_BYTES,)),
        ("facts", "u1", (FACTS_BYTES,)),
        ("offset", "<u8"),  # of the header, in bytes from the start of data.mdb
    ]
)

#: Bytes read at a time of a file that is only hashed, and more than a ``.npy`` header has.
_READ_BYTES, _FRONT_BYTES = 1 << 20, 4096
#: Rows given at once.
_ROWS = 1 << 13
#: Where a key has its content hash, and all that the first 16 bits of one can be.
_CONTENT_AT, _ALL = KEY_BYTES - HASH_BYTES - 8, range(1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """What a sealed shard holds."""

    folder: Path
    rows: NDArray[Any]
    """Structured array of INDEX_DTYPE, sorted by key."""
    transaction: int
    """Transaction the shard ended with when it was sealed."""

    @property
    def data(self) -> Path:
        """The LMDB file."""
        return self.folder / "data.mdb"

    def keys(self) -> list[bytes]:
        """All keys, 32 bytes each, sorted."""
        flat = np.ascontiguousarray(self.rows["key"]).tobytes()
        return [flat[start : start + KEY_BYTES] for start in range(0, len(flat), KEY_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFile:
    """The index of a sealed shard, seen to be whole and to belong to the shard; its rows are read in slices."""

    folder: Path
    entries: int
    start: int
    """Byte at which the rows begin."""

    @property
    def data(self) -> Path:
        """The LMDB file."""
        return self.folder / "data.mdb"

    def slices(self, size: int = 0, contents: range = _ALL) -> Iterator[NDArray[Any]]:
        """The rows in order, as structured arrays of INDEX_DTYPE with ``size`` rows at most.

        Args:
            size: As said; 0 for 8192.
            contents: Only rows whose content hash begins with one of these numbers of 16 bits, big endian.

        Raises:
            CacheDamagedError: They cannot be read any more.
        """
        size = size or _ROWS
        with _reading(self.folder / "index.npy") as descriptor:
            for span in [range(self.entries)] if contents == _ALL else self._spans(descriptor, contents):
                for first in span[::size]:
                    yield self._read(descriptor, first, min(size, span.stop - first))

    def rows(self, first: int, count: int) -> NDArray[Any]:
        """(count,) rows from ``first`` on, as they are in the index. Raises as :meth:`slices`."""
        with _reading(self.folder / "index.npy") as descriptor:
            return self._read(descriptor, first, count)

    def _read(self, descriptor: int, first: int, count: int) -> NDArray[Any]:
        path, width = self.folder / "index.npy", INDEX_DTYPE.itemsize
        data = os.pread(descriptor, count * width, self.start + first * width)
        if len(data) != count * width:
            raise CacheDamagedError(f"{path.name} is damaged", where=str(path), why="it has become shorter")
        return np.frombuffer(data, dtype=INDEX_DTYPE)

    def _spans(self, descriptor: int, contents: range) -> Iterator[range]:
        """Where such contents lie: one run of rows for each kind, variant and size, which come first in a key."""
        row, rows = 0, range(self.entries)

        def front(row: int) -> bytes:
            return os.pread(descriptor, _CONTENT_AT + 2, self.start + row * INDEX_DTYPE.itemsize)

        while row < self.entries:
            group = front(row)[:_CONTENT_AT]
            end = bisect_right(rows, group, lo=row + 1, key=lambda at: front(at)[:_CONTENT_AT])
            low, high = (group + number.to_bytes(2, "big") for number in (contents[0], contents[-1]))
            first = bisect_left(rows, low, lo=row, hi=end, key=front)
            yield range(first, bisect_right(rows, high, lo=first, hi=end, key=front))
            row = end


def rows_at(index: ShardIndex, offsets: NDArray[np.uint64]) -> NDArray[np.intp]:
    """(N,) the row of the index at each offset, -1 where no entry begins there. About 0.2 µs per entry."""
    if not len(index.rows):
        return np.full(len(offsets), -1, dtype=np.intp)
    known = np.ascontiguousarray(index.rows["offset"])
    order = np.argsort(known, kind="stable")
    rising = known[order]  # looked up in order: with sorter= every step of a search is a cache miss of its own
    place = np.minimum(np.searchsorted(rising, offsets), len(rising) - 1)
    return np.where(rising[place] == offsets, order[place], -1)


def holds(index: ShardIndex, keys: NDArray[np.uint8], offsets: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """(N,) whether the shard has each key (N, 32) at its offset, as its index says."""
    found = rows_at(index, offsets)
    same = (np.ascontiguousarray(index.rows["key"])[found] == keys).all(axis=1) if len(index.rows) else found >= 0
    held: NDArray[np.bool_] = (found >= 0) & same
    return held


def write_index(folder: Path) -> int:
    """Index a closed shard; returns the number of entries.

    Raises:
        CacheDamagedError: The shard is truncated, or its two databases disagree.
        CorruptEntryError: A header or the facts beside it fail their check.
    """
    data = folder / "data.mdb"
    meta = read_meta(data)
    rows = collect_rows(data, meta)
    written = npy_bytes(rows)
    write_atomically(folder / "index.npy", written)
    write_json(
        folder / "shard.json",
        {
            "schema": 1,
            "entries": len(rows),
            "data_bytes": meta.file_bytes,
            "page_size": meta.page_size,
            "transaction": meta.transaction,
            "index_checksum": f"{checksum(written):016x}",
            "byte_order": "little",
        },
    )
    return len(rows)


def load_index(folder: Path) -> ShardIndex:
    """Open a sealed shard's index and check that it belongs to the shard as it is now.

    Raises:
        CacheDamagedError: The index is damaged, or the shard is truncated or another one.
    """
    index = load_rows(folder)
    _check_identity(folder, read_json(folder / "shard.json"), read_meta(folder / "data.mdb"))
    return index


def open_index(folder: Path) -> IndexFile:
    """As :func:`load_index`, without holding the rows.

    Raises:
        CacheDamagedError: The index is damaged, or the shard is truncated or another one.
    """
    facts, path = read_json(folder / "shard.json"), folder / "index.npy"
    with _reading(path) as descriptor:
        found = f"{checksum_of(iter(lambda: os.read(descriptor, _READ_BYTES), b'')):016x}"
        if found != facts.get("index_checksum"):
            why = f"checksum: expected {facts.get('index_checksum')}, found {found}"
            raise CacheDamagedError(f"{path.name} is damaged", where=str(path), why=why)
        size = os.fstat(descriptor).st_size
        dtype, shape, start = npy_form(os.pread(descriptor, _FRONT_BYTES, 0), path)
    entries = facts.get("entries")
    if dtype != INDEX_DTYPE or shape != (entries,) or size != start + shape[0] * INDEX_DTYPE.itemsize:
        why = f"expected {entries} rows, found {dtype} {shape}"
        raise CacheDamagedError("a shard's index is damaged", where=str(path), why=why)
    _check_identity(folder, facts, read_meta(folder / "data.mdb"))
    return IndexFile(folder=folder, entries=shape[0], start=start)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[int]:
    """A descriptor of a file of the cache, whose trouble counts as damage."""
    try:
        descriptor = open_file(path)
    except OSError as error:
        raise CacheDamagedError(f"{path.name} cannot be read", where=str(path), why=str(error)) from error
    try:
        yield descriptor
    except OSError as error:
        raise CacheDamagedError(f"{path.name} cannot be read", where=str(path), why=str(error)) from error
    finally:
        os.close(descriptor)


def load_rows(folder: Path) -> ShardIndex:
    """What a sealed shard should hold, whatever became of its ``data.mdb``.

    Raises:
        CacheDamagedError: The index itself is damaged.
    """
    facts, path = read_json(folder / "shard.json"), folder / "index.npy"
    data = checked_bytes(path, facts.get("index_checksum"))
    rows = npy_array(data, path)
    if rows.dtype != INDEX_DTYPE or rows.ndim != 1 or len(rows) != facts.get("entries"):
        why = f"expected {facts.get('entries')} rows, found {rows.dtype} {rows.shape}"
        raise CacheDamagedError("a shard's index is damaged", where=str(path), why=why)
    transaction = facts.get("transaction")
    return ShardIndex(folder=folder, rows=rows, transaction=transaction if isinstance(transaction, int) else 0)


def _check_identity(folder: Path, facts: dict[str, Any], meta: Meta) -> None:
    found = {"data_bytes": meta.file_bytes, "transaction": meta.transaction, "page_size": meta.page_size}
    for name, value in found.items():
        if facts.get(name) != value:
            raise CacheDamagedError(
                "a shard is not the one its index was made from",
                where=str(folder),
                why=f"{name}: expected {facts.get(name)}, found {value}",
            )


def collect_rows(data: Path, meta: Meta | None = None) -> NDArray[Any]:
    """One row per entry, from the two databases, which must name the same keys.

    Raises:
        CacheDamagedError: The shard is truncated, its pages contradict themselves, or its databases disagree.
        CorruptEntryError: A header or the facts beside it fail their check.
    """
    meta = read_meta(data) if meta is None else meta
    heads, blobs = list(slots(data, "head", meta)), list(slots(data, "blob", meta))
    if [slot.key for slot in heads] != [slot.key for slot in blobs]:
        raise CacheDamagedError("a shard's two databases disagree", where=str(data))
    rows = np.zeros(len(blobs), dtype=INDEX_DTYPE)
    descriptor = open_file(data)
    try:
        for row, head, blob in zip(rows, heads, blobs, strict=True):
            record = os.pread(descriptor, min(head.length, RECORD_BYTES), head.offset)
            _fill_row(row, blob, record, data)
    finally:
        os.close(descriptor)
    return rows


def _fill_row(row: Any, blob: Slot, record: bytes, data: Path) -> None:
    """Check one record of ``head`` against its key and its value's length, and put it in its row."""
    if len(blob.key) != KEY_BYTES:
        raise CacheDamagedError("a shard holds a key that is none of ours", where=str(data), why=blob.key.hex())
    header, facts = unpack_record(record, blob.key)
    if blob.length != HEADER_BYTES + header.payload_bytes:
        why = f"expected {HEADER_BYTES + header.payload_bytes} bytes, found {blob.length}"
        raise CorruptEntryError("an entry's length is wrong", key=blob.key.hex(), where=str(data), why=why)
    row["key"] = np.frombuffer(blob.key, dtype=np.uint8)
    row["header"] = np.frombuffer(record[:HEADER_BYTES], dtype=np.uint8)
    row["facts"] = np.frombuffer(facts, dtype=np.uint8)
    row["offset"] = blob.offset
