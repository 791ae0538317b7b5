"""What of a cache is needed, and moving entries to other shards without touching sealed ones.

A sealed shard is never changed and readers may hold it, so damaged and unneeded entries are left behind: a tombstone
beside the folder keeps builds from taking entries from it, and a new snapshot names other shards. Readers of older
snapshots go on; the collector removes the shard when no snapshot needs it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, StoreError
from latentcache.identity.content import checksum
from latentcache.store.atomic_io import make_folder, read_json, sync_folder
from latentcache.store.catalog import Catalog, catalog_of
from latentcache.store.index import ShardIndex, checked_index, load_index, open_shard_index
from latentcache.store.paths import CachePaths
from latentcache.store.publish import kept_rows, republish
from latentcache.store.snapshot import FieldColumns, FieldRows, Snapshot
from latentcache.value import Value

#: Bits of an offset in a file; a shard's number is above them.
_OFFSET_BITS = 44


class ShardUse(Value):
    """How much of a sealed shard is needed."""

    name: str
    entries: int
    """-1 if its index is damaged."""
    needed: int
    """Entries that a snapshot needs."""
    bytes: int
    """Of its file."""
    needed_bytes: int
    """Heads and payloads of the needed entries."""
    tombstoned: str
    """Why it was taken out of use; empty if it is in use."""


class StoredEntry(Value):
    """One committed item."""

    key: bytes
    shape: tuple[int, ...] = ()
    dtype: str = ""
    checksum: int = 0
    """xxh3-64 of the item's bytes."""
    intact: bool = False
    """True if head and payload of its entry pass their checks; else the others are empty."""


def shard_use(paths: CachePaths, snapshots: Sequence[Snapshot]) -> list[ShardUse]:
    """How much of each sealed shard these snapshots need, tombstoned shards too."""
    folders, found = paths.all_sealed(), []
    number = {folder.name: position for position, folder in enumerate(folders)}
    places, sizes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for snapshot in snapshots:
        own = np.array([number.get(name, -1) for name in snapshot.shards], dtype=np.int64)
        for rows in snapshot.fields.values():
            places.append(own[np.asarray(rows.shard)] << _OFFSET_BITS | np.asarray(rows.offset).astype(np.int64))
            sizes.append(np.asarray(rows.head) + np.asarray(rows.bytes).astype(np.int64))
    place, size = np.concatenate(places), np.concatenate(sizes)
    if len(snapshots) > 1:
        place, first = np.unique(place, return_index=True)
        size = size[first]
    shard = (place >> _OFFSET_BITS) + 1  # 0: a shard that is gone
    entries, num_bytes = (np.bincount(shard, one, len(folders) + 1)[1:] for one in (None, size))
    for folder, needed, needed_bytes in zip(folders, entries.tolist(), num_bytes.tolist(), strict=True):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.append(
                ShardUse(
                    name=folder.name,
                    entries=_entries(folder),
                    needed=needed,
                    bytes=(folder / "data.mdb").stat().st_size,
                    needed_bytes=int(needed_bytes),
                    tombstoned=_reason(paths, folder.name),
                )
            )
    return found


def relocate(
    paths: CachePaths,
    snapshot: Snapshot,
    moved: Mapping[str, str],
    drop: Mapping[str, NDArray[np.bool_]] | None = None,
    *,
    complete: bool,
) -> int:
    """Publish a snapshot whose entries are in other shards; entries that these lack lose their rows.

    Args:
        paths: The cache, whose builder lock the caller holds.
        snapshot: What is replaced.
        moved: Old shard -> new shard.
        drop: Field -> (E,) True for entries that lose their rows.
        complete: False if rows that are needed are lost.
    """
    names = list(dict.fromkeys([*snapshot.shards, *moved.values()]))
    indexes = {old: load_index(paths.shard(new)) for old, new in moved.items()}
    new_fields: dict[str, FieldColumns] = {}
    for name, rows in snapshot.fields.items():
        gone = np.zeros(rows.entries, dtype=np.bool_) | (drop or {}).get(name, False)
        columns = _moved(rows, snapshot, moved, indexes, names, gone)
        new_fields[name] = kept_rows(columns, ~gone[np.asarray(rows.entry)]) if gone.any() else columns
    return republish(paths, snapshot, fields=new_fields, shards=names, complete=complete)


