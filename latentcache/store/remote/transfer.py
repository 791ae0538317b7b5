"""Caches at URLs: ``push`` and ``pull`` copy whole files.

Below a URL are ``shards/`` as in the cache's folder, a folder ``snapshots/NUMBER-CHECKSUM`` for each manifest, and
``CURRENT``, JSON that names the snapshot and the cache. Guarantee: CURRENT is written last, and only if nobody wrote
it since it was read, so a reader sees a whole snapshot or the one before. Other objects are written once, but for the
index of a shard, which gets shorter when a repair removes entries. Shards have random names, so a file of the same
name and size is the same file, and a transfer that was cut goes on.
"""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from itertools import chain
from pathlib import Path

import numpy as np

from latentcache.errors import (
    CacheLockedError,
    CacheNotFoundError,
    MissingEntryError,
    RemoteError,
    StoreError,
    UsageError,
)
from latentcache.store.atomic_io import make_folder, read_json, sync_file, write_atomically, write_json
from latentcache.store.lock import builder_lock
from latentcache.store.paths import CachePaths
from latentcache.store.remote.bucket import PART_BYTES, Bucket
from latentcache.store.snapshot import MANIFEST, Snapshot, load_manifest, open_snapshot, own_checksum
from latentcache.value import Value

_CURRENT = "CURRENT"
#: Seconds between two looks at a folder that another process fills.
_WAIT_S = 1.0
_NOTHING = {"cache": "", "seen": "", "url": "", "left_out": ""}

Progress = Callable[[int, int], None]
"""Called with bytes that are moved, and all bytes."""


class Transfer(Value):
    """What a push or a pull does, or did."""

    url: str
    cache: Path
    snapshot: int
    files: int
    """Files that are moved; those that are there already are not counted."""
    num_bytes: int
    kept: int
    """Files that are there already."""
    requests: int
    """Requests that move the files; about ten more look at the store, and at least one for each 1,000 objects."""


class Head(Value):
    """The snapshot that a URL or a folder has."""

    snapshot: int
    manifest: str
    """Checksum of its manifest."""
    cache: str
    """Random name of the cache."""
    etag: str = field(default="", compare=False)

    @property
    def folder(self) -> str:
        """Where its files are below a URL."""
        return f"snapshots/{self.snapshot:06d}-{self.manifest}"


def push(
    cache: Path,
    url: str,
    *,
    dry_run: bool = False,
    single_writer: bool = False,
    progress: Progress = lambda done, total: None,
) -> Transfer:
    """Copy the current snapshot of a cache and its shards to a URL.

    Args:
        cache: Its folder.
        url: ``s3://bucket/prefix``, or of ``gs`` and ``az``.
        dry_run: Say what would be sent, and send nothing.
        single_writer: Nobody else pushes to this URL: a store that ignores conditions is used all the same.
        progress: Called with the bytes that are sent and those that are to send.

    Raises:
        CacheNotFoundError: There is no finished cache.
        MissingEntryError: The folder lacks shards.
        RemoteError: The store cannot be used, holds another cache, or has a newer snapshot of this one.
        UsageError: The folder was pulled without some fields.
    """
    paths = CachePaths(cache)
    bucket = Bucket(url)
    new = _new_head(paths, bucket)
    head = current_head(bucket)
    if head is not None:
        _check_successor(bucket, paths, head, new)
    snapshot = paths.snapshot(new.snapshot)
    shards = [path for name in load_manifest(snapshot)["shards"] for path in sorted(paths.shard(name).iterdir())]
    keys = {path: path.relative_to(paths.root).as_posix() for path in shards}
    keys |= {path: f"{new.folder}/{path.name}" for path in sorted(snapshot.iterdir())}
    stored = bucket.sizes("shards") | bucket.sizes(new.folder)
    sizes = {path: path.stat().st_size for path, key in keys.items()}
    missing = [path for path, size in sizes.items() if stored.get(keys[path]) != size]
    total = sum(sizes[path] for path in missing)
    transfer = Transfer(
        url=bucket.url,
        cache=cache,
        snapshot=new.snapshot,
        files=len(missing),
        num_bytes=total,
        kept=len(keys) - len(missing),
        requests=sum(_requests(sizes[path]) for path in missing),
    )
    if dry_run or (head == new and not missing):
        return transfer
    if not single_writer:
        bucket.check_conditions()
    sent = 0
    for path in missing:
        bucket.send(path, keys[path])
        sent += sizes[path]
        progress(sent, total)
    stored = bucket.sizes("shards")
    if removed := [keys[path] for path in shards if keys[path] not in stored]:
        problem = f"{bucket.url}/{removed[0]} was removed meanwhile"
        fix = "run the same command again"
        raise RemoteError(problem, where=bucket.url, why="gc may have run at this URL", fix=fix)
    remember(paths, cache=new.cache)  # known if this process is killed below
    data = json.dumps({"snapshot": new.snapshot, "manifest": new.manifest, "cache": new.cache}).encode("ascii")
    is_written = head == new or bucket.write(_CURRENT, data, "" if head is None else head.etag)
    if not is_written and current_head(bucket) != new:  # it is, if only the answer was lost
        raise _somebody_else(bucket, paths)
    remember(paths, seen=new.folder)
    return transfer


