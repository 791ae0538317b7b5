"""``gc``: find data that no snapshot needs, in a folder or at a URL, and delete it on request.

Guarantee: data of the current snapshot, of kept ones and of ones with a lease is never deleted. Entries of an
unfinished build stay, too. Each thing is removed by one rename: after a crash it is whole or gone, and the same
command continues. Sources are not looked at. Cost: payloads are read only to copy them to another shard.

Object storage has no leases, so age decides, by the store's clock. Guarantee: the current snapshot, younger ones,
their shards and all young objects stay. A build that takes longer than the age may lose shards: it ends with an error
before it publishes, and the same command encodes them again.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from latentcache.errors import (
    CacheDamagedError,
    CacheFormatError,
    CacheReadOnlyError,
    CorruptEntryError,
    LatentcacheError,
    RemoteError,
    UsageError,
)
from latentcache.failpoint import failpoint
from latentcache.store.atomic_io import writing
from latentcache.store.gather import STAND_INS, identity
from latentcache.store.lock import builder_lock, unleased
from latentcache.store.paths import CachePaths
from latentcache.store.publish import publish_replacement
from latentcache.store.remote.bucket import Bucket
from latentcache.store.remote.transfer import current_head, no_cache
from latentcache.store.shard import INDEX, copy_entries, load_index, remove_entries
from latentcache.store.snapshot import MANIFEST, FieldRows, Snapshot, load_manifest, open_snapshot
from latentcache.value import Value

#: Bits of an offset in a file; a shard's number is above them.
_OFFSET_BITS = 44
#: Snapshots that stay, the current one among them.
KEEP = 2
#: A shard is copied if less than this part of its entries is needed: then at least as much is freed as is written.
MOST_NEEDED = 0.5
_BUILDING = "until the build that was started has ended"
_DAMAGED = "until `latentcache verify CACHE --repair --yes` has removed its damaged entries"
_STATES = ("removable", "removed", "held")


class ShardUse(NamedTuple):
    """Needed part of a sealed shard."""

    name: str
    entries: int
    """-1 if its index is damaged."""
    needed: int
    """Entries that a snapshot needs."""
    bytes: int
    """Bytes of its file."""
    needed_bytes: int
    """Heads and payloads of the needed entries."""


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
        current = open_snapshot(self.paths.root)
        moved = dict[str, str]()
        others = [old.shards or frozenset() for old in self._snapshots(remove=False) if old.number != current.number]
        shared = frozenset[str]().union(*others)
        for use in shard_use(self.paths, [current]):
            if use.name in shared or not 0 < use.needed < MOST_NEEDED * use.entries:
                continue
            folder = self.paths.shard(use.name)
            number = current.shards.index(use.name)
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
        current = self.paths.current_snapshot()
        manifests = dict[int, dict[str, Any]]()
        staying = list[_Old]()
        for number in self.paths.snapshots():
            with suppress(CacheDamagedError, CacheFormatError):
                manifests[number] = load_manifest(self.paths.snapshot(number))
        kept = [number for number in sorted(manifests, reverse=True) if number <= current][: self.keep]
        for number in self.paths.snapshots():
            folder = self.paths.snapshot(number)
            if number in kept:
                age = kept.index(number)
                newer = "the next snapshot" if self.keep - age == 1 else f"{self.keep - age} newer snapshots"
                reason = "rollback"
                until = f"until {newer}, or now with --keep {age}"
            else:
                with unleased(folder / "manifest.json") as free:
                    if free and remove:
                        self._remove(folder, "superseded" if number in manifests else "damaged")
                if free:
                    continue
                readers = f"`fuser {shlex.quote(str(folder / 'manifest.json'))}` names them on their machine"
                reason = "leased"
                until = f"until its readers close the cache ({readers})"
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
            path = self.paths.to_scratch(path)
            failpoint("collect-delete")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def _add(self, state: str, reason: str, path: Path, num_bytes: int | None = None, **more: Any) -> None:
        file = path.relative_to(self.paths.root).as_posix()
        size = disk_bytes(path) if num_bytes is None else num_bytes
        self.items.append(Garbage(state=state, reason=reason, file=file, num_bytes=size, **more))


def intact_snapshots(paths: CachePaths) -> list[Snapshot]:
    """The snapshots on disk without damage."""
    snapshots = list[Snapshot]()
    for number in paths.snapshots():
        with suppress(LatentcacheError):
            snapshot = open_snapshot(paths.root, number)
            snapshot.check()
            snapshots.append(snapshot)
    return snapshots


def shard_use(paths: CachePaths, snapshots: Sequence[Snapshot]) -> list[ShardUse]:
    """Return the part of each sealed shard that these snapshots need."""
    folders = paths.sealed_shards()
    uses = []
    number = {folder.name: position for position, folder in enumerate(folders)}
    spans, sizes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for snapshot in snapshots:
        numbers = np.array([number.get(name, -1) for name in snapshot.shards], dtype=np.int64)
        for rows in snapshot.fields.values():
            spans.append(numbers[np.asarray(rows.shard)] << _OFFSET_BITS | np.asarray(rows.offset).astype(np.int64))
            sizes.append(np.asarray(rows.head) + np.asarray(rows.bytes).astype(np.int64))
    span, size = np.concatenate(spans), np.concatenate(sizes)
    if len(snapshots) > 1:
        span, first = np.unique(span, return_index=True)
        size = size[first]
    shard = (span >> _OFFSET_BITS) + 1  # 0: a shard that is gone
    entries, num_bytes = (np.bincount(shard, weights, len(folders) + 1)[1:] for weights in (None, size))
    for folder, needed, needed_bytes in zip(folders, entries.tolist(), num_bytes.tolist(), strict=True):
        with suppress(FileNotFoundError, NotADirectoryError):
            whole = (folder / "data.mdb").stat().st_size
            uses.append(ShardUse(folder.name, _entries(folder), needed, whole, int(needed_bytes)))
    return uses


def publish_moved(paths: CachePaths, snapshot: Snapshot, moved: Mapping[str, str]) -> None:
    """Publish a snapshot whose entries were copied from shard to shard; no build uses the old shards any more."""
    names = [*snapshot.shards, *moved.values()]
    fields = list[FieldRows]()
    for rows in snapshot.fields.values():
        shard, offset = np.array(rows.shard), np.array(rows.offset)
        for old, new in moved.items():
            entries = np.flatnonzero(shard == names.index(old))
            index = load_index(paths.shard(new))
            keys, wanted = (column.view("S32")[:, 0] for column in (np.asarray(index.key), rows.key[entries]))
            shard[entries] = names.index(new)
            offset[entries] = np.asarray(index.offset)[np.searchsorted(keys, wanted)]  # in the order of keys
        fields.append(replace(rows, shard=shard, offset=offset))
    publish_replacement(paths, snapshot, fields, shards=names)
    for name in moved:
        remove_entries(paths.shard(name), np.asarray(load_index(paths.shard(name)).key).view("S32")[:, 0])


def disk_bytes(path: Path) -> int:
    """Space that a file or folder takes, in bytes; a file that is renamed meanwhile counts once or not at all."""
    total = 0
    for file in [path, *(Path(folder, name) for folder, _, names in os.walk(path) for name in names)]:
        with suppress(OSError):
            status = file.lstat()
            is_stand_in = identity(status) in STAND_INS
            total += status.st_size if is_stand_in else status.st_blocks * 512  # POSIX counts in blocks of 512 bytes
    return total


def _entries(folder: Path) -> int:
    try:
        return load_index(folder).entries
    except (CacheDamagedError, CorruptEntryError):
        return -1


def collect_url(url: str, *, older_than_s: float, apply: bool = False) -> CollectReport:
    """Find objects that no snapshot needs, and delete them if ``apply`` says so.

    Args:
        url: The cache.
        older_than_s: Seconds for which objects stay that nothing needs: longer than any reader or build takes.
        apply: Delete them; otherwise only report them.

    Raises:
        RemoteError: The store cannot be used, or another snapshot was published meanwhile.
        CacheNotFoundError: There is no cache at the URL.
    """
    bucket = Bucket(url)
    head = current_head(bucket)
    objects = bucket.objects()
    if head is None:
        raise no_cache(bucket)
    folders = defaultdict[str, list[str]](list)
    for key in objects:
        folders["/".join(key.split("/")[:2])].append(key)
    newest = {folder: max(objects[key][1] for key in keys) for folder, keys in folders.items()}
    size = {folder: sum(objects[key][0] for key in keys) for folder, keys in folders.items()}
    before = bucket.now() - timedelta(seconds=older_than_s)
    kept = [
        name for name in folders if name.startswith("snapshots/") and (newest[name] > before or name == head.folder)
    ]
    needed = _needed(bucket, kept, objects)
    items = [
        _judged(name, size[name], newest[name], before, head.folder, needed)
        for name in sorted(folders)
        if name.startswith(("snapshots/", "shards/", "probe-"))
    ]
    garbage = [item for item in items if item is not None]
    if apply:
        if current_head(bucket) != head:
            fix = "run the same command again"
            raise RemoteError(f"{bucket.url} got a snapshot meanwhile", where=bucket.url, fix=fix)
        for item in garbage:
            if item.state == "removable":
                for key in sorted(folders[item.file], key=lambda key: not key.endswith((INDEX, MANIFEST))):
                    bucket.remove(key)
    state = "removed" if apply else "removable"
    return CollectReport(
        applied=apply,
        snapshot=head.snapshot,
        items=tuple(replace(item, state=state) if item.state == "removable" else item for item in garbage),
    )


def _needed(bucket: Bucket, snapshots: list[str], objects: dict[str, tuple[int, datetime]]) -> set[str] | None:
    """Folders of the shards of snapshots; None: one is not whole yet, so any shard may be needed."""
    names = set[str]()
    with TemporaryDirectory(prefix="latentcache-") as folder:
        for snapshot in snapshots:
            if f"{snapshot}/{MANIFEST}" not in objects:
                return None
            bucket.fetch(f"{snapshot}/{MANIFEST}", Path(folder, MANIFEST))
            names.update(load_manifest(Path(folder))["shards"])
    return {f"shards/{name}" for name in names}


def _judged(
    name: str, size: int, newest: datetime, before: datetime, current: str, needed: set[str] | None
) -> Garbage | None:
    """What becomes of the objects of a folder; None: they are in use."""
    is_snapshot = name.startswith("snapshots/")
    if name == current or (needed is not None and name in needed):
        return None
    if newest > before:
        reason = "rollback" if is_snapshot else "unfinished-build"
        return Garbage(state="held", reason=reason, file=name, num_bytes=size, until="until it is older")
    if needed is None and not is_snapshot:
        until = "until the push that is under way has ended"
        return Garbage(state="held", reason="unfinished-build", file=name, num_bytes=size, until=until)
    reason = "superseded" if is_snapshot else "unreferenced" if name.startswith("shards/") else "left-over"
    return Garbage(state="removable", reason=reason, file=name, num_bytes=size)
