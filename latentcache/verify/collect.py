"""``collect``: find data that no snapshot needs and, on request, delete it.

Guarantee: data of the current snapshot, of kept ones and of ones with a lease is never deleted. Entries of an
unfinished build stay, too. Each thing is removed by one rename: after a crash it is whole or gone, and the same
command continues. Sources are not looked at. Cost: payloads are read only to copy them to another shard.
"""

from __future__ import annotations

import shlex
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import CacheDamagedError, CacheFormatError, CacheReadOnlyError, CorruptEntryError, UsageError
from latentcache.failpoint import failpoint
from latentcache.store.atomic_io import writing
from latentcache.store.garbage import (
    copy_entries,
    disk_bytes,
    intact_snapshots,
    publish_moved,
    shard_use,
)
from latentcache.store.lock import builder_lock, unleased
from latentcache.store.paths import CachePaths
from latentcache.store.publish import to_scratch
from latentcache.store.snapshot import load_manifest, open_snapshot
from latentcache.value import Value

#: Snapshots that stay, the current one among them.
KEEP = 2
#: A shard is copied if less than this part of its entries is needed: then at least as much is freed as is written.
MOST_NEEDED = 0.5
_BUILDING = "until the build that was started has ended"
_DAMAGED = "until `latentcache verify CACHE --repair --yes` has removed its damaged entries"
_STATES = ("removable", "removed", "held")


class Garbage(Value):
    """One thing that can go, went, or has to stay for now."""

    state: str
    """``removable``, ``removed`` or ``held``."""
    reason: str
    file: str
    """Relative to the cache."""
    num_bytes: int
    """On disk; of a shard to be copied its unneeded part."""
    entries: int = 0
    """Unreferenced entries in a shard to be copied."""
    snapshot: int = 0
    """Number of the snapshot that keeps it; 0: none does."""
    until: str = ""
    """Reason that it stays, and until when; empty if it goes."""

    def as_json(self) -> dict[str, Any]:
        """The item of ``gc --json``."""
        item = {"category": self.state, "reason": self.reason, "path": "", "file": self.file, "bytes": self.num_bytes}
        item["hint"] = f"it stays {self.until}" if self.until else "no kept snapshot needs it"
        more = {"entries": self.entries, "snapshot": self.snapshot, "until": self.until}
        return item | {name: value for name, value in more.items() if value}


class CollectReport(Value):
    """Result of a collection."""

    applied: bool
    snapshot: int
    """The current snapshot afterwards."""
    items: tuple[Garbage, ...]
    unreferenced: int = 0
    """Entries that no snapshot on disk needed before."""

    def num_bytes(self, state: str) -> int:
        """Bytes of all things in a state."""
        return sum(item.num_bytes for item in self.items if item.state == state)

    def as_json(self) -> dict[str, Any]:
        """Payload of ``gc --json``."""
        states = [item.state for item in self.items]
        return {
            "applied": self.applied,
            "snapshot": self.snapshot,
            "counts": {name: states.count(name) for name in _STATES} | {"unreferenced": self.unreferenced},
            "freed_bytes": self.num_bytes("removed"),
            "removable_bytes": self.num_bytes("removable"),
            "held_bytes": self.num_bytes("held"),
            "items": [item.as_json() for item in self.items],
        }


def collect(cache: Path, *, apply: bool = False, keep: int = KEEP) -> CollectReport:
    """Find data that no snapshot needs, and delete it if ``apply`` says so.

    Args:
        cache: The cache folder.
        apply: Delete it; otherwise only report it.
        keep: Snapshots that stay, the current one among them; one that a repair or a collection replaced is extra.
    """
    if keep < 1:
        raise UsageError("the current snapshot always stays", argument="keep", value=keep, fix="--keep 1")
    paths = CachePaths(cache)
    if not paths.current_snapshot():  # no lock is left in a folder that is no cache
        open_snapshot(cache)
    with ExitStack() as locks, writing(cache):
        try:
            locks.enter_context(builder_lock(paths.lock))
        except CacheReadOnlyError:
            if apply:
                raise
        return _Collector(paths, keep, apply).run()


class _Old(Value):
    """One snapshot on disk, and why it stays."""

    number: int
    shards: frozenset[str] | None
    """None if the manifest is damaged."""
    reason: str
    until: str


