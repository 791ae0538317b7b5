"""``repair_cache``: take what fails its check out of a cache, so that a build makes it again.

Guarantee: nothing is removed but what a full verification calls corrupt or drifted; no
stored byte is changed, sources are not touched. Of damaged shards everything intact is copied into new ones, the old
ones get a tombstone, and a snapshot without the removed entries, marked incomplete, is published. Readers of the
snapshot before go on. Killed at any point, the cache is the old one or the new one, and the same command continues.
Cost: a full verification, and a copy of every damaged shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.failpoint import failpoint
from latentcache.store.garbage import copy_entries, places_of, relocate, tombstone
from latentcache.store.index import load_index
from latentcache.store.lock import builder_lock
from latentcache.store.paths import CachePaths
from latentcache.value import Value
from latentcache.verify.entries import Store, View
from latentcache.verify.findings import VerifyReport
from latentcache.verify.fixes import Commands
from latentcache.verify.selection import Depth
from latentcache.verify.verify import check_cache


class Removal(Value):
    """One entry that is taken out of the snapshot."""

    field: str
    key: str
    """In hex."""
    path: str
    """Of its first sample."""
    reason: str
    num_bytes: int


class RepairPlan(Value):
    """What a repair would do."""

    report: VerifyReport
    """What the verification found."""
    removals: tuple[Removal, ...]
    """Entries to be taken out; entries of damaged shards that cannot be copied come on top."""
    shards: tuple[str, ...]
    """Damaged shards: everything intact in them is copied into new ones."""
    drop: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """(E,) by field: the entries of ``removals``, and those that are lost already."""
    condemned: frozenset[bytes] = frozenset()
    """Keys of entries that must not be copied, in any shard."""

    @property
    def needed(self) -> bool:
        """True if there is anything to do."""
        return bool(self.removals or self.shards or any(mask.any() for mask in self.drop.values()))


class RepairReport(Value):
    """What a repair did."""

    plan: RepairPlan
    done: bool = False
    snapshot: int = 0
    """The new snapshot; 0 if nothing was done."""
    complete: bool = True
    removals: tuple[Removal, ...] = ()
    saved: int = 0
    """Entries that were copied out of damaged shards."""

    def as_json(self) -> dict[str, Any]:
        """What ``verify --json`` says of a repair."""
        return {
            "done": self.done,
            "removed": len(self.removals),
            "removed_bytes": sum(item.num_bytes for item in self.removals),
            "saved": self.saved,
            "shards": list(self.plan.shards),
            "snapshot": self.snapshot or self.plan.report.snapshot,
            "complete": self.complete,
        }


def repair_cache(
    cache: Path,
    *,
    confirm: Callable[[RepairPlan], bool],
    depth: Depth | None = None,
    commands: Commands | None = None,
    data: Path | None = None,
    **look: Any,
) -> RepairReport:
    """Verify everything, then take out what is corrupt. Other arguments and errors are those of ``verify_cache``.

    Args:
        cache: The cache folder.
        confirm: Is shown the plan if there is anything to do; False leaves everything as it is.
        depth: A full one; samples that it encodes again and that have drifted are taken out, too.
        commands: Words for the printed commands.
        data: The data, if it is not at the recorded place.
        **look: ``requested`` and ``reencode``; entries of another recipe are reported and kept.

    Raises:
        CacheLockedError: A build, another repair or a collection is at work here.
    """
    paths = CachePaths(cache)
    paths.current_snapshot()  # no lock is left in a folder that is no cache
    with builder_lock(paths.lock):
        report, store = check_cache(cache, depth or Depth(full=True), commands or Commands(), data=data, **look)
        plan = _plan(store, report)
        if not plan.needed or not confirm(plan):
            return RepairReport(plan=plan, complete=report.complete)
        return _carry_out(store, plan)


def _plan(store: Store, report: VerifyReport) -> RepairPlan:
    drop = {name: np.zeros(len(view), dtype=np.bool_) for name, view in store.views.items()}
    removals, condemned, shards = list[Removal](), set[bytes](), set(store.damaged)
    sums = [np.empty(0, dtype=np.uint64)]

    def remove(view: View, entries: NDArray[np.integer], reason: str) -> None:
        drop[view.name][entries] = True
        removals.extend(_removals(store, view, entries, reason))

    for bad in sorted(store.bad, key=lambda one: one.reason == "lost"):
        view = store.views[bad.field]
        if bad.reason == "lost":
            drop[bad.field][bad.entries] = True
            continue
        entries = np.unique(bad.entries)
        entries = entries[~drop[bad.field][entries]]
        remove(view, entries, bad.reason)
        shards |= {store.snapshot.shards[number] for number in np.unique(view.shard[entries]).tolist()}
        condemned |= {key.tobytes() for key in view.key[entries]}
        if bad.intact:
            sums.append(view.checksum[bad.entries].astype(np.uint64))
    # A build takes an entry that it finds by key, and copies one that was made from the same pixels. So entries with
    # wrong bytes whose checksum is right go everywhere at once, or the next build would bring them back.
    wanted = np.unique(np.concatenate(sums))
    for folder in store.paths.sealed_shards() if len(wanted) else ():
        with suppress(StoreError):
            index = load_index(folder, check_data=False)
            same = np.flatnonzero(np.isin(np.asarray(index.checksum).astype(np.uint64), wanted))
            condemned |= {key.tobytes() for key in index.entry_keys(same)}
            shards |= {folder.name} if len(same) else set()
    for view in store.views.values():
        remove(
            view, np.flatnonzero(np.isin(view.checksum.astype(np.uint64), wanted) & ~drop[view.name]), "same-bytes"
        )
    return RepairPlan(
        report=report,
        removals=tuple(removals),
        shards=tuple(sorted(shards)),
        drop=drop,
        condemned=frozenset(condemned),
    )


def _removals(store: Store, view: View, entries: NDArray[np.integer], reason: str) -> Iterator[Removal]:
    names, samples = store.findings.table.names, view.sample[view.first_rows(entries)]
    for entry, sample in zip(entries.tolist(), samples.tolist(), strict=True):
        size = int(view.head[entry] + view.bytes[entry])
        key = view.key[entry].tobytes().hex()
        yield Removal(field=view.name, key=key, path=names[sample], reason=reason, num_bytes=size)


def _carry_out(store: Store, plan: RepairPlan) -> RepairReport:
    """Copy, tombstone, publish, in this order: until the last step readers and builds see nothing half."""
    paths, snapshot, moved, saved = store.paths, store.snapshot, dict[str, str](), 0
    drop = {name: mask.copy() for name, mask in plan.drop.items()}
    removals = list(plan.removals)
    for shard in plan.shards:
        places = places_of(paths.shard(shard))
        wanted = [key.tobytes() not in plan.condemned for key in places["key"]]
        copy = copy_entries(paths, paths.shard(shard), places[np.array(wanted, dtype=np.bool_)])
        saved += copy.saved
        moved |= {shard: copy.shard} if copy.shard else {}
        there = {key.tobytes() for key in load_index(paths.shard(copy.shard)).entry_keys()} if copy.shard else set()
        number = snapshot.shards.index(shard) if shard in snapshot.shards else -1
        for view in store.views.values():
            held = view.in_shard(number)
            held = held[~drop[view.name][held]]
            lost = held[[view.key[entry].tobytes() not in there for entry in held.tolist()]] if len(held) else held
            drop[view.name][lost] = True
            removals += _removals(store, view, lost, "not-intact")
    for shard in plan.shards:
        failpoint("repair-delete")
        tombstone(paths, shard, "damaged")
    complete = snapshot.complete and not any(mask.any() for mask in drop.values())
    failpoint("repair-delete")
    made = relocate(paths, snapshot, moved, drop, complete=complete)
    return RepairReport(plan=plan, done=True, snapshot=made, complete=complete, removals=tuple(removals), saved=saved)
