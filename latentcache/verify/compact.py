"""Copies what is still needed of mostly unneeded shards into new ones, and publishes the same samples again.

A sealed shard only grows useless: entries of pictures that changed or went stay in it. Where less than a share of its
entries is needed, and by the current generation alone, those are copied, checksum by checksum, the old shard is
retired, and a generation that replaces the current one names the copies. The order of samples and rows is the same,
so is every plan. Killed at any point, the cache is the old one or the new one.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from latentcache.failpoint import failpoint
from latentcache.store.catalog import Catalog, index_or_none
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout
from latentcache.store.retire import moved, retire, to_scratch
from latentcache.store.salvage import Salvaged, places_in, salvage
from latentcache.store.token_generation import AnyGeneration
from latentcache.store.token_moves import republish_any

#: A shard is copied when less than this share of its entries is needed: then at least as much is freed as is written.
LIVE_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """A shard that is worth copying."""

    shard: str
    live: int
    """Entries that the current generation needs."""
    entries: int
    """Entries in it."""


def sparse_shards(layout: CacheLayout, generation: AnyGeneration, others: Collection[str]) -> list[Sparse]:
    """Shards that are worth copying.

    Args:
        layout: The cache.
        generation: The current generation.
        others: Shards that other generations need too: copying those would free nothing.
    """
    found = []
    for number, name in enumerate(generation.shards):
        index = None if name in others else index_or_none(layout.shards / name)
        if index is not None:
            live = len(np.unique(generation.rows.offset[generation.rows.shard == number]))
            if live < LIVE_SHARE * len(index.rows):
                found.append(Sparse(shard=name, live=live, entries=len(index.rows)))
    return found


def compact(
    layout: CacheLayout, generation: AnyGeneration, sparse: Collection[Sparse]
) -> tuple[list[Sparse], list[Sparse]]:
    """Copy the needed entries of these shards and publish. The caller holds the builder lock.

    Returns:
        The shards that were replaced, and those that hold damaged entries and were left as they are.

    Raises:
        DiskFullError: No room for the copies. Nothing is lost.
        StoreError: A copy cannot be written.
    """
    copies, damaged = dict[str, Salvaged](), list[Sparse]()
    for item in sparse:
        copy = salvage(layout, layout.shards / item.shard, hints=places_in(generation, item.shard), only=True)
        if copy.saved == item.live:
            copies[item.shard] = copy
        else:
            damaged.append(item)
            _discard(layout, copy)
    if copies:
        _publish(layout, generation, copies)
    return [item for item in sparse if item.shard in copies], damaged


def _publish(layout: CacheLayout, generation: AnyGeneration, copies: dict[str, Salvaged]) -> None:
    catalog = Catalog([load_index(layout.shards / copy.shard) for copy in copies.values()])
    numbers = [generation.shards.index(name) for name in copies]
    placed = {}
    for row in np.flatnonzero(np.isin(generation.rows.shard, numbers)).tolist():
        located = catalog.locate(generation.rows.key[row].tobytes())
        if located is not None:
            placed[row] = located
    rows, shards = moved(generation, set(), placed)
    for name in copies:
        failpoint("collect-delete")
        retire(layout, name, "compacted")
    republish_any(layout, generation, rows=rows, shards=shards, complete=generation.complete)


def _discard(layout: CacheLayout, copy: Salvaged) -> None:
    """Take away a copy that nothing names yet."""
    if copy.shard:
        shutil.rmtree(to_scratch(layout, layout.shards / copy.shard), ignore_errors=True)
