"""Copy what is intact of a shard into a new one, entry by entry, checksum by checksum.

An entry is copied only if its head belongs to its key and head and payload pass their checks; it then has the same
bytes. The new shard is made in ``scratch/`` and appears among the shards in one step, so a crash leaves nothing half.
The old shard stays as it is; the caller gives it a tombstone. Nothing is mapped and nothing beyond the file is read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CacheFormatError, CorruptEntryError, StoreError
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.store.atomic_io import make_folder, open_file, sync_folder, write_json, writing
from latentcache.store.catalog import Catalog, load_catalog
from latentcache.store.entry import MAGIC, EntryHeader, NewEntry, head_length, read_header
from latentcache.store.index import PAGE_HEADER_BYTES, Meta, ShardIndex, is_leaf, leaf_values, load_index, read_meta
from latentcache.store.paths import OPEN_SUFFIX, CachePaths
from latentcache.store.shard import ShardWriter, recover_shard
from latentcache.store.snapshot import PLACE_DTYPE, Snapshot

Found = list[tuple[bytes, int, int]]
Places = NDArray[Any] | Sequence[tuple[bytes, int, int]]
_COMMIT_BYTES = 16 << 20
_SCAN_BYTES = 1 << 20
#: A head that a scan believes to be one; and how often a scan reads a byte at most, on average.
_MOST_HEAD_BYTES, _MOST_READS = 16 << 20, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """What became of one shard."""

    source: str
    shard: str = ""
    """The new shard; empty if nothing was copied."""
    saved: int = 0
    lost: int = 0
    """Entries that were found and are damaged."""


def mend_shards(paths: CachePaths, snapshot: Snapshot | None = None) -> list[Salvaged]:
    """Before a build: seal what dead builds left open, and salvage what is damaged. Returns what was damaged.

    The caller holds the builder lock. A damaged shard gets a tombstone; an open one goes to ``quarantine/``.

    Args:
        paths: The cache.
        snapshot: The current snapshot, if it can be read: it knows places too.

    Raises:
        DiskFullError: No space.
        StoreError: A shard cannot be written.
    """
    made: list[Salvaged] = []
    known = load_catalog(paths)
    for folder in paths.open_shards():
        recover_shard(folder, paths.quarantine, lambda lost: made.append(salvage(paths, lost, skip=known)))
    for name in known.damaged:
        made.append(salvage(paths, paths.shard(name), skip=known, hints=_hints(snapshot, name)))
        tombstone(paths, name, "damaged")
    return made


def salvage(
    paths: CachePaths, source: Path, *, skip: Catalog | None = None, hints: NDArray[Any] | None = None
) -> Salvaged:
    """Copy every intact entry of a shard into a new sealed one. The caller holds the builder lock.

    Args:
        paths: The cache.
        source: Folder of the shard, sealed or not.
        skip: Entries with all items in it are not wanted.
        hints: ``PLACE_DTYPE``: where entries should be, for a shard whose own index is lost.

    Raises:
        DiskFullError: No space. Nothing has changed.
        StoreError: The new shard cannot be written. Nothing has changed.
    """
    index = _index(source)
    if index is not None:
        places = np.empty(index.entries, dtype=PLACE_DTYPE)
        places["key"], places["offset"], places["head"] = index.entry_keys(), index.offset, index.head
    else:
        places = np.concatenate([_scanned(source / "data.mdb"), _NO_PLACES if hints is None else hints])
    return copy_entries(paths, source, places, skip=skip)


def copy_entries(paths: CachePaths, source: Path, places: Places, *, skip: Catalog | None = None) -> Salvaged:
    """Copy entries of a shard, of this or another cache, into a new sealed one of this cache.

    Args:
        paths: The cache; the caller holds its builder lock.
        source: Folder of the shard.
        places: (n,) ``PLACE_DTYPE``, or (key, offset of the payload, bytes of the head) each.
        skip: Entries with all items in it are not wanted.

    Raises:
        DiskFullError: No space. Nothing has changed.
        StoreError: The new shard cannot be written. Nothing has changed.
    """
    name = secrets.token_hex(8)
    folder = paths.scratch / f"{name}{OPEN_SUFFIX}"
    make_folder(paths.scratch)
    saved = lost = 0
    try:
        with writing(folder), contextlib.closing(ShardWriter(folder)) as writer:
            batch: list[NewEntry] = []
            for value in _intact(source / "data.mdb", _as_places(places)):
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

    Raises:
        DiskFullError: No space.
        CacheReadOnlyError: The cache cannot be written.
    """
    mark = paths.tombstone(shard)
    if not mark.exists():
        since = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(mark, {"schema": 1, "reason": reason, "since": since})


