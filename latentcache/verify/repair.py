"""``repair_cache``: take what fails its check out of a cache, so that a build makes it again.

Guarantee: only entries that a full verification calls corrupt or drifted are removed, and those that a damaged index
lacks when it is written again. No entry is changed or copied. A snapshot without the removed ones is published,
marked incomplete, with a list of them that no later build uses. Readers of the old snapshot go on. A killed repair
leaves the old cache or the new one, and the same command continues. Cost: a full verification.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError
from latentcache.failpoint import failpoint
from latentcache.store.garbage import mend_index
from latentcache.store.index import load_index
from latentcache.store.lock import builder_lock
from latentcache.store.paths import CachePaths
from latentcache.store.publish import kept_rows, publish_replacement
from latentcache.store.snapshot import removed_entries
from latentcache.value import Value
from latentcache.verify.entries import Check, Depth, View, positions
from latentcache.verify.findings import VerifyReport
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
    """Entries to be taken out; those that an index lacks when it is written again come on top."""
    shards: tuple[str, ...]
    """Shards that lose entries, or whose index is written again."""
    needed: bool
    """True if there is anything to do."""
    snapshot: int
    """The current snapshot."""
    complete: bool
    done: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the numbers of a repair for ``verify --json``."""
        removed = self.removals if self.done else ()
        return {
            "done": self.done,
            "removed": len(removed),
            "removed_bytes": sum(item.num_bytes for item in removed),
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
        self.removed = dict[str, set[int]]()
        """Payload offsets of entries that no build may use, by shard; none: the whole shard."""
        self.removals = list[Removal]()

    def plan(self, report: VerifyReport) -> Repair:
        check, sums = self.check, [np.empty(0, dtype=np.uint64)]
        for bad in sorted(check.bad, key=lambda bad_entries: bad_entries.reason == "lost"):
            view = check.views[bad.field]
            if bad.reason == "lost":
                self.drop[bad.field][bad.entries] = True
                continue
            self._remove(view, bad.entries, bad.reason)
            if bad.intact:
                sums.append(view.checksum[bad.entries].astype(np.uint64))
        # A build takes an entry that it finds by key, and copies one that was made from the same pixels. So entries
        # with wrong bytes whose checksum is right go everywhere at once, or the next build would bring them back.
        wanted = np.unique(np.concatenate(sums))
        for folder in check.paths.sealed_shards() if len(wanted) else ():
            with suppress(CacheDamagedError):
                index = load_index(folder)
                same = np.isin(np.asarray(index.checksum).astype(np.uint64), wanted)
                self._leave_out(folder.name, np.asarray(index.offset)[same])
        for view in check.views.values():
            self._remove(view, np.flatnonzero(np.isin(view.checksum.astype(np.uint64), wanted)), "same-bytes")
        shards = sorted({*self.removed, *check.damaged})
        return Repair(
            report=report,
            removals=tuple(self.removals),
            shards=tuple(shards),
            needed=bool(shards or any(mask.any() for mask in self.drop.values())),
            snapshot=report.snapshot,
            complete=report.complete,
        )

    def _remove(self, view: View, entries: NDArray[np.integer], reason: str) -> None:
        """Take out entries that are not out already."""
        mask, check = self.drop[view.name], self.check
        entries = np.unique(entries)
        entries = entries[~mask[entries]]
        mask[entries] = True
        for number in np.unique(view.shard[entries]).tolist():
            self._leave_out(check.snapshot.shards[number], view.offset[entries[view.shard[entries] == number]])
        names, samples = check.findings.table.names, view.sample[view.first_rows(entries)]
        for entry, sample in zip(entries.tolist(), samples.tolist(), strict=True):
            size, key = int(view.head[entry] + view.bytes[entry]), view.key[entry].tobytes().hex()
            self.removals.append(Removal(key, names[sample], reason, size))

    def _leave_out(self, shard: str, offsets: NDArray[np.integer]) -> None:
        if len(offsets):
            self.removed.setdefault(shard, set()).update(offsets.tolist())

    def carry_out(self, plan: Repair) -> Repair:
        """Write damaged indexes again, then publish the snapshot without the removed entries."""
        check, paths = self.check, self.check.paths
        unusable = [shard for shard in sorted(check.damaged) if not self._mended(shard)]
        removed = removed_entries(paths)
        for shard, offsets in self.removed.items():
            if removed.get(shard) != []:  # else all of it is out already
                removed[shard] = sorted({*removed.get(shard, ()), *offsets})
        removed |= {shard: [] for shard in unusable}
        failpoint("repair-delete")
        fields = [kept_rows(view.rows, ~self.drop[name][view.entry]) for name, view in check.views.items()]
        complete = plan.complete and not any(mask.any() for mask in self.drop.values())
        publish_replacement(paths, check.snapshot, fields, removed=removed, complete=complete)
        return replace(
            plan,
            done=True,
            snapshot=paths.current_snapshot(),
            complete=complete,
            removals=tuple(self.removals),
        )

    def _mended(self, shard: str) -> bool:
        """Write the index of a shard again, and remove the entries that it lacks; False if that is not possible."""
        check, folder = self.check, self.check.paths.shard(shard)
        index = load_index(folder) if mend_index(folder) else None
        for view in check.views.values():
            entries = view.in_shard(check.snapshot.shards.index(shard))
            if index is not None and index.entries:
                entries = entries[~positions(index, view, entries)[1]]
            self._remove(view, entries, "not-intact")
        return index is not None
