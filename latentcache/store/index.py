"""The column index of a sealed shard: every key with its header, its facts and the place of its value.

``index.npy`` is one packed array, sorted by key; ``shard.json`` beside it says how large the shard is and which
transaction it ends with, so that offsets are trusted only while the file is the one they were taken from.
With it nothing but payloads is ever read from ``data.mdb``: 300 000 headers load in 2 ms instead of 0.8 s.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.store.entry import FACTS_BYTES, HEADER_BYTES, unpack_header
from latentcache.store.layout import read_json, write_atomically, write_json
from latentcache.store.pages import Meta, Slot, read_meta, slots

INDEX_DTYPE = np.dtype(
    [
        ("key", "u1", (KEY_BYTES,)),
        ("header", "u1", (HEADER_BYTES,)),
        ("facts", "u1", (FACTS_BYTES,)),
        ("offset", "<u8"),  # of the header, in bytes from the start of data.mdb
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """What a sealed shard holds."""

    folder: Path
    rows: NDArray[Any]
    """Structured array of INDEX_DTYPE, sorted by key."""
    transaction: int
    """Transaction the shard ends with."""

    @property
    def data(self) -> Path:
        """The LMDB file."""
        return self.folder / "data.mdb"

    def keys(self) -> list[bytes]:
        """All keys, 32 bytes each, sorted."""
        flat = np.ascontiguousarray(self.rows["key"]).tobytes()
        return [flat[start : start + KEY_BYTES] for start in range(0, len(flat), KEY_BYTES)]


def write_index(folder: Path) -> int:
    """Index a closed shard; returns the number of entries.

    Raises:
        CacheDamagedError: The shard is truncated, or its two databases disagree.
        CorruptEntryError: A header fails its check.
    """
    data = folder / "data.mdb"
    meta = read_meta(data)
    rows = collect_rows(data)
    payload = rows.tobytes()
    write_atomically(folder / "index.npy", _npy_bytes(rows))
    write_json(
        folder / "shard.json",
        {
            "schema": 1,
            "entries": len(rows),
            "data_bytes": meta.file_bytes,
            "page_size": meta.page_size,
            "transaction": meta.transaction,
            "index_checksum": f"{checksum(payload):016x}",
            "byte_order": "little",
        },
    )
    return len(rows)


def load_index(folder: Path) -> ShardIndex:
    """Open a sealed shard's index and check that it belongs to the shard as it is now.

    Raises:
        CacheDamagedError: The index is damaged, or the shard is truncated or another one.
    """
    facts = read_json(folder / "shard.json")
    meta = read_meta(folder / "data.mdb")
    _check_identity(folder, facts, meta)
    try:
        rows: NDArray[Any] = np.load(folder / "index.npy", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CacheDamagedError("a shard's index cannot be read", where=str(folder), why=str(error)) from error
    if rows.dtype != INDEX_DTYPE or f"{checksum(rows.tobytes()):016x}" != facts.get("index_checksum"):
        raise CacheDamagedError("a shard's index is damaged", where=str(folder / "index.npy"))
    return ShardIndex(folder=folder, rows=rows, transaction=meta.transaction)


def _check_identity(folder: Path, facts: dict[str, Any], meta: Meta) -> None:
    found = {"data_bytes": meta.file_bytes, "transaction": meta.transaction, "page_size": meta.page_size}
    for name, value in found.items():
        if facts.get(name) != value:
            raise CacheDamagedError(
                "a shard is not the one its index was made from",
                where=str(folder),
                why=f"{name}: expected {facts.get(name)}, found {value}",
            )


def collect_rows(data: Path) -> NDArray[Any]:
    """One row per entry, from the two databases, which must name the same keys."""
    heads, blobs = _slots_or_none(data, "head"), _slots_or_none(data, "blob")
    if [slot.key for slot in heads] != [slot.key for slot in blobs]:
        raise CacheDamagedError("a shard's two databases disagree", where=str(data))
    rows = np.zeros(len(blobs), dtype=INDEX_DTYPE)
    descriptor = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for row, head, blob in zip(rows, heads, blobs, strict=True):
            record = os.pread(descriptor, HEADER_BYTES + FACTS_BYTES, head.offset)
            header = unpack_header(record[:HEADER_BYTES], blob.key)
            if blob.length != HEADER_BYTES + header.payload_bytes:
                raise CorruptEntryError("an entry's length is wrong", key=blob.key.hex(), where=str(data))
            row["key"] = np.frombuffer(blob.key, dtype=np.uint8)
            row["header"] = np.frombuffer(record[:HEADER_BYTES], dtype=np.uint8)
            row["facts"] = np.frombuffer(record[HEADER_BYTES:], dtype=np.uint8)
            row["offset"] = blob.offset
    finally:
        os.close(descriptor)
    return rows


def _slots_or_none(data: Path, database: str) -> list[Slot]:
    """The slots of a database; none when the builder died before it was made."""
    try:
        return list(slots(data, database))
    except CacheDamagedError as error:
        if "has no database" in error.what:
            return []
        raise


def _npy_bytes(rows: NDArray[Any]) -> bytes:
    """The array in ``.npy`` format 1.0, written by numpy's own writer."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, rows, allow_pickle=False)
    return buffer.getvalue()
