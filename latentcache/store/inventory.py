"""What is in a cache, finished or not: every committed entry, of sealed shards and of one that is being written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from latentcache.errors import CacheDamagedError, CacheNotFoundError, CorruptEntryError, StoreError
from latentcache.store.catalog import load_catalog
from latentcache.store.entry import EntryHeader
from latentcache.store.generation import Generation, load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.shard import live_entries


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
    """Every committed entry once.

    Args:
        cache: The cache folder.
        payloads: Read every payload and check it.
    """
    layout = CacheLayout(cache)
    catalog = load_catalog(layout)
    seen = set(catalog.keys())
    for key in sorted(seen):
        located = catalog.locate(key)
        if located is not None:
            intact = not payloads or catalog.payload(located) is not None
            yield Stored(key=key, header=located.header, intact=intact)
    for folder in layout.open_shards():
        try:
            for live in live_entries(folder):
                if live.key not in seen:
                    yield Stored(key=live.key, header=live.header, intact=live.intact)
        except (CacheDamagedError, CorruptEntryError, StoreError):
            continue  # a shard that its builder left unreadable holds nothing that could be served


def digest(header: EntryHeader) -> str:
    """The checksum of a payload as it is shown."""
    return f"{header.payload_checksum:016x}"
