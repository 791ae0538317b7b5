"""``collect``: find data that no snapshot needs and, on request, delete it.

Guarantee: data that the current snapshot needs, a kept one, or one with a lease, is never deleted, nor what a build
that has not ended has committed. Each thing is removed by one rename, so a crash leaves it whole or gone, and the
same command continues. Sources are not looked at. Cost: no payload is read but those that a compaction copies.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import CacheNotFoundError, CacheReadOnlyError, LatentcacheError, StoreError, UsageError
from latentcache.failpoint import failpoint
from latentcache.store.atomic_io import as_store_error
from latentcache.store.garbage import ShardUse, copy_entries, disk_bytes, relocate, shard_use, to_scratch, tombstone
from latentcache.store.lock import Holder, builder_lock, holders, unleased
from latentcache.store.paths import TOMBSTONE_SUFFIX, CachePaths
from latentcache.store.snapshot import Snapshot, load_manifest, open_snapshot
from latentcache.value import Value

#: Snapshots that stay, the current one among them.
KEEP = 2
#: How long data that stopped being needed stays for readers without a lease, in seconds.
GRACE_S = 3600.0
#: A shard is copied if less than this part of its entries is needed: then at least as much is freed as is written.
MOST_NEEDED = 0.5
_BUILDING = "until the build that was started has ended"
_STATES = ("removable", "removed", "held", "compactable", "compacted")


class Garbage(Value):
    """One thing that can go, went, or has to stay for now."""

    state: str
    """``removable``, ``removed``, ``held``, ``compactable`` or ``compacted``."""
    reason: str
    file: str
    """Relative to the cache."""
    num_bytes: int
    """On disk; of a shard to be copied, or in use, its unneeded part."""
    entries: int = 0
    """Unreferenced entries in it, if it is a shard that is in use."""
    holders: tuple[Holder, ...] = ()
    snapshot: int = 0
    """Number of the snapshot that keeps it; 0: none does."""
    until: str = ""
    """Why it stays and until when; empty if it goes."""

    def as_json(self) -> dict[str, Any]:
        """The item of ``gc --json``."""
        more = {"entries": self.entries, "snapshot": self.snapshot, "until": self.until}
        more["holders"] = [asdict(holder) for holder in self.holders]
        item = {"category": self.state, "reason": self.reason, "path": "", "file": self.file, "bytes": self.num_bytes}
        item["hint"] = f"it stays {self.until}" if self.until else "no kept snapshot needs it"
        return item | {name: value for name, value in more.items() if value}


class CollectReport(Value):
    """Result of a collection."""

    applied: bool
    snapshot: int
    """The current snapshot afterwards."""
    items: tuple[Garbage, ...]
    unreferenced: int = 0
    """Entries that no snapshot on disk needed before."""

    def num_bytes(self, *states: str) -> int:
        """Bytes of all things in one of these states."""
        return sum(item.num_bytes for item in self.items if item.state in states)

    def as_json(self) -> dict[str, Any]:
        """Payload of ``gc --json``."""
        states = [item.state for item in self.items]
        return {
            "applied": self.applied,
            "snapshot": self.snapshot,
            "counts": {name: states.count(name) for name in _STATES} | {"unreferenced": self.unreferenced},
            "freed_bytes": self.num_bytes("removed", "compacted"),
            "removable_bytes": self.num_bytes("removable", "compactable"),
            "held_bytes": self.num_bytes("held"),
            "items": [item.as_json() for item in self.items],
        }


def collect(
    cache: Path, *, apply: bool = False, keep: int = KEEP, grace_s: float = GRACE_S, damaged: bool = False
) -> CollectReport:
    """Find data that no snapshot needs, and delete it if ``apply`` says so.

    Args:
        cache: The cache folder.
        apply: Delete it; otherwise only report it.
        keep: Snapshots that stay, the current one among them; one that a repair or compaction replaced is extra.
        grace_s: Data that stopped being needed less than so many seconds ago stays.
        damaged: Delete the contents of ``quarantine/`` too.

    Raises:
        UsageError: ``keep`` below 1 or a negative ``grace_s``.
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: The current snapshot is damaged, so that nothing tells what is needed.
        CacheLockedError: A build, a repair or another collection is at work here.
    """
    if keep < 1 or not grace_s >= 0:
        raise UsageError(f"keep={keep}, grace={grace_s}: the current snapshot always stays", fix="--keep 1 --grace 0")
    paths = CachePaths(cache)
    try:
        open_snapshot(cache)  # no lock is left in a folder that is no cache, and a damaged one loses nothing
    except CacheNotFoundError:
        if paths.building.exists():  # a first build, which may be at work: then that is the answer
            with suppress(CacheReadOnlyError), builder_lock(paths.lock):
                pass
        raise
    with ExitStack() as locks:
        try:
            locks.enter_context(builder_lock(paths.lock))
        except CacheReadOnlyError:
            if apply:
                raise
        try:
            return _Collector(paths, keep, grace_s, damaged, apply).run()
        except StoreError:
            raise
        except OSError as error:
            raise as_store_error(error, Path(error.filename or cache)) from error


class _Old(Value):
    """One snapshot on disk, and why it stays."""

    number: int
    shards: frozenset[str] | None
    """None if the manifest is damaged."""
    reason: str
    """Empty: it goes, unless a reader holds it."""
    until: str = ""
    holders: tuple[Holder, ...] = ()


class _Collector:
    """One collection; the caller holds the builder lock."""

    def __init__(self, paths: CachePaths, keep: int, grace_s: float, damaged: bool, apply: bool) -> None:
        self.paths, self.keep, self.grace_s, self.damaged, self.apply = paths, keep, grace_s, damaged, apply
        self.items: list[Garbage] = []

    def run(self) -> CollectReport:
        snapshots = list[Snapshot]()
        for number in self.paths.snapshots():
            with suppress(LatentcacheError):
                snapshots.append(open_snapshot(self.paths.root, number))
        uses = shard_use(self.paths, snapshots)
        unreferenced = sum(max(use.entries - use.needed, 0) for use in uses)
        self._compact({use.name: use for use in uses})
        self._shards(list(self._snapshots(remove=True)))
        self._leftovers()
        current = self.paths.current_snapshot()
        return CollectReport(applied=self.apply, snapshot=current, items=tuple(self.items), unreferenced=unreferenced)

    def _compact(self, everywhere: dict[str, ShardUse]) -> None:
        """Copy the needed part of shards that are mostly unneeded. A build that has not ended may need the rest."""
        current, building = open_snapshot(self.paths.root), self.paths.building.exists()
        others = [old.shards for old in self._snapshots(remove=False) if old.number != current.number]
        if None in others:
            return
        shared = frozenset[str]().union(*(shards for shards in others if shards))
        uses = [use for use in shard_use(self.paths, [current]) if use.name in current.shards and not use.tombstoned]
        worth = [use for use in uses if 0 <= use.needed < MOST_NEEDED * use.entries and use.name not in shared]
        worth = [] if building else worth
        done = _compact(self.paths, current, worth) if self.apply and worth else set()
        for use in uses:
            part, entries, until = everywhere[use.name], 0, ""
            if use in worth:
                state, reason, part = "compacted" if self.apply else "compactable", "low-utilization", use
                if self.apply and use.name not in done:
                    state, reason = "held", "damaged"
                    until = "until `latentcache verify CACHE --repair --yes` has removed its damaged entries"
            elif part.entries > part.needed:
                state, reason, entries = "held", "in-use", part.entries - part.needed
                until = "until less than half of the entries of its shard are needed"
                until = "until no other snapshot needs its shard" if use.name in shared else until
                reason, until = ("unfinished-build", _BUILDING) if building else (reason, until)
            else:
                continue
            file, size = f"shards/{use.name}", max(part.bytes - part.needed_bytes, 0)
            found = Garbage(state=state, reason=reason, file=file, num_bytes=size, entries=entries, until=until)
            self.items.append(found)

    def _snapshots(self, *, remove: bool) -> Iterator[_Old]:
        """Snapshots that stay, upwards; ``remove`` the others, while readers are kept away from them."""
        for old in self._on_disk():
            folder = self.paths.snapshot(old.number)
            if not old.reason:
                with unleased(folder / "manifest.json") as free:
                    if free and remove:
                        self._remove(folder, "superseded" if old.shards is not None else "damaged")
                if free:
                    continue
                by = tuple(holders(folder / "manifest.json"))
                old = replace(old, reason="leased", until="until its readers close the cache", holders=by)
            if remove and old.number != self.paths.current_snapshot():
                self._hold_for(folder, old)
            yield old

    def _on_disk(self) -> Iterator[_Old]:
        """The snapshots on disk, upwards, and why each stays."""
        current, numbers = self.paths.current_snapshot(), self.paths.snapshots()
        manifests = dict[int, dict[str, Any]]()
        for number in numbers:
            manifests[number] = {}
            with suppress(StoreError):
                manifests[number] = load_manifest(self.paths.snapshot(number))
        replaced = {int(manifests[number].get("replaces", 0)) for number in numbers if number <= current}
        lasting = [number for number in reversed(numbers) if number <= current and manifests[number]]
        kept = [number for number in lasting if number not in replaced or number == current][: self.keep]
        for number, after in zip(numbers, [*numbers[1:], current], strict=True):
            reason = until = ""
            if number in kept:
                age = kept.index(number)
                builds = self.keep - age
                newer = "the next snapshot" if builds == 1 else f"{builds} newer snapshots"
                reason, until = "rollback", f"until {newer}, or now with --keep {age}"
            elif number < current:
                since = (self.paths.snapshot(after) / "manifest.json").stat().st_mtime
                reason, until = self._grace(since)
            shards = frozenset(manifests[number]["shards"]) if manifests[number] else None
            yield _Old(number=number, shards=shards, reason=reason, until=until)

    def _shards(self, stay: list[_Old]) -> None:
        """Remove shards that no snapshot needs which stays."""
        # A repair that died has tombstoned a shard and not yet published where its entries are now.
        tombstoned = self.paths.tombstoned()
        unfinished = not tombstoned.isdisjoint(open_snapshot(self.paths.root).shards)
        current = self.paths.current_snapshot()
        for folder in self.paths.all_sealed():
            needing = [old for old in stay if old.shards is None or folder.name in old.shards]
            kept = [old for old in needing if old.reason == "rollback"]
            if any(old.number == current for old in kept):
                continue
            if needing:
                self._hold_for(folder, kept[-1] if kept else needing[0])
            elif folder.name in tombstoned:
                self._remove(folder, "tombstoned")
            elif self.paths.building.exists():
                self._hold(folder, "unfinished-build", _BUILDING)
            elif unfinished:
                self._hold(folder, "unfinished-repair", "until the repair is run again, or a build")
            elif (grace := self._grace(_sealed_at(folder)))[0]:
                self._hold(folder, *grace)
            else:
                self._remove(folder, "unreferenced")

    def _leftovers(self) -> None:
        """Remove what processes that died have left half made or half removed."""
        for folder in self.paths.open_shards():
            self._hold(folder, "unfinished-build", "until the next `latentcache build` has sealed it")
        for path in _leftovers(self.paths):
            self._remove(path, "left-over")
        for path in sorted(self.paths.quarantine.glob("*")):
            if self.damaged:
                self._remove(path, "damaged")
            else:
                self._hold(path, "damaged", "until `latentcache gc CACHE --damaged --apply`")
        if self.apply:
            shutil.rmtree(self.paths.scratch, ignore_errors=True)

    def _grace(self, since: float) -> tuple[str, str]:
        """Reason and end of the grace period of what was needed until a moment; empty if that is over."""
        if self.grace_s <= max(time.time() - since, 0):
            return "", ""
        end = datetime.fromtimestamp(since + self.grace_s, UTC).isoformat(timespec="seconds")
        return "grace", f"until {end}, for readers without a lease"

    def _hold_for(self, path: Path, old: _Old) -> None:
        self._hold(path, old.reason, old.until, by=old.holders, number=old.number)

    def _hold(self, path: Path, reason: str, until: str, by: tuple[Holder, ...] = (), number: int = 0) -> None:
        found = self._garbage("held", reason, path)
        self.items.append(replace(found, holders=by, until=until, snapshot=number))

    def _remove(self, path: Path, reason: str) -> None:
        """Move a thing out of sight in one step, then delete it."""
        item = self._garbage("removable", reason, path)
        if self.apply:
            failpoint("collect-delete")
            if path.parent != self.paths.scratch:
                gone = to_scratch(self.paths, path)
                self.paths.tombstone(path.name).unlink(missing_ok=True)
                failpoint("collect-delete")
                path = gone
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            item = replace(item, state="removed")
        self.items.append(item)

    def _garbage(self, state: str, reason: str, path: Path) -> Garbage:
        file = path.relative_to(self.paths.root).as_posix()
        return Garbage(state=state, reason=reason, file=file, num_bytes=disk_bytes(path))


def _compact(paths: CachePaths, snapshot: Snapshot, worth: Collection[ShardUse]) -> set[str]:
    """Copy the needed entries of shards, checksum by checksum, into new ones, and publish the same samples again.

    The old shards get a tombstone. The order of samples and rows is the same, so is every plan. Killed at any point,
    the cache is the old one or the new one. The caller holds the builder lock.

    Returns:
        Names of the shards that were replaced; the others hold damaged entries and were left as they are.
    """
    moved = dict[str, str]()
    for use in worth:
        number = snapshot.shards.index(use.name)
        fields = snapshot.fields.values()
        places = [rows.entry_places(np.flatnonzero(np.asarray(rows.shard) == number)) for rows in fields]
        copy = copy_entries(paths, paths.shard(use.name), np.concatenate(places))
        if copy.saved == sum(map(len, places)):
            moved[use.name] = copy.shard
        elif copy.shard:
            shutil.rmtree(to_scratch(paths, paths.shard(copy.shard)), ignore_errors=True)
    for name in moved:
        failpoint("collect-delete")
        tombstone(paths, name, "compacted")
    if moved:
        relocate(paths, snapshot, moved, complete=snapshot.complete)
    return set(moved)


def _leftovers(paths: CachePaths) -> Iterator[Path]:
    """Files that were never put in place, snapshots that were never published, tombstones of shards that are gone."""
    yield from sorted(paths.scratch.glob("*"))
    for pattern in ("*.tmp", "shards/*.tmp", "shards/*/*.tmp", "snapshots/*/*.tmp"):
        yield from sorted(path for path in paths.root.glob(pattern) if path.is_file())
    if paths.pending.exists():  # the caller holds the builder lock, so the build that announced it is gone
        yield paths.pending
    for folder in sorted(paths.snapshots_folder.glob("*")):
        if folder != paths.pending and folder.is_dir() and not (folder / "manifest.json").exists():
            yield folder
    for mark in sorted(paths.shards.glob(f"*{TOMBSTONE_SUFFIX}")):
        if not (paths.shards / mark.stem).exists():
            yield mark


def _sealed_at(folder: Path) -> float:
    """When a shard was sealed."""
    index = folder / "index.safetensors"
    return (index if index.exists() else folder).stat().st_mtime
