"""``collect``: what of a cache nobody needs any more, and, on request, its removal.

Guarantee: what the current generation needs, a kept one, or one that a reader holds, is never removed, nor what a
build that has not ended has committed. A thing is removed in one step (a rename), so a crash leaves it whole or gone;
the same command goes on. Source files are not looked at. Cost: no payload is read but those copied.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from latentcache.errors import CacheNotFoundError, CacheReadOnlyError, StoreError, UsageError
from latentcache.failpoint import failpoint
from latentcache.store.catalog import load_catalog
from latentcache.store.durable import as_store_error
from latentcache.store.layout import CacheLayout
from latentcache.store.live import live_entries
from latentcache.store.lock import builder_lock
from latentcache.store.pins import Holder, holders, unpinned
from latentcache.store.retire import check_one_disk, to_scratch
from latentcache.store.token_generation import load_any
from latentcache.verify.compact import compact, sparse_shards
from latentcache.verify.remains import OldGeneration, disk_bytes, generations_on_disk, leftovers, sealed_at

#: Generations that stay, the current one among them.
KEEP = 2
#: How long what nobody needs any more stays for readers that hold no pin, in seconds.
GRACE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """One thing that could go, or went, or has to stay for now."""

    state: str
    """``removable``, ``removed``, ``held``, ``compactable`` or ``compacted``."""
    reason: str
    file: str
    """Relative to the cache."""
    num_bytes: int
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectReport:
    """What a collection found and did."""

    applied: bool
    generation: int
    """The current generation afterwards."""
    items: tuple[Waste, ...]

    def num_bytes(self, *states: str) -> int:
        """Bytes of all things in one of these states."""
        return sum(item.num_bytes for item in self.items if item.state in states)


def collect(
    cache: Path, *, apply: bool = False, keep: int = KEEP, grace_s: float = GRACE_S, damaged: bool = False
) -> CollectReport:
    """Find what nobody needs, and remove it.

    Args:
        cache: The cache folder.
        apply: Remove it; otherwise only say what would be removed.
        keep: Generations that stay, the current one among them. One that was replaced by a repair or a compaction
            does not count.
        grace_s: What stopped being needed less than so many seconds ago stays.
        damaged: Remove what is in ``quarantine/``, too.

    Raises:
        UsageError: ``keep`` below 1 or a negative ``grace_s``.
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: The current manifest is damaged: nobody knows what is needed.
        CacheLockedError: A build, a repair or another collection is at work here.
        CacheReadOnlyError: Something cannot be removed.
        StoreError: A part of the cache lies on another file system, so that nothing can be taken away in one step.
        DiskFullError: No room to copy what is needed of a shard.
    """
    if keep < 1 or not grace_s >= 0:
        raise UsageError(f"keep {keep}, grace {grace_s}", why="at least the current generation stays", fix="--keep 1")
    layout = CacheLayout(cache)
    try:
        load_any(cache)  # no lock is left in a folder that is no cache, and nothing is removed from a damaged one
    except CacheNotFoundError:
        if layout.building.exists():  # of a first build, which may be at work: then that is what there is to say
            with suppress(CacheReadOnlyError), builder_lock(layout.lock):
                pass
        raise
    with ExitStack() as locks:
        try:
            locks.enter_context(builder_lock(layout.lock))
        except CacheReadOnlyError:
            if apply:
                raise
        collector = _Collector(layout, keep, grace_s, damaged, apply)
        try:
            if apply:
                check_one_disk(layout)
            return collector.run()
        except StoreError:
            raise
        except OSError as error:
            raise as_store_error(error, Path(error.filename or cache)) from error


@dataclass(slots=True)
class _Collector:
    """One collection; the caller holds the builder lock."""

    layout: CacheLayout
    keep: int
    grace_s: float
    damaged: bool
    apply: bool
    items: list[Waste] = field(default_factory=list)

    def run(self) -> CollectReport:
        self._compact()
        stay = self._generations()
        self._shards(stay)
        self._leftovers()
        return CollectReport(applied=self.apply, generation=self.layout.current_generation(), items=tuple(self.items))

    def _compact(self) -> None:
        """Copy what is needed of shards that are mostly unneeded. A build that has not ended may need the rest."""
        if self.layout.building.exists():
            return
        current = load_any(self.layout.root)
        others = [old.shards for old, reason in self._fates() if reason and old.number != current.number]
        if None in others:
            return
        shared = frozenset[str]().union(*(shards for shards in others if shards))
        sparse = sparse_shards(self.layout, current, shared)
        done, broken = compact(self.layout, current, sparse) if self.apply and sparse else ([], [])
        for item in sparse:
            state = "held" if item in broken else "compacted" if item in done else "compactable"
            size = disk_bytes(self.layout.shards / item.shard)
            freed = size if item in broken else size * (item.entries - item.live) // item.entries
            reason = "damaged" if item in broken else "sparse"
            self.items.append(Waste(state=state, reason=reason, file=f"shards/{item.shard}", num_bytes=freed))

    def _fates(self) -> Iterator[tuple[OldGeneration, str]]:
        """Every generation and why it stays; without a reason it may go, and no reader gets it until the next one."""
        current = self.layout.current_generation()
        generations = generations_on_disk(self.layout, current)
        replaced = {old.replaces for old in generations if old.number <= current}
        lasting = [o.number for o in reversed(generations) if o.number <= current and o.shards is not None]
        kept = set([number for number in lasting if number not in replaced or number == current][: self.keep])
        for old in generations:
            if old.number in kept:
                yield old, "kept"
            elif old.number < current and self._is_recent(old.since):
                yield old, "grace"
            else:
                with unpinned(old.folder / "manifest.json") as free:
                    yield old, "" if free else "pinned"

    def _generations(self) -> list[tuple[OldGeneration, str]]:
        """Remove generations; returns those that stay, and why."""
        stay = []
        for old, reason in self._fates():
            if not reason:
                self._remove(old.folder, "superseded" if old.shards is not None else "damaged")
                continue
            stay.append((old, reason))
            if reason != "kept":
                self._hold(old.folder, reason, self._holders(old, reason))
        return stay

    def _shards(self, stay: list[tuple[OldGeneration, str]]) -> None:
        """Remove shards that no generation needs which stays."""
        # A repair that died has retired a shard and not yet published where its entries are now.
        unfinished = not self.layout.retired().isdisjoint(load_any(self.layout.root).shards)
        blind = next(((old, reason) for old, reason in stay if old.shards is None), None)
        for folder in self.layout.all_sealed():
            needing = [(old, reason) for old, reason in stay if old.shards is None or folder.name in old.shards]
            if any(reason == "kept" for _, reason in needing):
                continue
            retired = self.layout.retired_mark(folder.name).exists()
            if needing or blind:
                old, reason = needing[0] if needing else blind or stay[0]
                self._hold(folder, reason, self._holders(old, reason))
            elif self.layout.building.exists() and not retired:
                self._hold(folder, "unfinished-build")
            elif unfinished and not retired:
                self._hold(folder, "unfinished-repair")
            elif not retired and self._is_recent(sealed_at(folder)):
                self._hold(folder, "grace")
            else:
                self._remove(folder, "retired" if retired else "unreferenced")

    def _leftovers(self) -> None:
        """Remove what processes that died have left half made or half removed."""
        for folder in self.layout.open_shards():
            if self.layout.building.exists() or not self._is_elsewhere(folder):
                self._hold(folder, "unfinished-build")
            else:
                self._remove(folder, "left-over")
        for path in leftovers(self.layout):
            self._remove(path, "left-over")
        for path in sorted(self.layout.quarantine.glob("*")):
            if self.damaged:
                self._remove(path, "damaged")
            else:
                self._hold(path, "damaged")
        if self.apply:
            shutil.rmtree(self.layout.scratch, ignore_errors=True)

    def _is_recent(self, moment: float) -> bool:
        return self.grace_s > 0 and time.time() - moment < self.grace_s

    def _is_elsewhere(self, folder: Path) -> bool:
        """Whether every entry of an open shard is in a sealed one too."""
        known = load_catalog(self.layout)
        try:
            return all(entry.key in known for entry in live_entries(folder, payloads=False))
        except (OSError, StoreError):
            return False

    def _holders(self, old: OldGeneration, reason: str) -> tuple[Holder, ...]:
        return tuple(holders(old.folder / "manifest.json")) if reason == "pinned" else ()

    def _hold(self, path: Path, reason: str, by: tuple[Holder, ...] = ()) -> None:
        self.items.append(self._waste("held", reason, path, by))

    def _remove(self, path: Path, reason: str) -> None:
        """One thing goes: out of sight in one step, then for good."""
        waste = self._waste("removable", reason, path)
        if self.apply:
            failpoint("collect-delete")
            if path.parent == self.layout.scratch:
                _delete(path)
            else:
                gone = to_scratch(self.layout, path)
                self.layout.retired_mark(path.name).unlink(missing_ok=True)
                failpoint("collect-delete")
                _delete(gone)
            waste = replace(waste, state="removed")
        self.items.append(waste)

    def _waste(self, state: str, reason: str, path: Path, by: tuple[Holder, ...] = ()) -> Waste:
        file = path.relative_to(self.layout.root).as_posix()
        return Waste(state=state, reason=reason, file=file, num_bytes=disk_bytes(path), holders=by)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
