"""``collect``: find data that no snapshot needs and, on request, delete it.

Guarantee: data that the current snapshot needs, a kept one, or one with a lease, is never deleted, nor what a build
that has not ended has committed. Each thing is removed by one rename, so a crash leaves it whole or gone, and the
same command continues. Sources are not looked at. Cost: no payload is read but those that a compaction copies.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from latentcache.errors import CacheNotFoundError, CacheReadOnlyError, LatentcacheError, StoreError, UsageError
from latentcache.failpoint import failpoint
from latentcache.store.atomic_io import as_store_error
from latentcache.store.garbage import ShardUse, shard_use, to_scratch
from latentcache.store.lease import Holder, holders, unleased
from latentcache.store.lock import builder_lock
from latentcache.store.paths import TOMBSTONE_SUFFIX, CachePaths
from latentcache.store.snapshot import Snapshot, load_manifest, open_snapshot
from latentcache.value import Value
from latentcache.verify.compact import compact, is_worth_copying

#: Snapshots that stay, the current one among them.
KEEP = 2
#: How long data that stopped being needed stays for readers without a lease, in seconds.
GRACE_S = 3600.0
_BUILDING = "until the build that was started has ended"


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
        """The item of ``gc --json``, without its hint."""
        item: dict[str, Any] = {
            "category": self.state,
            "reason": self.reason,
            "path": "",
            "file": self.file,
            "bytes": self.num_bytes,
        }
        item |= {"entries": self.entries} if self.entries else {}
        item |= {"snapshot": self.snapshot} if self.snapshot else {}
        item |= {"holders": [asdict(holder) for holder in self.holders]} if self.holders else {}
        return item | ({"until": self.until} if self.until else {})


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
        names = ("removable", "removed", "held", "compactable", "compacted")
        return {
            "applied": self.applied,
            "snapshot": self.snapshot,
            "counts": {name: states.count(name) for name in names} | {"unreferenced": self.unreferenced},
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
        open_snapshot(
            cache
        )  # no lock is left in a folder that is no cache, and nothing is removed from a damaged one
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
        collector = _Collector(paths, keep, grace_s, damaged, apply)
        try:
            return collector.run()
        except StoreError:
            raise
        except OSError as error:
            raise as_store_error(error, Path(error.filename or cache)) from error


class _Old(Value):
    """One snapshot on disk."""

    number: int
    folder: Path
    shards: frozenset[str] | None
    """None if the manifest is damaged."""
    replaces: int
    since: float
    """When it stopped being the current one, in seconds since 1970."""


@dataclass(slots=True)
class _Collector:
    """One collection; the caller holds the builder lock."""

    paths: CachePaths
    keep: int
    grace_s: float
    damaged: bool
    apply: bool
    items: list[Garbage] = field(default_factory=list)
    _kept: list[int] = field(default_factory=list)
    """Numbers of the snapshots that stay, newest first."""

    def run(self) -> CollectReport:
        uses = shard_use(self.paths, self._readable())
        unreferenced = sum(max(use.entries - use.needed, 0) for use in uses)
        self._compact({use.name: use for use in uses})
        stay = self._snapshots()
        self._shards(stay)
        self._leftovers()
        current = self.paths.current_snapshot()
        return CollectReport(applied=self.apply, snapshot=current, items=tuple(self.items), unreferenced=unreferenced)

    def _readable(self) -> list[Snapshot]:
        found = []
        for number in self.paths.snapshots():
            with suppress(LatentcacheError):
                found.append(open_snapshot(self.paths.root, number))
        return found

    def _compact(self, everywhere: Mapping[str, ShardUse]) -> None:
        """Copy the needed part of shards that are mostly unneeded. A build that has not ended may need the rest."""
        current, building = open_snapshot(self.paths.root), self.paths.building.exists()
        others = [old.shards for old, reason in self._fates() if reason and old.number != current.number]
        if None in others:
            return
        shared = frozenset[str]().union(*(shards for shards in others if shards))
        uses = [use for use in shard_use(self.paths, [current]) if use.name in current.shards and not use.tombstoned]
        worth = [use for use in uses if is_worth_copying(use) and use.name not in shared and not building]
        done = compact(self.paths, current, worth) if self.apply and worth else set()
        for use in uses:
            state, reason, until = "compacted" if self.apply else "compactable", "low-utilization", ""
            use = use if use in worth else everywhere[use.name]
            if use in worth and self.apply and use.name not in done:
                state, reason = "held", "damaged"
                until = "until `latentcache verify CACHE --repair --yes` has removed its damaged entries"
            elif use not in worth and use.entries > use.needed:
                state, reason, until = "held", "in-use", "until less than half of the entries of its shard are needed"
                until = "until no other snapshot needs its shard" if use.name in shared else until
                if building:
                    reason, until = "unfinished-build", _BUILDING
            elif use not in worth:
                continue
            size, entries = max(use.bytes - use.needed_bytes, 0), 0 if use in worth else use.entries - use.needed
            file = f"shards/{use.name}"
            self.items.append(
                Garbage(state=state, reason=reason, file=file, num_bytes=size, entries=entries, until=until)
            )

    def _fates(self) -> Iterator[tuple[_Old, str]]:
        """Every snapshot and why it stays; without a reason it goes, and no reader gets it until the next one."""
        current = self.paths.current_snapshot()
        snapshots = _on_disk(self.paths, current)
        replaced = {old.replaces for old in snapshots if old.number <= current}
        lasting = [old.number for old in reversed(snapshots) if old.number <= current and old.shards is not None]
        kept = self._kept = [number for number in lasting if number not in replaced or number == current][: self.keep]
        for old in snapshots:
            if old.number in kept:
                yield old, "kept"
            elif old.number < current and self._is_recent(old.since):
                yield old, "grace"
            else:
                with unleased(old.folder / "manifest.json") as free:
                    if free:
                        yield old, ""
                if not free:
                    yield old, "leased"

    def _snapshots(self) -> list[tuple[_Old, str]]:
        """Remove snapshots; returns those that stay, and why."""
        stay = []
        for old, reason in self._fates():
            if not reason:
                self._remove(old.folder, "superseded" if old.shards is not None else "damaged")
                continue
            stay.append((old, reason))
            if old.number != self.paths.current_snapshot():
                self._hold_for(old.folder, old, reason)
        return stay

    def _shards(self, stay: list[tuple[_Old, str]]) -> None:
        """Remove shards that no snapshot needs which stays."""
        # A repair that died has tombstoned a shard and not yet published where its entries are now.
        tombstoned = self.paths.tombstoned()
        unfinished = not tombstoned.isdisjoint(open_snapshot(self.paths.root).shards)
        current = self.paths.current_snapshot()
        blind = next(((old, reason) for old, reason in stay if old.shards is None), None)
        for folder in self.paths.all_sealed():
            needing = [(old, reason) for old, reason in stay if old.shards is None or folder.name in old.shards]
            kept = [old for old, reason in needing if reason == "kept"]
            if any(old.number == current for old in kept):
                continue
            if kept:
                self._hold_for(folder, kept[-1], "kept")
                continue
            dead, sealed = folder.name in tombstoned, _sealed_at(folder)
            if needing or blind:
                self._hold_for(folder, *(needing[0] if needing else blind or stay[0]))
            elif self.paths.building.exists() and not dead:
                self._hold(folder, "unfinished-build", _BUILDING)
            elif unfinished and not dead:
                self._hold(folder, "unfinished-repair", "until the repair is run again, or a build")
            elif not dead and self._is_recent(sealed):
                self._hold(folder, "grace", f"until {_clock(sealed + self.grace_s)}, for readers without a lease")
            else:
                self._remove(folder, "tombstoned" if dead else "unreferenced")

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

    def _is_recent(self, moment: float) -> bool:
        return self.grace_s > 0 and time.time() - moment < self.grace_s

    def _hold_for(self, path: Path, old: _Old, reason: str) -> None:
        """Something that a snapshot keeps that is not the current one."""
        if reason == "kept":
            age = self._kept.index(old.number)
            builds = self.keep - age
            newer = "the next snapshot" if builds == 1 else f"{builds} newer snapshots"
            self._hold(path, "rollback", f"until {newer}, or now with --keep {age}", number=old.number)
        elif reason == "leased":
            by = tuple(holders(old.folder / "manifest.json"))
            self._hold(path, reason, "until its readers close the cache", by, number=old.number)
        else:
            until = f"until {_clock(old.since + self.grace_s)}, for readers without a lease"
            self._hold(path, reason, until, number=old.number)

    def _hold(self, path: Path, reason: str, until: str, by: tuple[Holder, ...] = (), *, number: int = 0) -> None:
        found = self._garbage("held", reason, path)
        self.items.append(replace(found, holders=by, until=until, snapshot=number))

    def _remove(self, path: Path, reason: str) -> None:
        """Move a thing out of sight in one step, then delete it."""
        item = self._garbage("removable", reason, path)
        if self.apply:
            failpoint("collect-delete")
            if path.parent == self.paths.scratch:
                _delete(path)
            else:
                gone = to_scratch(self.paths, path)
                self.paths.tombstone(path.name).unlink(missing_ok=True)
                failpoint("collect-delete")
                _delete(gone)
            item = replace(item, state="removed")
        self.items.append(item)

    def _garbage(self, state: str, reason: str, path: Path) -> Garbage:
        file = path.relative_to(self.paths.root).as_posix()
        return Garbage(state=state, reason=reason, file=file, num_bytes=disk_bytes(path))


def disk_bytes(path: Path) -> int:
    """Space that a file or folder takes, in bytes."""
    total = 0
    for place in [path, *(Path(folder, name) for folder, _, names in os.walk(path) for name in names)]:
        with suppress(OSError):
            total += place.lstat().st_blocks * 512
    return total


def _on_disk(paths: CachePaths, current: int) -> list[_Old]:
    """The snapshots on disk, upwards."""
    numbers, found = paths.snapshots(), []
    for position, number in enumerate(numbers):
        folder = paths.snapshot(number)
        manifest: dict[str, Any] = {}
        with suppress(StoreError):
            manifest = load_manifest(folder)
        after = paths.snapshot(numbers[position + 1]) if number < current and position + 1 < len(numbers) else folder
        found.append(
            _Old(
                number=number,
                folder=folder,
                shards=frozenset(manifest["shards"]) if manifest else None,
                replaces=int(manifest.get("replaces", 0)),
                since=(after / "manifest.json").stat().st_mtime,
            )
        )
    return found


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


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
