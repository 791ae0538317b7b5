"""Mend shards before a build, copy entries to new shards, and find the needed data of a cache.

A sealed data file is never changed and readers may hold it. Its index names the entries that builds may use, and is
written again if that changes. An entry is copied only if its head belongs to its key and head and payload pass their
checks, so it has the same bytes. A new shard is made in ``scratch/`` and appears in one step. Callers hold the lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, LatentcacheError
from latentcache.identity.content import checksum
from latentcache.store.atomic_io import file_descriptor, make_folder, sync_folder, unreadable, writing
from latentcache.store.catalog import Catalog, load_catalog
from latentcache.store.entry import NewEntry
from latentcache.store.gather import STAND_INS, identity
from latentcache.store.index import load_index, mend_index, read_entry, remove_entries
from latentcache.store.paths import OPEN_SUFFIX, CachePaths
from latentcache.store.publish import publish_replacement, to_scratch
from latentcache.store.shard import ShardWriter, seal_folder
from latentcache.store.snapshot import FieldRows, Snapshot, open_snapshot

_COMMIT_BYTES = 16 << 20
#: Bits of an offset in a file; a shard's number is above them.
_OFFSET_BITS = 44


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


class StoredEntry(NamedTuple):
    """One committed item."""

    key: bytes
    shape: tuple[int, ...] = ()
    dtype: str = ""
    checksum: int = 0
    """xxh3-64 of the item's bytes."""
    intact: bool = False
    """True if head and payload of its entry pass their checks; else the others are empty."""


def mend_shards(paths: CachePaths) -> tuple[list[str], list[str]]:
    """Before a build: seal what dead builds left open, and write indexes of damaged shards again.

    Returns the shards whose index was written again, and the shards without an entry that a build can use.
    """
    mended, lost = list[str](), list[str]()
    for folder in paths.open_shards():
        if not recover_shard(paths, folder):
            lost.append(folder.name)
    for name in load_catalog(paths).damaged:
        (mended if mend_index(paths.shard(name)) else lost).append(name)
    return mended, lost


def recover_shard(paths: CachePaths, folder: Path) -> bool:
    """Seal the shard that a dead builder left open. False: it is damaged, so nothing is found in it, and it goes."""
    data = folder / "data.mdb"
    with writing(folder):
        if not data.exists() or data.stat().st_size == 0:
            shutil.rmtree(folder)
            return True
        try:
            seal_folder(folder)
        except (CacheDamagedError, CorruptEntryError):
            shutil.rmtree(to_scratch(paths, folder), ignore_errors=True)
            return False
    return True


def copy_entries(paths: CachePaths, source: Path, spans: NDArray[Any]) -> str:
    """Copy entries of a shard, of this or another cache, into a new sealed one; gives its name.

    ``spans``: (n,) ``SPAN_DTYPE``, at least one. Raises CorruptEntryError or CacheDamagedError if an entry fails
    its check, StoreError if it cannot be read; nothing is copied then.
    """
    name = os.urandom(8).hex()
    folder = paths.scratch / f"{name}{OPEN_SUFFIX}"
    for parent in (paths.scratch, paths.shards):
        make_folder(parent)
    try:
        with writing(folder), contextlib.closing(ShardWriter(folder)) as writer:
            batch: list[NewEntry] = []
            size = 0
            for entry in _intact(source / "data.mdb", spans):
                batch.append(entry)
                size += len(entry.value)
                if size >= _COMMIT_BYTES:
                    writer.write(batch)
                    batch, size = [], 0
            writer.write(batch)
            writer.seal().rename(paths.shard(name))
            sync_folder(paths.shards)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            paths.scratch.rmdir()
    return name


def _intact(data: Path, spans: NDArray[Any]) -> Iterator[NewEntry]:
    """The entry in each span of a file, proven."""
    spans = spans[np.unique(spans["offset"], return_index=True)[1]]  # each once, in the order of the file
    try:
        with file_descriptor(data) as descriptor:
            for key, offset, head, size in spans.tolist():
                header, value = read_entry(descriptor, offset - head, head + size, bytes(key))
                yield NewEntry(header.key, value, tuple(item.tobytes() for item in header.item_keys()))
    except OSError as error:
        raise unreadable(data, error) from error


