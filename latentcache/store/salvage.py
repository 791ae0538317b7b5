"""Copy what is intact of a shard into a new one, entry by entry, checksum by checksum.

An entry is copied only if its head belongs to its key and head and payload pass their checks; it then has the same
bytes. The new shard is made in ``scratch/`` and appears among the shards in one step, so a crash leaves nothing half.
The old shard stays as it is; the caller gives it a tombstone. Nothing is mapped and nothing beyond the file is read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.store.atomic_io import make_folder, open_file, sync_folder, write_json, writing
from latentcache.store.catalog import Catalog, load_catalog
from latentcache.store.entry import NewEntry, read_header
from latentcache.store.index import checked_index, open_shard_index
from latentcache.store.paths import OPEN_SUFFIX, CachePaths
from latentcache.store.shard import ShardWriter, recover_shard
from latentcache.store.snapshot import PLACE_DTYPE
from latentcache.value import Value

_COMMIT_BYTES = 16 << 20


class Salvaged(Value):
    """What became of one shard."""

    source: str
    shard: str = ""
    """The new shard; empty if nothing was copied."""
    saved: int = 0
    lost: int = 0
    """Entries that were found and are damaged."""


def mend_shards(paths: CachePaths) -> list[Salvaged]:
    """Before a build: seal what dead builds left open, and salvage what is damaged. Returns what was damaged.

    The caller holds the builder lock. A damaged shard gets a tombstone; an open one goes to ``quarantine/``.
    """
    made: list[Salvaged] = []
    known = load_catalog(paths)
    for folder in paths.open_shards():
        recover_shard(folder, paths.quarantine, lambda lost: made.append(salvage(paths, lost, skip=known)))
    for name in known.damaged:
        made.append(salvage(paths, paths.shard(name), skip=known))
        tombstone(paths, name, "damaged")
    return made


def salvage(paths: CachePaths, source: Path, *, skip: Catalog | None = None) -> Salvaged:
    """Copy every intact entry of a shard, sealed or not, into a new sealed one. Arguments and errors as below."""
    return copy_entries(paths, source, places_of(source), skip=skip)


def copy_entries(paths: CachePaths, source: Path, places: NDArray[Any], *, skip: Catalog | None = None) -> Salvaged:
    """Copy entries of a shard, of this or another cache, into a new sealed one of this cache.

    Args:
        paths: The cache; the caller holds its builder lock.
        source: Folder of the shard.
        places: (n,) ``PLACE_DTYPE``.
        skip: Entries with all items in it are not wanted.
    """
    name = os.urandom(8).hex()
    folder = paths.scratch / f"{name}{OPEN_SUFFIX}"
    make_folder(paths.scratch)
    saved = lost = 0
    try:
        with writing(folder), contextlib.closing(ShardWriter(folder)) as writer:
            batch: list[NewEntry] = []
            for value in _intact(source / "data.mdb", places):
                if value is None:
                    lost += 1
                elif skip is None or (skip.find(_keys(value)) < 0).any():
                    batch.append(value)
                    saved += 1
                if sum(len(one.value) for one in batch) >= _COMMIT_BYTES:
                    writer.write(batch)
                    batch = []
            if batch:
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
    return Salvaged(source=source.name, shard=name if saved else "", saved=saved, lost=lost)


def tombstone(paths: CachePaths, shard: str, reason: str) -> None:
    """Take a sealed shard out of use; builds find its entries no more. Durable; the caller holds the builder lock.

    Snapshots that name the shard keep reading it, and the collector removes it when none does.

    Args:
        paths: The cache.
        shard: Its name.
        reason: ``damaged`` or ``compacted``; for people and for the collector.
    """
    mark = paths.tombstone(shard)
    if not mark.exists():
        since = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(mark, {"schema": 1, "reason": reason, "since": since})


def places_of(source: Path) -> NDArray[Any]:
    """``PLACE_DTYPE`` of a shard's entries: from its index if that is intact, whatever became of ``data.mdb``.

    Else from LMDB's pages; no places if these are damaged too.
    """
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
    try:
        descriptor = open_file(data)
    except OSError:
        yield from [None] * len(places)
        return
    try:
        for place in places[np.unique(places["offset"], return_index=True)[1]]:  # each once, in the order of the file
            yield _entry_at(descriptor, int(place["offset"]), int(place["head"]), place["key"].tobytes())
    finally:
        os.close(descriptor)


def _entry_at(descriptor: int, offset: int, head: int, key: bytes) -> NewEntry | None:
    try:
        size = os.fstat(descriptor).st_size
        if not head <= offset <= size:
            return None
        front = os.pread(descriptor, head, offset - head)
        header = read_header(front, key)
        if header.head_bytes != head or offset + header.payload_bytes > size:
            return None
        payload = os.pread(descriptor, header.payload_bytes, offset)
    except (StoreError, OSError, OverflowError):
        return None
    if checksum(payload) != header.payload_checksum:
        return None
    return NewEntry(key=key, value=front + payload, item_keys=tuple(one.tobytes() for one in header.item_keys()))


def _keys(entry: NewEntry) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(entry.item_keys), dtype=np.uint8).reshape(-1, KEY_BYTES)
