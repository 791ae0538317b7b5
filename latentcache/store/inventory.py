"""What is in a cache, finished or not: every committed entry, of sealed shards and of one that is being written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from latentcache.errors import CacheDamagedError, CacheNotFoundError, StoreError
from latentcache.store.catalog import Catalog, index_or_none
from latentcache.store.entry import EntryHeader
from latentcache.store.generation import Generation, load_generation
from latentcache.store.index import ShardIndex, load_rows
from latentcache.store.layout import CacheLayout
from latentcache.store.live import live_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One committed entry."""

    key: bytes
    header: EntryHeader
    intact: bool
    """Whether the payload, as read now, passes its check; True where payloads were not asked for."""


def current_or_none(cache: Path) -> Generation | None:
    """The current generation, or None while the first build has not ended.

    Raises:
        CacheNotFoundError: There is no cache at all.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: The manifest or a column is damaged.
    """
    try:
        return load_generation(cache)
    except CacheNotFoundError as error:
        if error.slug == "cache-unfinished":
            return None
        raise


def stored_entries(cache: Path, *, payloads: bool) -> Iterator[Stored]:
    """Every committed entry once; those of a damaged shard as far as its index is whole.

    Args:
        cache: The cache folder.
        payloads: Read every payload and check it.

    Raises:
        StoreError: The system refuses to list the shards.
    """
    layout = CacheLayout(cache)
    layout.check_shards()
    looked: set[str] = set()
    seen: set[bytes] = set()
    # Sealed shards are looked at again in the end: a build beside us may have sealed the one that was open.
    for entries in (_sealed, _open, _sealed):
        for stored in entries(layout, looked, payloads):
            if stored.key not in seen:
                seen.add(stored.key)
                yield stored


def _sealed(layout: CacheLayout, looked: set[str], payloads: bool) -> Iterator[Stored]:
    """Entries of sealed shards that were not looked at: whole shards first, then what the damaged ones promise."""
    folders = [folder for folder in layout.sealed_shards() if folder.name not in looked]
    looked.update(folder.name for folder in folders)
    whole = {folder: index for folder in folders if (index := index_or_none(folder))}
    damaged = [rows for folder in folders if folder not in whole and (rows := _rows_or_none(folder))]
    for catalog in (Catalog(list(whole.values())), Catalog(damaged)):
        for key in sorted(catalog.keys()):
            located = catalog.locate(key)
            if located is not None:
                intact = not payloads or catalog.payload(located) is not None
                yield Stored(key=key, header=located.header, intact=intact)


def _open(layout: CacheLayout, looked: set[str], payloads: bool) -> Iterator[Stored]:
    """Entries of shards that are being written, or were when their builder died."""
    for folder in layout.open_shards():
        if folder.name in looked:
            continue
        try:
            for live in live_entries(folder, payloads=payloads):
                yield Stored(key=live.key, header=live.header, intact=live.intact)
        except (OSError, StoreError):
            continue  # sealed or removed in this moment, or left unreadable by its builder


def _rows_or_none(folder: Path) -> ShardIndex | None:
    """What a damaged shard should hold."""
    try:
        return load_rows(folder)
    except CacheDamagedError:
        return None


def digest(header: EntryHeader) -> str:
    """The checksum of a payload as it is shown."""
    return f"{header.payload_checksum:016x}"
