"""``repair_cache``: take what fails its check out of a cache, so that a build makes it again.

Guarantee: only entries that a full verification calls corrupt or drifted are removed. No stored byte is changed.
Intact entries of damaged shards are copied into new shards, and the old ones get a tombstone. Then a snapshot without
the removed entries, marked incomplete, is published. Readers of the old snapshot go on. Killed at any point, the
cache is the old one or the new one, and the same command continues. Cost: a full verification, a copy of damaged
shards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.failpoint import failpoint
from latentcache.store.garbage import copy_entries, places_of, relocate, tombstone
from latentcache.store.index import load_index
from latentcache.store.lock import builder_lock
from latentcache.store.paths import CachePaths
from latentcache.value import Value
from latentcache.verify.entries import Check, View
from latentcache.verify.findings import VerifyReport
from latentcache.verify.selection import Depth
from latentcache.verify.verify import check_cache


class Removal(NamedTuple):
    """One entry that is taken out of the snapshot."""

    key: str
    """In hex."""
    path: str
    """Path of its first sample."""
    reason: str
    num_bytes: int


class Repair(Value):
    """Plan or result of a repair."""

    report: VerifyReport
    """Result of the verification."""
    removals: tuple[Removal, ...]
    """Entries to be taken out; entries of damaged shards that cannot be copied come on top."""
    shards: tuple[str, ...]
    """Damaged shards: everything intact in them is copied into new ones."""
    needed: bool
    """True if there is anything to do."""
    snapshot: int
    """The current snapshot."""
    complete: bool
    done: bool = False
    saved: int = 0
    """Entries that were copied out of damaged shards."""

    def as_json(self) -> dict[str, Any]:
        """Return the numbers of a repair for ``verify --json``."""
        removed = self.removals if self.done else ()
        return {
            "done": self.done,
            "removed": len(removed),
            "removed_bytes": sum(item.num_bytes for item in removed),
            "saved": self.saved,
            "shards": list(self.shards),
            "snapshot": self.snapshot,
            "complete": self.complete,
        }


def repair_cache(
    cache: Path, *, confirm: Callable[[Repair], bool], depth: Depth | None = None, **look: Any
) -> Repair:
    """Verify everything, then take out what is corrupt, and drifted samples that the check encodes again.

    ``confirm`` is shown the plan if there is anything to do. ``look`` are arguments of :func:`check_cache`; entries
    of another recipe are reported and kept.
    """
    paths = CachePaths(cache)
    paths.current_snapshot()  # no lock is left in a folder that is no cache
    with builder_lock(paths.lock):
        report, check = check_cache(cache, depth or Depth(full=True), **look)
        work = _Work(check)
        plan = work.plan(report)
        return work.carry_out(plan) if plan.needed and confirm(plan) else plan


class _Work:
    """Entries to remove, and their removal."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.drop = {name: np.zeros(len(view), dtype=np.bool_) for name, view in check.views.items()}
        """(E,) by field: entries that are taken out, and those that are lost already."""
        self.condemned = set[bytes]()
        """Keys of entries that must not be copied, in any shard."""
        self.removals = list[Removal]()

    def plan(self, report: VerifyReport) -> Repair:
        check, shards, sums = self.check, set(self.check.damaged), [np.empty(0, dtype=np.uint64)]
        for bad in sorted(check.bad, key=lambda one: one.reason == "lost"):
            view = check.views[bad.field]
            if bad.reason == "lost":
                self.drop[bad.field][bad.entries] = True
                continue
            entries = self._remove(view, bad.entries, bad.reason)
            shards |= {check.snapshot.shards[number] for number in np.unique(view.shard[entries]).tolist()}
            self.condemned |= {key.tobytes() for key in view.key[entries]}
            if bad.intact:
                sums.append(view.checksum[bad.entries].astype(np.uint64))
        # A build takes an entry that it finds by key, and copies one that was made from the same pixels. So entries
        # with wrong bytes whose checksum is right go everywhere at once, or the next build would bring them back.
        wanted = np.unique(np.concatenate(sums))
        for folder in check.paths.sealed_shards() if len(wanted) else ():
            with suppress(StoreError):
                index = load_index(folder, check_data=False)
                same = np.flatnonzero(np.isin(np.asarray(index.checksum).astype(np.uint64), wanted))
                self.condemned |= {key.tobytes() for key in index.entry_keys(same)}
                shards |= {folder.name} if len(same) else set()
        for view in check.views.values():
            self._remove(view, np.flatnonzero(np.isin(view.checksum.astype(np.uint64), wanted)), "same-bytes")
        return Repair(
            report=report,
            removals=tuple(self.removals),
            shards=tuple(sorted(shards)),
            needed=bool(shards or any(mask.any() for mask in self.drop.values())),
            snapshot=report.snapshot,
            complete=report.complete,
        )

    def _remove(self, view: View, entries: NDArray[np.integer], reason: str) -> NDArray[np.integer]:
        """Take out entries that are not out already; returns them."""
        mask, check = self.drop[view.name], self.check
        entries = np.unique(entries)
        entries = entries[~mask[entries]]
        mask[entries] = True
        names, samples = check.findings.table.names, view.sample[view.first_rows(entries)]
        for entry, sample in zip(entries.tolist(), samples.tolist(), strict=True):
            size, key = int(view.head[entry] + view.bytes[entry]), view.key[entry].tobytes().hex()
            self.removals.append(Removal(key, names[sample], reason, size))
        return entries

    def carry_out(self, plan: Repair) -> Repair:
        """Copy, tombstone, publish, in this order: until the last step readers and builds see nothing half."""
        paths, moved, saved = self.check.paths, dict[str, str](), 0
        for shard in plan.shards:
            places = places_of(paths.shard(shard))
            wanted = [key.tobytes() not in self.condemned for key in places["key"]]
            copy = copy_entries(paths, paths.shard(shard), places[np.array(wanted, dtype=np.bool_)])
            moved[shard] = copy.shard
            saved += copy.saved
        for shard in plan.shards:
            failpoint("repair-delete")
            tombstone(paths, shard, "damaged")
        failpoint("repair-delete")
        lost = relocate(paths, self.check.snapshot, moved, self.drop)
        for name, mask in lost.items():
            self._remove(self.check.views[name], np.flatnonzero(mask), "not-intact")
        return replace(
            plan,
            done=True,
            snapshot=paths.current_snapshot(),
            complete=plan.complete and not any(mask.any() for mask in lost.values()),
            removals=tuple(self.removals),
            saved=saved,
        )