def intact_snapshots(paths: CachePaths) -> list[Snapshot]:
    """The snapshots on disk without damage."""
    snapshots = list[Snapshot]()
    for number in paths.snapshots():
        with contextlib.suppress(LatentcacheError):
            snapshot = open_snapshot(paths.root, number)
            snapshot.check()
            snapshots.append(snapshot)
    return snapshots


def shard_use(paths: CachePaths, snapshots: Sequence[Snapshot]) -> list[ShardUse]:
    """Return the part of each sealed shard that these snapshots need."""
    folders, uses = paths.sealed_shards(), []
    number = {folder.name: position for position, folder in enumerate(folders)}
    spans, sizes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for snapshot in snapshots:
        numbers = np.array([number.get(name, -1) for name in snapshot.shards], dtype=np.int64)
        for rows in snapshot.fields.values():
            spans.append(numbers[np.asarray(rows.shard)] << _OFFSET_BITS | np.asarray(rows.offset).astype(np.int64))
            sizes.append(np.asarray(rows.head) + np.asarray(rows.bytes).astype(np.int64))
    span, size = np.concatenate(spans), np.concatenate(sizes)
    if len(snapshots) > 1:
        span, first = np.unique(span, return_index=True)
        size = size[first]
    shard = (span >> _OFFSET_BITS) + 1  # 0: a shard that is gone
    entries, num_bytes = (np.bincount(shard, weights, len(folders) + 1)[1:] for weights in (None, size))
    for folder, needed, needed_bytes in zip(folders, entries.tolist(), num_bytes.tolist(), strict=True):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            whole = (folder / "data.mdb").stat().st_size
            uses.append(ShardUse(folder.name, _entries(folder), needed, whole, int(needed_bytes)))
    return uses


def publish_moved(paths: CachePaths, snapshot: Snapshot, moved: Mapping[str, str]) -> None:
    """Publish a snapshot whose entries were copied from shard to shard; no build uses the old shards any more."""
    names, fields = [*snapshot.shards, *moved.values()], list[FieldRows]()
    for rows in snapshot.fields.values():
        shard, offset = np.array(rows.shard), np.array(rows.offset)
        for old, new in moved.items():
            entries = np.flatnonzero(shard == names.index(old))
            index = load_index(paths.shard(new))
            keys, wanted = (column.view("S32")[:, 0] for column in (np.asarray(index.key), rows.key[entries]))
            shard[entries] = names.index(new)
            offset[entries] = np.asarray(index.offset)[np.searchsorted(keys, wanted)]  # in the order of keys
        fields.append(replace(rows, shard=shard, offset=offset))
    publish_replacement(paths, snapshot, fields, shards=names)
    for name in moved:
        remove_entries(paths.shard(name), np.asarray(load_index(paths.shard(name)).key).view("S32")[:, 0])


def stored_catalog(cache: Path) -> Catalog:
    """Every committed item of the shards whose index is intact."""
    return load_catalog(CachePaths(cache), open_shards=True)


def stored_entries(catalog: Catalog) -> Iterator[StoredEntry]:
    """Every item of a catalog, read and checked."""
    every = catalog.all_items()
    rows = catalog.locations(every)
    starts = np.flatnonzero((np.diff(rows.shard) != 0) | (rows.entry[1:] != rows.entry[:-1])) + 1
    for some in np.split(every, starts) if len(every) else ():
        stored = catalog.stored(int(some[0]))
        numbers = {key.tobytes(): number for number, key in enumerate(stored[0].item_keys())} if stored else {}
        for key in (key.tobytes() for key in catalog.keys(some)):
            if stored is None or key not in numbers:
                yield StoredEntry(key)
                continue
            array = stored[0].item(memoryview(stored[2]), numbers[key])
            yield StoredEntry(key, array.shape, stored[0].dtype, checksum(array.tobytes()), True)


def disk_bytes(path: Path) -> int:
    """Space that a file or folder takes, in bytes; a file that is renamed meanwhile counts once or not at all."""
    total = 0
    for file in [path, *(Path(folder, name) for folder, _, names in os.walk(path) for name in names)]:
        with contextlib.suppress(OSError):
            status = file.lstat()
            is_stand_in = identity(status) in STAND_INS
            total += status.st_size if is_stand_in else status.st_blocks * 512  # POSIX counts in blocks of 512 bytes
    return total


def _entries(folder: Path) -> int:
    try:
        return load_index(folder).entries
    except (CacheDamagedError, CorruptEntryError):
        return -1
