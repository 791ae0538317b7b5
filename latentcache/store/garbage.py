"""What of a cache is needed, and moving entries to other shards without touching sealed ones.

A sealed shard is never changed and readers may hold it, so damaged and unneeded entries are left behind: a tombstone
beside the folder keeps builds from taking entries from it, and a new snapshot names other shards. Readers of older
snapshots go on; the collector removes the shard when no snapshot needs it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, StoreError
from latentcache.identity.content import checksum
from latentcache.store.atomic_io import make_folder, open_file, read_json, sync_folder
from latentcache.store.entry import EntryHeader, read_header
from latentcache.store.index import ShardIndex, load_index, open_shard_index
from latentcache.store.paths import CachePaths
from latentcache.store.publish import kept_rows, republish
from latentcache.store.salvage import copy_entries, tombstone
from latentcache.store.snapshot import FieldDraft, FieldRows, Snapshot

__all__ = [
    "ShardUse", "StoredEntry", "copy_entries", "relocate", "shard_use", "stored_entries",
    "to_scratch", "tombstone",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUse:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """One committed item."""

    key: bytes
    entry: bytes
    """Key of the entry that holds it."""
    field: int
    """Byte 0 of the key: the kind."""
    shape: tuple[int, ...] = ()
    """Empty if payloads were not asked for; so is ``dtype``."""
    dtype: str = ""
    checksum: int = 0
    """xxh3-64 of the item's bytes as they are now."""
    intact: bool = True
    """True if head and payload of its entry pass their checks, or if payloads were not asked for."""


def shard_use(paths: CachePaths, snapshots: Sequence[Snapshot]) -> list[ShardUse]:
    """How much of each sealed shard these snapshots need, tombstoned shards too.

    Raises:
        CacheDamagedError: A column of a snapshot is damaged.
        StoreError: The system refuses to list the shards.
    """
    found = []
    for folder in paths.all_sealed():
        name = folder.name
        parts = [
            np.stack([np.asarray(rows.offset)[held], (np.asarray(rows.head) + np.asarray(rows.bytes))[held]])
            for snapshot in snapshots
            if name in snapshot.shards
            for rows in snapshot.fields.values()
            for held in [np.asarray(rows.shard) == snapshot.shards.index(name)]
        ]
        needed = np.unique(np.concatenate([np.zeros((2, 0), np.uint64), *parts], axis=1), axis=1)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.append(
                ShardUse(
                    name=name,
                    entries=_entries(folder),
                    needed=needed.shape[1],
                    bytes=(folder / "data.mdb").stat().st_size,
                    needed_bytes=int(needed[1].sum()),
                    tombstoned=_reason(paths, name),
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

    Returns:
        Number of the new snapshot.

    Raises:
        CacheDamagedError: A new shard or a column of the snapshot cannot be read.
        DiskFullError: No space.
        StoreError: The cache cannot be written.
    """
    names = list(dict.fromkeys([*snapshot.shards, *moved.values()]))
    indexes = {old: load_index(paths.shard(new)) for old, new in moved.items()}
    drafts: dict[str, FieldDraft] = {}
    for name, rows in snapshot.fields.items():
        gone = np.zeros(rows.entries, dtype=np.bool_) | (drop or {}).get(name, False)
        draft = _moved(rows, snapshot, moved, indexes, names, gone)
        drafts[name] = kept_rows(draft, ~gone[np.asarray(rows.entry)]) if gone.any() else draft
    return republish(paths, snapshot, fields=drafts, shards=names, complete=complete)


def stored_entries(cache: Path, *, payloads: bool) -> Iterator[StoredEntry]:
    """Every committed item once; those of a damaged shard as far as its index is intact.

    Args:
        cache: The cache folder.
        payloads: Read every entry and check it.

    Raises:
        StoreError: The system refuses to list the shards.
    """
    paths = CachePaths(cache)
    paths.check_shards()
    looked: set[str] = set()
    seen: set[bytes] = set()
    # Sealed shards are listed again at the end: a build may have sealed the one that was open.
    for listed in (paths.sealed_shards, paths.open_shards, paths.sealed_shards):
        folders = [folder for folder in listed() if folder.name not in looked]
        looked.update(folder.name for folder in folders)
        for index in sorted(filter(None, map(_index, folders)), key=_is_cut):
            for stored in _stored(index, payloads):
                if stored.key not in seen:
                    seen.add(stored.key)
                    yield stored


def to_scratch(paths: CachePaths, path: Path) -> Path:
    """Move what is to be removed out of the way in one step; a crash leaves it whole, here or there.

    Raises:
        OSError: It cannot be moved.
    """
    make_folder(paths.scratch)
    place = paths.scratch / f"{path.name}-{secrets.token_hex(4)}"
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
) -> FieldDraft:
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


def _index(folder: Path) -> ShardIndex | None:
    """The index of a shard, sealed or not; None if it cannot be read."""
    try:
        return load_index(folder, check_data=False) if folder.suffix == "" else open_shard_index(folder)
    except (StoreError, OSError):
        return None


def _is_cut(index: ShardIndex) -> bool:
    """True if the data of a shard is not what its index was made from: others are believed first."""
    try:
        load_index(index.folder)
    except (StoreError, OSError):
        return index.folder.suffix == ""
    return False


def _stored(index: ShardIndex, payloads: bool) -> Iterator[StoredEntry]:
    """The items of a shard, entry by entry."""
    try:
        keys, entries = index.keys(), index.entry_keys()
        counts = np.maximum(np.asarray(index.block), 1).astype(np.int64)
        bounds = np.concatenate([[0], np.cumsum(counts)]).tolist()
    except CacheDamagedError:
        return
    columns = [np.asarray(column).tolist() for column in (index.offset, index.head)] if payloads else [[0], [0]]
    descriptor = _opened(index.data) if payloads else -1
    try:
        for number, entry in enumerate(entries):
            about: Iterator[dict[str, Any]] = iter(())
            if payloads:
                offset, head = (column[number] for column in columns)
                about = _looked(descriptor, offset, head, entry.tobytes(), bounds[number + 1] - bounds[number])
            for key in keys[bounds[number] : bounds[number + 1]]:
                yield StoredEntry(key=key.tobytes(), entry=entry.tobytes(), field=int(key[0]), **next(about, {}))
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _looked(descriptor: int, offset: int, head: int, key: bytes, items: int) -> Iterator[dict[str, Any]]:
    """Shape, type, checksum and state of each item of an entry, as it is now."""
    header: EntryHeader | None = None
    payload = b""
    with contextlib.suppress(StoreError, OSError, OverflowError, MemoryError):
        header = read_header(os.pread(descriptor, head, offset - head), key)
        payload = os.pread(descriptor, header.payload_bytes, offset)
    for position in range(items):
        if header is None or header.items != items or len(payload) != header.payload_bytes:
            yield {"intact": False}
            continue
        array = header.item(memoryview(payload), position)
        yield {
            "shape": tuple(array.shape),
            "dtype": header.dtype,
            "checksum": checksum(array.tobytes()),
            "intact": checksum(payload) == header.payload_checksum,
        }


def _opened(path: Path) -> int:
    try:
        return open_file(path)
    except OSError:
        return -1


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
