"""Find the needed data of a cache, and copy entries to other shards without touching sealed ones.

A sealed shard is never changed and readers may hold it. An entry is copied only if its head belongs to its key and
head and payload pass their checks. It then has the same bytes. The new shard is made in ``scratch/`` and appears
among the shards in one step. The old one gets a tombstone, which keeps builds from taking entries from it, and a new
snapshot names the new one. The collector removes the old one when no snapshot needs it. Callers hold the lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, LatentcacheError, StoreError
from latentcache.identity.content import checksum
from latentcache.store.atomic_io import make_folder, opened, sync_folder, write_json, writing
from latentcache.store.catalog import Catalog, load_catalog
from latentcache.store.entry import NewEntry
from latentcache.store.index import checked_index, load_index, open_shard_index, whole_entry
from latentcache.store.paths import OPEN_SUFFIX, CachePaths
from latentcache.store.publish import OFFSET_BITS, NewSnapshot, kept_rows, place_number, publish_snapshot
from latentcache.store.shard import ShardWriter, seal_folder
from latentcache.store.snapshot import PLACE_DTYPE, Snapshot, open_snapshot

_COMMIT_BYTES = 16 << 20
#: Parts of a snapshot that stay when its entries move.
_KEPT = ("samples", "source", "rejected", "notes", "allow_failed", "demo")


class Salvaged(NamedTuple):
    """Outcome of salvaging one shard."""

    source: str
    shard: str
    """The new shard; empty if nothing was copied."""
    saved: int
    lost: int
    """Entries that were found and are damaged."""


class ShardUse(NamedTuple):
    """Needed part of a sealed shard."""

    name: str
    entries: int
    """-1 if its index is damaged."""
    needed: int
    """Entries that a snapshot needs."""
    bytes: int
    """Bytes of its file."""
    needed_bytes: int
    """Heads and payloads of the needed entries."""
    tombstoned: bool
    """True if it was taken out of use."""


class StoredEntry(NamedTuple):
    """One committed item."""

    key: bytes
    shape: tuple[int, ...] = ()
    dtype: str = ""
    checksum: int = 0
    """xxh3-64 of the item's bytes."""
    intact: bool = False
    """True if head and payload of its entry pass their checks; else the others are empty."""


def mend_shards(paths: CachePaths) -> list[Salvaged]:
    """Before a build: seal what dead builds left open, and salvage what is damaged. Returns what was damaged."""
    made = [recover_shard(paths, folder) for folder in paths.open_shards()]
    for name in load_catalog(paths).damaged:
        made.append(salvage(paths, paths.shard(name)))
        tombstone(paths, name, "damaged")
    return [one for one in made if one is not None]


def recover_shard(paths: CachePaths, folder: Path) -> Salvaged | None:
    """Seal the shard that a dead builder left open; a damaged one is salvaged and goes to ``quarantine/``."""
    data = folder / "data.mdb"
    with writing(folder):
        if not data.exists() or data.stat().st_size == 0:
            shutil.rmtree(folder)
            return None
        try:
            seal_folder(folder)
        except (CacheDamagedError, CorruptEntryError):
            made = salvage(paths, folder)
            set_aside(paths, folder)
            return made
    return None


def set_aside(paths: CachePaths, folder: Path) -> None:
    """Move a damaged folder of the cache to ``quarantine/``."""
    make_folder(paths.quarantine)
    folder.rename(paths.quarantine / f"{folder.name}-{os.getpid()}")
    sync_folder(paths.quarantine)


def salvage(paths: CachePaths, source: Path) -> Salvaged:
    """Copy every intact entry of a shard, sealed or not, into a new sealed one."""
    return copy_entries(paths, source, places_of(source))


def copy_entries(paths: CachePaths, source: Path, places: NDArray[Any]) -> Salvaged:
    """Copy entries of a shard, of this or another cache, into a new sealed one; ``places``: (n,) ``PLACE_DTYPE``."""
    name = os.urandom(8).hex()
    folder = paths.scratch / f"{name}{OPEN_SUFFIX}"
    make_folder(paths.scratch)
    saved = lost = size = 0
    try:
        with writing(folder), contextlib.closing(ShardWriter(folder)) as writer:
            batch: list[NewEntry] = []
            for entry in _intact(source / "data.mdb", places):
                if entry is None:
                    lost += 1
                    continue
                batch.append(entry)
                saved, size = saved + 1, size + len(entry.value)
                if size >= _COMMIT_BYTES:
                    writer.write(batch)
                    batch, size = [], 0
            writer.write(batch)
            sealed = writer.seal()
            if saved:
                make_folder(paths.shards)
                sealed.rename(paths.shard(name))
                sync_folder(paths.shards)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            paths.scratch.rmdir()
    return Salvaged(source.name, name if saved else "", saved, lost)


def tombstone(paths: CachePaths, shard: str, reason: str) -> None:
    """Take a sealed shard out of use for builds, durably; the reason (``damaged`` or ``compacted``) is for people."""
    path = paths.tombstone(shard)
    if not path.exists():
        since = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(path, {"schema": 1, "reason": reason, "since": since})


def places_of(source: Path) -> NDArray[Any]:
    """``PLACE_DTYPE`` of a shard's entries: from its index, else from LMDB's pages, else none."""
    try:
        index = checked_index(source, check_data=False)
    except StoreError:
        try:
            index = open_shard_index(source)
        except (StoreError, OSError):
            return np.empty(0, dtype=PLACE_DTYPE)
    places = np.empty(index.entries, dtype=PLACE_DTYPE)
    places["key"], places["offset"], places["head"] = index.entry_keys(), index.offset, index.head
    return places