def _new_head(paths: CachePaths, bucket: Bucket) -> Head:
    """The snapshot of a folder that may be pushed."""
    number = paths.current_snapshot()
    known = remembered(paths)
    cache = shlex.quote(str(paths.root))
    if not number:
        problem = f"no finished build in {paths.root}"
        fix = "build it, then push"
        raise CacheNotFoundError(problem, where=str(paths.root), fix=fix)
    if known["left_out"]:
        problem = f"{paths.root} was pulled without {known['left_out']}"
        fix = f"latentcache pull {bucket.url} {cache}"
        raise UsageError(problem, why="a push would take these fields from the URL", fix=f"{fix}, then push")
    manifest = load_manifest(paths.snapshot(number))
    if not all(paths.data(name).exists() for name in manifest["shards"]):
        fix = f"if it is the disk cache of a URL: latentcache pull URL {cache}; else build again"
        raise MissingEntryError(f"shards are missing from {paths.root}", where=str(paths.root), fix=fix)
    return Head(snapshot=number, manifest=str(manifest["checksum"]), cache=known["cache"] or secrets.token_hex(8))


def _requests(size: int) -> int:
    """Requests that send a file: one, or one for each part with one before and one behind."""
    return 1 if size < PART_BYTES else -(-size // PART_BYTES) + 2


def pull(
    url: str,
    cache: Path,
    *,
    shards: bool = True,
    fields: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> Transfer:
    """Copy the current snapshot at a URL and its shards to a cache folder, new or of the same cache.

    Args:
        url: The cache at the URL.
        cache: The folder.
        shards: Copy shards too.
        fields: Only these fields, by whole shards: the snapshot in the folder names the others as left out, and the
            folder cannot be pushed. Empty: all.
        progress: Called with the bytes that are fetched and those that are to fetch.

    Raises:
        RemoteError: The store cannot be used, or holds another cache than the folder.
        UsageError: The cache does not have one of the fields.
        CacheNotFoundError: There is no cache at the URL.
        StoreError: The disk is full.
    """
    paths = CachePaths(cache)
    bucket = Bucket(url)
    if (head := current_head(bucket)) is None:
        raise no_cache(bucket)
    make_folder(cache)
    with builder_lock(paths.lock):
        snapshot, staged = _pulled_snapshot(bucket, paths, head, fields)
        names = _shards_in_use(snapshot) if shards else set()
        sizes = {key: size for key, size in bucket.sizes("shards").items() if key.split("/")[1] in names}
        copied = {path.relative_to(paths.root).as_posix(): path.stat().st_size for path in paths.shards.glob("*/*")}
        missing = {key: size for key, size in sizes.items() if copied.get(key) != size}
        _fetch_shards(bucket, paths, missing, progress)
        if staged is not None:
            make_folder(paths.snapshots_folder)
            shutil.rmtree(paths.snapshot(head.snapshot), ignore_errors=True)  # of a pull that was cut before CURRENT
            staged.replace(paths.snapshot(head.snapshot))
            sync_file(paths.snapshots_folder)
            write_atomically(paths.current, f"{head.snapshot:06d}\n".encode("ascii"))
        left_out = ", ".join(snapshot.manifest.get("left_out", ()))
        remember(paths, cache=head.cache, seen=head.folder, left_out=left_out)
        shutil.rmtree(paths.scratch, ignore_errors=True)
    return Transfer(
        url=bucket.url,
        cache=paths.root,
        snapshot=head.snapshot,
        files=len(missing),
        num_bytes=sum(missing.values()),
        kept=len(sizes) - len(missing),
        requests=len(missing),
    )


def pull_snapshot(url: str, cache: Path) -> dict[str, int]:
    """Copy the current snapshot at a URL without its shards; gives the bytes of the files of shards at the URL.

    Processes of a node share the folder: one of them copies, the others wait. Raises as :func:`pull`.
    """
    while True:
        try:
            pull(url, cache, shards=False)
        except CacheLockedError:
            time.sleep(_WAIT_S)
            continue
        return Bucket(url).sizes("shards")


def _pulled_snapshot(
    bucket: Bucket, paths: CachePaths, head: Head, fields: Sequence[str]
) -> tuple[Snapshot, Path | None]:
    """The snapshot at a URL, and the folder in scratch that it was fetched to; None: it is in place already."""
    number = paths.current_snapshot() if paths.current.exists() else 0
    known = remembered(paths)
    if number:
        is_partial = known["left_out"] and known["seen"].startswith(f"snapshots/{number:06d}-")
        manifest = str(load_manifest(paths.snapshot(number))["checksum"])
        manifest = known["seen"].rpartition("-")[2] if is_partial else manifest
        _check_predecessor(bucket, paths, Head(snapshot=number, manifest=manifest, cache=known["cache"]), head)
    if number == head.snapshot and not known["left_out"] and not fields:
        return open_snapshot(paths.root, number), None
    copy = CachePaths(paths.scratch / head.manifest)
    staged = copy.snapshot(head.snapshot)
    make_folder(staged)
    fetch_snapshot(bucket, head, staged)
    _leave_out(staged, fields)
    return open_snapshot(copy.root, head.snapshot), staged


def _fetch_shards(bucket: Bucket, paths: CachePaths, missing: Mapping[str, int], progress: Progress) -> None:
    """Fetch files of shards; each appears by a rename."""
    total = sum(missing.values())
    done = 0
    if total > (free := shutil.disk_usage(paths.root).free):
        raise StoreError(
            f"the disk is too small for {bucket.url}",
            where=str(paths.root),
            why=f"{total} bytes to write, {free} bytes free",
            fix="free some space, or pull to a larger disk",
        )
    make_folder(paths.scratch)
    for key, size in missing.items():
        bucket.fetch(key, paths.scratch / "part")
        make_folder((paths.root / key).parent)
        (paths.scratch / "part").replace(paths.root / key)
        sync_file((paths.root / key).parent)
        done += size
        progress(done, total)


def fetch_snapshot(bucket: Bucket, head: Head, folder: Path) -> None:
    """Write the files of a snapshot to a folder."""
    bucket.fetch_all({key: folder / Path(key).name for key in bucket.sizes(head.folder)})


def _leave_out(folder: Path, fields: Sequence[str]) -> None:
    """Take all but some fields out of the manifest of a snapshot."""
    manifest = load_manifest(folder)
    known = manifest["fields"]
    others = [name for name in manifest["fields"] if name not in fields]
    for name in fields:
        if name not in known:
            fix = f"--fields {','.join(known)}"
            raise UsageError("no such field in this cache", argument="fields", value=name, fix=fix)
    if fields and others:
        manifest |= {"fields": {name: known[name] for name in fields}, "left_out": others}
        write_json(folder / MANIFEST, manifest | {"checksum": own_checksum(manifest)})


def _shards_in_use(snapshot: Snapshot) -> set[str]:
    """The shards that its fields have entries in; all of them if no field is left out."""
    if "left_out" not in snapshot.manifest:
        return set(snapshot.shards)
    numbers = [np.unique(np.asarray(rows.shard)).tolist() for rows in snapshot.fields.values()]
    return {snapshot.shards[number] for number in chain.from_iterable(numbers)}


def current_head(bucket: Bucket) -> Head | None:
    """What CURRENT at a URL says; None: there is no cache."""
    try:
        data, etag = bucket.read(_CURRENT)
    except FileNotFoundError:
        return None
    try:
        return Head(**json.loads(data), etag=etag)
    except (ValueError, TypeError) as error:
        problem = f"{bucket.url}/CURRENT is not of a cache"
        fix = "use another URL"
        raise RemoteError(problem, where=bucket.url, why=str(error), fix=fix) from error


def no_cache(bucket: Bucket) -> CacheNotFoundError:
    """The error for a URL without a cache."""
    return CacheNotFoundError(
        f"no cache at {bucket.url}",
        where=bucket.url,
        why="there is no CURRENT below this URL",
        fix=f"latentcache push CACHE {bucket.url}, or check the URL",
    )


def remembered(paths: CachePaths) -> dict[str, str]:
    """``cache``: the random name of a cache; ``seen``: the snapshot that was pushed or pulled last.

    ``url``: where it belongs, if the folder is a view of a cache at a URL; empty if it is a cache of its own.
    ``left_out``: the fields that were not pulled.
    """
    return _NOTHING | (read_json(paths.remote) if paths.remote.exists() else {})


def remember(paths: CachePaths, **values: str) -> None:
    """Change some of the values of :func:`remembered`."""
    known = remembered(paths) | values
    write_json(paths.remote, {name: value for name, value in known.items() if value})


def _check_successor(bucket: Bucket, paths: CachePaths, head: Head, new: Head) -> None:
    """Raise RemoteError if a push would take the place of work that the folder does not have."""
    if head.cache != new.cache:
        raise _other(bucket, paths)
    known = paths.snapshot(head.snapshot)
    is_known = (known / MANIFEST).exists() and load_manifest(known)["checksum"] == head.manifest
    if head.snapshot > new.snapshot or not (is_known or head.folder == remembered(paths)["seen"]):
        raise _somebody_else(bucket, paths)


def _check_predecessor(bucket: Bucket, paths: CachePaths, local: Head, head: Head) -> None:
    """Raise RemoteError if a pull would take the place of work that the URL does not have."""
    if head.cache != local.cache:
        raise _other(bucket, paths)
    if local.snapshot > head.snapshot or (local.snapshot == head.snapshot and local.manifest != head.manifest):
        raise RemoteError(
            f"{paths.root} has a snapshot that {bucket.url} does not have",
            where=str(paths.root),
            fix=f"latentcache push {shlex.quote(str(paths.root))} {bucket.url}, or pull into another folder",
        )


def _other(bucket: Bucket, paths: CachePaths) -> RemoteError:
    problem = f"{bucket.url} holds another cache than {paths.root}"
    return RemoteError(problem, where=bucket.url, fix="use another URL, or another folder")


def _somebody_else(bucket: Bucket, paths: CachePaths) -> RemoteError:
    why = "this folder lacks it; nothing was changed"
    fix = f"latentcache pull {bucket.url} NEW, build there, then push NEW"
    if remembered(paths)["url"]:  # a build at this URL
        why = "meanwhile, and its CURRENT was not changed"
        fix = "run the same command again: it goes on from that snapshot, and no entry is encoded again"
    return RemoteError(f"{bucket.url} got a snapshot from somebody else", where=bucket.url, why=why, fix=fix)
