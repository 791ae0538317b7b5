"""Every entry that is committed in a cache, whichever build wrote it: what a new build need not encode.

Cost: about 250 bytes of memory and 1 µs per entry.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from latentcache.errors import CacheDamagedError
from latentcache.geometry.sizes import Size
from latentcache.identity.content import HASH_BYTES, checksum
from latentcache.identity.key import EntryKey
from latentcache.store.durable import open_file, refuse_unreadable
from latentcache.store.entry import HEADER_BYTES, EntryFacts, EntryHeader, unpack_facts, unpack_header
from latentcache.store.index import ShardIndex, load_index
from latentcache.store.layout import CacheLayout

#: Rows are 32-bit numbers everywhere.
_ROW_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """One committed entry and where it lies."""

    key: bytes
    shard: str
    offset: int
    header: EntryHeader
    facts: EntryFacts


class Catalog:
    """Looks entries up by key, or by what their pixels were."""

    def __init__(self, indexes: Sequence[ShardIndex], damaged: Sequence[str] = ()) -> None:
        self._indexes = tuple(indexes)
        self.damaged = tuple(damaged)
        """Shards that could not be opened; their entries count as missing."""
        self._places: dict[bytes, int] = {}
        """Key -> index and row in one number: a pair would take 60 bytes more."""
        self._by_pixels: dict[bytes, bytes] | None = None
        for position, index in enumerate(self._indexes):
            for row, key in enumerate(index.keys()):
                self._places.setdefault(key, position << _ROW_BITS | row)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def keys(self) -> list[bytes]:
        """All committed keys."""
        return list(self._places)

    def locate(self, key: bytes) -> Located | None:
        """The entry under ``key``, or None."""
        place = self._places.get(key)
        if place is None:
            return None
        index = self._indexes[place >> _ROW_BITS]
        row = index.rows[place & ((1 << _ROW_BITS) - 1)]
        return Located(
            key=key,
            shard=index.folder.name,
            offset=int(row["offset"]),
            header=unpack_header(row["header"].tobytes(), key),
            facts=unpack_facts(row["facts"].tobytes(), EntryKey.unpack(key).bucket),
        )

    def with_pixels(self, pixel_hash: bytes, bucket: Size, recipe: bytes) -> Located | None:
        """An entry of the same recipe and bucket made from the very same pixels, or None.

        Its latents hold for the new file too: only its metadata differs.
        """
        if self._by_pixels is None:
            self._by_pixels = self._index_pixels()
        key = self._by_pixels.get(pixel_hash + _group(bucket, recipe))
        return None if key is None else self.locate(key)

    def payload(self, entry: Located) -> bytes | None:
        """The payload of an entry, or None when it fails its check."""
        return payload_of(entry, next(i for i in self._indexes if i.folder.name == entry.shard).folder.parent)

    def _index_pixels(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for index in self._indexes:
            hashes = np.ascontiguousarray(index.rows["facts"][:, :HASH_BYTES]).tobytes()
            for row, key in enumerate(index.keys()):
                unpacked = EntryKey.unpack(key)
                name = hashes[row * HASH_BYTES : (row + 1) * HASH_BYTES] + _group(unpacked.bucket, unpacked.recipe)
                found.setdefault(name, key)
        return found


def payload_of(entry: Located, shards: Path) -> bytes | None:
    """The payload of an entry of a sealed shard, or None when it fails its check.

    Args:
        entry: From a catalogue.
        shards: The folder of all shards.
    """
    try:
        with os.fdopen(open_file(shards / entry.shard / "data.mdb"), "rb") as file:
            file.seek(entry.offset + HEADER_BYTES)
            payload = file.read(entry.header.payload_bytes)
    except OSError:
        return None
    whole = len(payload) == entry.header.payload_bytes
    return payload if whole and checksum(payload) == entry.header.payload_checksum else None


def load_catalog(layout: CacheLayout) -> Catalog:
    """Open the index of every sealed shard; damaged shards are named, not fatal.

    Raises:
        CacheDamagedError: There is something else in the place of the folder of shards.
        StoreError: The system refuses to list the shards, or to read one of them.
    """
    layout.check_shards()
    indexes: list[ShardIndex] = []
    damaged: list[str] = []
    for folder in layout.sealed_shards():
        index = undamaged_index(folder)
        if index is None:
            damaged.append(folder.name)
        else:
            indexes.append(index)
    return Catalog(indexes, damaged)


def undamaged_index(folder: Path) -> ShardIndex | None:
    """The index of a sealed shard, or None where the shard is surely damaged.

    Raises:
        StoreError: The system refuses to read it: nobody knows whether it is damaged.
    """
    try:
        return load_index(folder)
    except CacheDamagedError as error:
        refuse_unreadable(error, folder)
        return None


def index_or_none(folder: Path) -> ShardIndex | None:
    """The index of a sealed shard, or None where it is damaged or cannot be read: for those who only look."""
    try:
        return load_index(folder)
    except CacheDamagedError:
        return None


def _group(bucket: Size, recipe: bytes) -> bytes:
    return f"{bucket}:".encode("ascii") + recipe