class _Collector:
    """One collection; the caller holds the builder lock."""

    def __init__(self, paths: CachePaths, keep: int, apply: bool) -> None:
        self.paths, self.keep, self.apply = paths, keep, apply
        self.items: list[Garbage] = []

    def run(self) -> CollectReport:
        open_snapshot(self.paths.root).check()
        uses = shard_use(self.paths, intact_snapshots(self.paths))
        if not self.paths.building.exists():
            self._rewrite()
        self._shards(self._snapshots(remove=True))
        self._leftovers()
        return CollectReport(
            applied=self.apply,
            snapshot=self.paths.current_snapshot(),
            items=tuple(self.items),
            unreferenced=sum(max(use.entries - use.needed, 0) for use in uses),
        )

    def _rewrite(self) -> None:
        """Copy the needed entries of shards that are mostly unneeded into new ones, and publish the same samples.

        Left as they are: shards with damaged entries, or of snapshots that stay beside the current one.
        """
        current, moved = open_snapshot(self.paths.root), dict[str, str]()
        others = [old.shards or frozenset() for old in self._snapshots(remove=False) if old.number != current.number]
        shared = frozenset[str]().union(*others)
        for use in shard_use(self.paths, [current]):
            if use.name in shared or not 0 < use.needed < MOST_NEEDED * use.entries:
                continue
            folder, number = self.paths.shard(use.name), current.shards.index(use.name)
            about = {"entries": use.entries - use.needed, "num_bytes": max(use.bytes - use.needed_bytes, 0)}
            if not self.apply:
                self._add("removable", "low-utilization", folder, **about)
                continue
            shards = [(rows, np.asarray(rows.shard)) for rows in current.fields.values()]
            spans = [rows.entry_spans(np.flatnonzero(shard == number)) for rows, shard in shards]
            try:
                moved[use.name] = copy_entries(self.paths, folder, np.concatenate(spans))
            except (CacheDamagedError, CorruptEntryError):
                self._add("held", "damaged", folder, until=_DAMAGED, **about)
        if moved:
            failpoint("collect-delete")
            publish_moved(self.paths, current, moved)

    def _snapshots(self, *, remove: bool) -> list[_Old]:
        """Snapshots that stay, upwards; ``remove`` the others, while readers are kept away from them."""
        current, manifests, staying = self.paths.current_snapshot(), dict[int, dict[str, Any]](), list[_Old]()
        for number in self.paths.snapshots():
            with suppress(CacheDamagedError, CacheFormatError):
                manifests[number] = load_manifest(self.paths.snapshot(number))
        kept = [number for number in sorted(manifests, reverse=True) if number <= current][: self.keep]
        for number in self.paths.snapshots():
            folder = self.paths.snapshot(number)
            if number in kept:
                age = kept.index(number)
                newer = "the next snapshot" if self.keep - age == 1 else f"{self.keep - age} newer snapshots"
                reason, until = "rollback", f"until {newer}, or now with --keep {age}"
            else:
                with unleased(folder / "manifest.json") as free:
                    if free and remove:
                        self._remove(folder, "superseded" if number in manifests else "damaged")
                if free:
                    continue
                readers = f"`fuser {shlex.quote(str(folder / 'manifest.json'))}` names them on their machine"
                reason, until = "leased", f"until its readers close the cache ({readers})"
            shards = frozenset(manifests[number]["shards"]) if number in manifests else None
            staying.append(_Old(number=number, shards=shards, reason=reason, until=until))
            if remove and number != current:
                self._keep_for(folder, staying[-1])
        return staying

    def _shards(self, stay: list[_Old]) -> None:
        """Remove shards that no snapshot needs which stays."""
        current = self.paths.current_snapshot()
        for folder in self.paths.sealed_shards():
            needing = [old for old in stay if old.shards is None or folder.name in old.shards]
            kept = [old for old in needing if old.reason == "rollback"]
            if any(old.number == current for old in kept):
                continue
            if needing:
                self._keep_for(folder, kept[-1] if kept else needing[0])
            elif self.paths.building.exists():
                self._add("held", "unfinished-build", folder, until=_BUILDING)
            else:
                self._remove(folder, "unreferenced")

    def _leftovers(self) -> None:
        """Remove files never put in place and snapshots never published."""
        paths = self.paths
        for folder in paths.open_shards():
            self._add("held", "unfinished-build", folder, until="until the next `latentcache build` has sealed it")
        of_shards = sorted(
            path for name in ("*.tmp", "*/*.tmp") for path in paths.shards.glob(name) if path.is_file()
        )
        for path in (*sorted(paths.scratch.glob("*")), *of_shards, *paths.leftovers()):
            self._remove(path, "left-over")
        if self.apply:
            shutil.rmtree(paths.scratch, ignore_errors=True)

    def _keep_for(self, path: Path, old: _Old) -> None:
        self._add("held", old.reason, path, until=old.until, snapshot=old.number)

    def _remove(self, path: Path, reason: str) -> None:
        """Move a thing out of sight in one step, then delete it."""
        self._add("removed" if self.apply else "removable", reason, path)
        if not self.apply:
            return
        failpoint("collect-delete")
        if path.parent != self.paths.scratch:
            path = to_scratch(self.paths, path)
            failpoint("collect-delete")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def _add(self, state: str, reason: str, path: Path, num_bytes: int | None = None, **more: Any) -> None:
        file, size = (
            path.relative_to(self.paths.root).as_posix(),
            disk_bytes(path) if num_bytes is None else num_bytes,
        )
        self.items.append(Garbage(state=state, reason=reason, file=file, num_bytes=size, **more))
