"""Copy the needed entries of mostly unneeded shards into new ones, and publish the same samples again.

A sealed shard only loses use: entries of inputs that changed or went stay in it. If less than half of its entries is
needed, and by the current snapshot alone, those are copied, checksum by checksum, the old shard gets a tombstone, and
a snapshot that replaces the current one names the copies. The order of samples and rows is the same, so is every
plan. Killed at any point, the cache is the old one or the new one.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection

import numpy as np

from latentcache.failpoint import failpoint
from latentcache.store.garbage import ShardUse, relocate, to_scratch
from latentcache.store.paths import CachePaths
from latentcache.store.salvage import copy_entries, tombstone
from latentcache.store.snapshot import Snapshot
from latentcache.verify.entries import View

#: A shard is copied if less than this part of its entries is needed: then at least as much is freed as is written.
MOST_NEEDED = 0.5


def is_worth_copying(use: ShardUse) -> bool:
    """True if a shard holds more entries that are not needed than needed ones."""
    return bool(0 <= use.needed < MOST_NEEDED * use.entries)


def compact(paths: CachePaths, snapshot: Snapshot, worth: Collection[ShardUse]) -> set[str]:
    """Copy the needed entries of these shards and publish. The caller holds the builder lock.

    Returns:
        Names of the shards that were replaced; the others hold damaged entries and were left as they are.
    """
    views, moved = [View(rows, len(snapshot.samples)) for rows in snapshot.fields.values()], dict[str, str]()
    for use in worth:
        number = snapshot.shards.index(use.name)
        places = np.concatenate([view.rows.entry_places(view.in_shard(number)) for view in views])
        copy = copy_entries(paths, paths.shard(use.name), places)
        if copy.saved == len(places):
            moved[use.name] = copy.shard
        elif copy.shard:
            shutil.rmtree(to_scratch(paths, paths.shard(copy.shard)), ignore_errors=True)
    for name in moved:
        failpoint("collect-delete")
        tombstone(paths, name, "compacted")
    if moved:
        relocate(paths, snapshot, moved, complete=snapshot.complete)
    return set(moved)