def _intact(data: Path, places: NDArray[Any]) -> Iterator[NewEntry | None]:
    """The entry at each place; None if it is damaged."""
    places = places[np.unique(places["offset"], return_index=True)[1]]  # each once, in the order of the file
    try:
        with opened(data) as descriptor:
            for key, offset, head in places.tolist():
                try:
                    header, front, payload = whole_entry(descriptor, offset, head, bytes(key))
                except (StoreError, OSError):
                    yield None
                    continue
                yield NewEntry(header.key, front + payload, tuple(one.tobytes() for one in header.item_keys()))
    except OSError:
        yield from [None] * len(places)


def intact_snapshots(paths: CachePaths) -> list[Snapshot]:
    """The snapshots on disk without damage."""
    found = list[Snapshot]()
    for number in paths.snapshots():
        with contextlib.suppress(LatentcacheError):
            snapshot = open_snapshot(paths.root, number)
            snapshot.check()
            found.append(snapshot)
    return found


def shard_use(paths: CachePaths, snapshots: Sequence[Snapshot]) -> list[ShardUse]:
    """Return the part of each sealed shard that these snapshots need, tombstoned shards too."""
    folders, found = paths.all_sealed(), []
    number = {folder.name: position for position, folder in enumerate(folders)}
    places, sizes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for snapshot in snapshots:
        own = np.array([number.get(name, -1) for name in snapshot.shards], dtype=np.int64)
        for rows in snapshot.fields.values():
            places.append(place_number(own[np.asarray(rows.shard)], np.asarray(rows.offset)))
            sizes.append(np.asarray(rows.head) + np.asarray(rows.bytes).astype(np.int64))
    place, size = np.concatenate(places), np.concatenate(sizes)
    if len(snapshots) > 1:
        place, first = np.unique(place, return_index=True)
        size = size[first]
    shard = (place >> OFFSET_BITS) + 1  # 0: a shard that is gone
    entries, num_bytes = (np.bincount(shard, one, len(folders) + 1)[1:] for one in (None, size))
    for folder, needed, needed_bytes in zip(folders, entries.tolist(), num_bytes.tolist(), strict=True):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            whole, dead = (folder / "data.mdb").stat().st_size, paths.tombstone(folder.name).exists()
            found.append(ShardUse(folder.name, _entries(folder), needed, whole, int(needed_bytes), dead))
    return found


def relocate(
    paths: CachePaths,
    snapshot: Snapshot,
    moved: Mapping[str, str],
    drop: Mapping[str, NDArray[np.bool_]] | None = None,
) -> dict[str, NDArray[np.bool_]]:
    """Publish a snapshot whose entries were ``moved`` from shard to shard; those that are not there lose their rows.

    A shard that moved to an empty name has lost all entries. ``drop`` has by field (E,) True for entries that lose
    their rows anyway. Returns the same of all that did; if there are any, the new snapshot is incomplete.
    """
    names, lost = list(dict.fromkeys([*snapshot.shards, *filter(None, moved.values())])), {}
    fields = []
    for rows in snapshot.fields.values():
        gone = np.zeros(rows.entries, dtype=np.bool_) | (drop or {}).get(rows.name, False)
        shard, offset = np.array(rows.shard), np.array(rows.offset)
        for old, new in moved.items():
            held = np.flatnonzero(shard == names.index(old)) if old in snapshot.shards else np.zeros(0, dtype=np.intp)
            if not new:
                gone[held] = True
            elif len(held):
                index = load_index(paths.shard(new))
                keys, wanted = (one.view("S32")[:, 0] for one in (index.entry_keys(), rows.key[held]))
                at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)  # an index is in the order of keys
                gone[held[keys[at] != wanted]] = True
                shard[held], offset[held] = names.index(new), np.asarray(index.offset)[at]
        columns = replace(rows, shard=shard, offset=offset)
        fields.append(kept_rows(columns, ~gone[np.asarray(rows.entry)]) if gone.any() else columns)
        lost[rows.name] = gone
    kept = {name: getattr(snapshot, name) for name in _KEPT}
    complete = snapshot.complete and not any(gone.any() for gone in lost.values())
    new_snapshot = NewSnapshot(
        fields=tuple(fields), shards=names, complete=complete, replaces=snapshot.number, **kept
    )
    publish_snapshot(paths, new_snapshot)
    return lost


def stored_catalog(cache: Path) -> Catalog:
    """Every committed item; those of a damaged shard as far as its index is intact, and only if no other has them."""
    return load_catalog(CachePaths(cache), open_shards=True, damaged=True)


def stored_entries(catalog: Catalog) -> Iterator[StoredEntry]:
    """Every item of a catalog, read and checked."""
    every = catalog.all_places()
    rows = catalog.places(every)
    starts = np.flatnonzero((np.diff(rows.shard) != 0) | (rows.entry[1:] != rows.entry[:-1])) + 1
    for some in np.split(every, starts) if len(every) else ():
        found = catalog.stored(int(some[0]))
        numbers = {key.tobytes(): number for number, key in enumerate(found[0].item_keys())} if found else {}
        for key in (key.tobytes() for key in catalog.keys(some)):
            if found is None or key not in numbers:
                yield StoredEntry(key)
                continue
            array = found[0].item(memoryview(found[2]), numbers[key])
            yield StoredEntry(key, array.shape, found[0].dtype, checksum(array.tobytes()), True)


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


def _entries(folder: Path) -> int:
    try:
        return load_index(folder, check_data=False).entries
    except (CacheDamagedError, CorruptEntryError):
        return -1