def stored_catalog(cache: Path) -> Catalog:
    """Every committed item; those of a damaged shard as far as its index is intact, and only if no other has them."""
    paths, looked, damaged = CachePaths(cache), set[str](), list[ShardIndex]()
    found: list[ShardIndex] = []
    # Sealed shards are listed again at the end: a build may have sealed the one that was open.
    for listed in (paths.sealed_shards, paths.open_shards, paths.sealed_shards):
        for folder in listed():
            if folder.name in looked:
                continue
            looked.add(folder.name)
            try:
                found.append(open_shard_index(folder) if folder.suffix else checked_index(folder))
            except (StoreError, OSError):
                with contextlib.suppress(StoreError, OSError):
                    damaged.append(checked_index(folder, check_data=False))
    return catalog_of([*found, *damaged])


def stored_entries(cache: Path) -> Iterator[StoredEntry]:
    """Every committed item, read and checked. Errors as :func:`stored_catalog`."""
    catalog = stored_catalog(cache)
    order = catalog.all_places()
    rows = catalog.places(order)
    place = np.stack([rows.shard.astype(np.int64), rows.entry.astype(np.int64)])
    starts = np.flatnonzero((place[:, 1:] != place[:, :-1]).any(axis=0)) + 1
    for some in np.split(order, starts) if len(order) else ():
        found = catalog.stored(int(some[0]))
        numbers = {key.tobytes(): number for number, key in enumerate(found[0].item_keys())} if found else {}
        for key in (key.tobytes() for key in catalog.keys(some)):
            if found is None or key not in numbers:
                yield StoredEntry(key=key)
                continue
            header, _, payload = found
            array = header.item(memoryview(payload), numbers[key])
            own = checksum(array.tobytes())
            yield StoredEntry(key=key, shape=array.shape, dtype=header.dtype, checksum=own, intact=True)


def disk_bytes(path: Path) -> int:
    """Space that a file or folder takes, in bytes; a file that is renamed meanwhile counts once or not at all."""
    total = 0
    for place in [path, *(Path(folder, name) for folder, _, names in os.walk(path) for name in names)]:
        with contextlib.suppress(OSError):
            total += place.lstat().st_blocks * 512  # POSIX counts in blocks of 512 bytes
    return total


def to_scratch(paths: CachePaths, path: Path) -> Path:
    """Move what is to be removed out of the way in one step; a crash leaves it whole, here or there."""
    make_folder(paths.scratch)
    place = paths.scratch / f"{path.name}-{os.urandom(4).hex()}"
    path.rename(place)
    sync_folder(path.parent)
    return place


def _moved(
    rows: FieldRows,
    snapshot: Snapshot,
    moved: Mapping[str, str],
    indexes: Mapping[str, ShardIndex],
    names: Sequence[str],
    gone: NDArray[np.bool_],
) -> FieldColumns:
    """A field with its entries in their new places; marks those that the new shards lack in ``gone``."""
    shard, offset = np.array(rows.shard), np.array(rows.offset)
    for old, new in moved.items():
        held = np.flatnonzero(shard == snapshot.shards.index(old)) if old in snapshot.shards else np.zeros(0, np.intp)
        if not len(held):
            continue
        both = indexes[old].entry_keys(), rows.key[held]
        keys, wanted = (np.ascontiguousarray(one).view("S32")[:, 0] for one in both)
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)  # an index is in the order of keys
        there = keys[at] == wanted
        gone[held[~there]] = True
        shard[held], offset[held] = names.index(new), np.asarray(indexes[old].offset)[at]
    return replace(rows, shard=shard, offset=offset)


def _entries(folder: Path) -> int:
    try:
        return load_index(folder, check_data=False).entries
    except (CacheDamagedError, CorruptEntryError):
        return -1


def _reason(paths: CachePaths, shard: str) -> str:
    if not paths.tombstone(shard).exists():
        return ""
    with contextlib.suppress(CacheDamagedError):
        return str(read_json(paths.tombstone(shard)).get("reason", "")) or "unknown"
    return "unknown"