def _index(source: Path) -> ShardIndex | None:
    """The index of a shard if its own file is intact, whatever became of ``data.mdb``."""
    try:
        index = load_index(source, check_data=False)
        index.check()
    except StoreError:
        return None
    return index


def _as_places(places: Places) -> NDArray[Any]:
    """Distinct places in the order of the file."""
    if not isinstance(places, np.ndarray):
        made = np.empty(len(places), dtype=PLACE_DTYPE)
        for row, (key, offset, head) in zip(made, places, strict=True):
            row["key"], row["offset"], row["head"] = np.frombuffer(key, dtype=np.uint8), offset, head
        places = made
    _, first = np.unique(places["offset"], return_index=True)
    return places[first]


def _intact(data: Path, places: NDArray[Any]) -> Iterator[NewEntry | None]:
    """The entry at each place; None if it is damaged."""
    try:
        descriptor = open_file(data)
    except OSError:
        yield from [None] * len(places)
        return
    try:
        for place in places:
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


def _scanned(data: Path) -> NDArray[Any]:
    """Where heads are in a file whose index or pages are damaged: one pass, in which no byte is read often."""
    found: Found = []
    try:
        meta = read_meta(data, whole=False)
    except CacheDamagedError:
        meta = Meta(page_size=os.sysconf("SC_PAGE_SIZE"), last_page=0, transaction=0, root=0, map_size=0)
    with contextlib.suppress(OSError), os.fdopen(open_file(data), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        whole = Meta(
            page_size=meta.page_size, last_page=max(size // meta.page_size - 1, 0), transaction=0, root=0, map_size=0
        )
        budget, page = [_MOST_READS * size], 0
        while page * meta.page_size < size:
            step = max(1, _SCAN_BYTES // meta.page_size) * meta.page_size
            pages = np.frombuffer(os.pread(file.fileno(), step, page * meta.page_size), dtype=np.uint8)
            pages = pages[: len(pages) // meta.page_size * meta.page_size].reshape(-1, meta.page_size)
            page = _scan_pages(file.fileno(), whole, page, pages, budget, found)
            if not len(pages):
                break
    return _as_places(found)


def _scan_pages(
    descriptor: int, meta: Meta, first: int, pages: NDArray[np.uint8], budget: list[int], found: Found
) -> int:
    """Add the heads that begin in these pages; returns the next page to look at."""
    begin = PAGE_HEADER_BYTES
    with_head = (pages[:, begin : begin + 3] == np.frombuffer(MAGIC[:3], dtype=np.uint8)).all(axis=1)
    following = first
    for position in np.flatnonzero(with_head | is_leaf(pages)).tolist():
        number = first + position
        if number < following:
            continue
        if not with_head[position]:
            with contextlib.suppress(ValueError):
                values = leaf_values(meta, [number], pages[position : position + 1])
                inside = values.offsets // meta.page_size == number
                for offset in values.offsets[inside].tolist():
                    _add_head(descriptor, offset, budget, found)
            continue
        header = _add_head(descriptor, number * meta.page_size + begin, budget, found)
        if header is not None:
            following = number + -(-(begin + header.head_bytes + header.payload_bytes) // meta.page_size)
    return max(first + max(len(pages), 1), following)


def _add_head(descriptor: int, place: int, budget: list[int], found: Found) -> EntryHeader | None:
    with contextlib.suppress(OSError, CorruptEntryError, CacheFormatError):
        front = os.pread(descriptor, 4096, place)
        size = head_length(front)
        if size > _MOST_HEAD_BYTES or budget[0] < 0:
            return None
        if size > len(front):
            budget[0] -= size
            front = os.pread(descriptor, size, place)
        header = read_header(front)
        found.append((header.key, place + header.head_bytes, header.head_bytes))
        return header
    return None


def _hints(snapshot: Snapshot | None, shard: str) -> NDArray[Any]:
    """Where a snapshot says that entries of a shard are."""
    if snapshot is None or shard not in snapshot.shards:
        return _NO_PLACES
    number, parts = snapshot.shards.index(shard), [_NO_PLACES]
    with contextlib.suppress(CacheDamagedError):
        some = snapshot.fields.values()
        parts += [rows.entry_places(np.flatnonzero(np.asarray(rows.shard) == number)) for rows in some]
    return np.concatenate(parts)


_NO_PLACES = np.empty(0, dtype=PLACE_DTYPE)
