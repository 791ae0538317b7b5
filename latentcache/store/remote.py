"""Caches in object storage (S3, Google Cloud Storage, Azure): ``push`` and ``pull`` move whole files.

Below a URL are ``shards/`` as in the cache's folder, a folder ``snapshots/NUMBER-CHECKSUM`` for each manifest, and
``CURRENT``, JSON that names the snapshot and the cache. Guarantee: CURRENT is written last, and only if nobody wrote
it since it was read, so a reader sees a whole snapshot or the one before. Other objects are written once, but for the
index of a shard, which gets shorter when a repair removes entries. Shards have random names, so a file of the same
name and size is the same file, and a transfer that was cut goes on.
obstore moves the bytes. A store that does not answer is asked again for five minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as pool_threads
from dataclasses import field
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from latentcache.errors import (
    CacheLockedError,
    CacheNotFoundError,
    MissingEntryError,
    RemoteError,
    StoreError,
    UsageError,
)
from latentcache.store.atomic_io import (
    as_store_error,
    make_folder,
    read_json,
    sync_file,
    write_atomically,
    write_json,
)
from latentcache.store.lock import builder_lock
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import MANIFEST, Snapshot, load_manifest, open_snapshot, own_checksum
from latentcache.value import Value

_SCHEMES = ("s3", "gs", "az")
_CURRENT = "CURRENT"
#: Bytes of a part of a file that goes up or comes down.
_PART = 8 << 20
#: Objects that are fetched at a time.
_TOGETHER = 8
#: Seconds for which a store that does not answer is asked again, of a try of the client, and of the longest pause.
_RETRY_S, _TRY_S, _PAUSE_S = 300.0, 5.0, 8.0
#: Seconds between two looks at a folder that another process fills.
_WAIT_S = 1.0
_DENIED = "access is denied", "give credentials that may list, read and write below this URL"
#: Words in an error of obstore -> what it means, and the fix.
_CAUSES = (
    ("NoSuchBucket", "the bucket does not exist", "make the bucket, or check the URL"),
    ("169.254.169.254", "no credentials", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ("metadata.google", "no credentials", "set GOOGLE_APPLICATION_CREDENTIALS"),
    ("RequestTimeTooSkewed", "the clock of this machine is wrong", "set the clock, then run the same command again"),
    ("ExpiredToken", "the credentials have expired", "renew the credentials, then run the same command again"),
    ("QuotaExceeded", "the bucket is full", "make room or raise the quota, then run the same command again"),
    ("StorageFull", "the bucket is full", "make room in the store, then run the same command again"),
    ("error sending request", "the store does not answer", "check the network and AWS_ENDPOINT_URL"),
    ("403 Forbidden", *_DENIED),
)
_REPORTED = "the store reports an error", "run the same command again"
#: Problems that another try may solve.
_TRANSIENT = ("the store does not answer", _REPORTED[0])

Result = TypeVar("Result")
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


class Bucket:
    """The objects below one URL. Every error of the store is a RemoteError."""

    def __init__(self, url: str, *, retry_s: float = _RETRY_S) -> None:
        self.url = _checked(url)
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            what = "object storage needs obstore"
            raise UsageError(what, why=str(error), fix="pip install 'latentcache[s3]'") from error
        self._obstore: Any = obstore
        self._from_url: Any = from_url
        self._retry_s, self._first_warning = retry_s, threading.Lock()
        self._store = self._open(self.url)

    def _open(self, url: str) -> Any:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        options: dict[str, Any] = {
            "client_options": {"allow_http": endpoint.startswith("http://")},
            "retry_config": {"max_retries": 100, "retry_timeout": timedelta(seconds=min(self._retry_s, _TRY_S))},
        }
        if url.startswith("s3:") and "AWS_PROFILE" in os.environ and "AWS_ACCESS_KEY_ID" not in os.environ:
            options["credential_provider"] = _of_profile()
        with self._named():
            return self._from_url(url, **options)

    def read(self, key: str) -> tuple[bytes, str]:
        """An object and its etag; FileNotFoundError if there is none."""

        def read() -> tuple[bytes, str]:
            result = self._obstore.get(self._store, key)
            return bytes(result.bytes()), str(result.meta["e_tag"])

        return self._patiently(read)

    def read_range(self, key: str, first: int, size: int) -> bytes:
        """Bytes of an object; fewer than ``size`` only at its end."""
        return self._patiently(lambda: bytes(self._obstore.get_range(self._store, key, start=first, length=size)))

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each object in a folder."""
        return {key: size for key, (size, _) in self.objects(folder).items()}

    def objects(self, folder: str = "") -> dict[str, tuple[int, datetime]]:
        """Bytes of each object in a folder, and when it was written by the store's clock."""

        def listed() -> list[Any]:
            return [item for page in self._obstore.list(self._store, folder or None) for item in page]

        items = self._patiently(listed)
        return {str(item["path"]): (int(item["size"]), item["last_modified"]) for item in items}

    def now(self) -> datetime:
        """The time by the store's clock, by an object that is written for it."""
        key = f"probe-{secrets.token_hex(8)}"
        self.create(key, b"1")
        written: datetime = self._patiently(lambda: self._obstore.head(self._store, key)["last_modified"])
        self.remove(key)
        return written

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that must not be there yet; False: it is."""
        return self._put_if(key, data, "create")

    def replace(self, key: str, data: bytes, etag: str) -> bool:
        """Write an object in the place of the one with this etag; False: somebody wrote another."""
        return self._put_if(key, data, {"e_tag": etag})

    def send(self, path: Path, key: str) -> None:
        """Write a file, in parts; the object appears whole."""
        if is_stand_in(path):
            fix = f"run the same command again; `latentcache verify {self.url}` names what is missing"
            raise RemoteError(f"{self.url}/{key} was removed while it was in use", where=self.url, fix=fix)
        self._patiently(lambda: self._obstore.put(self._store, key, path, chunk_size=_PART))

    def fetch(self, key: str, path: Path) -> None:
        """Write an object to a file, durably; one that is there may have another size."""

        def fetch() -> None:
            try:
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), "wb") as file:
                    for part in self._obstore.get(self._store, key).stream(min_chunk_size=_PART):
                        file.write(part)
                        self._check_process_goes_on()
                    file.truncate()
                sync_file(path)
            except (FileNotFoundError, RemoteError):
                raise
            except OSError as error:
                raise as_store_error(error, path) from error

        self._patiently(fetch)

    def fetch_all(self, paths: Mapping[str, Path]) -> None:
        """Write each object to its file, several at a time."""
        for folder in {path.parent for path in paths.values()}:
            make_folder(folder)
        with ThreadPoolExecutor(_TOGETHER) as pool:
            list(pool.map(self.fetch, paths.keys(), paths.values()))

    def ranges(self, key: str, first: Sequence[int], length: Sequence[int]) -> list[bytes]:
        """Ranges of an object; those that are near each other are one request."""

        def ranges() -> list[bytes]:
            return list(map(bytes, self._obstore.get_ranges(self._store, key, starts=first, lengths=length)))

        return self._patiently(ranges)

    def copy(self, source: str, key: str) -> None:
        """Write an object that is below another URL here too, inside the store if the bucket is the same."""
        theirs, ours = urlsplit(f"{source}/{key}"), urlsplit(f"{self.url}/{key}")
        if theirs[:2] == ours[:2]:
            bucket = self._open(f"{ours.scheme}://{ours.netloc}")
            self._patiently(lambda: self._obstore.copy(bucket, theirs.path.lstrip("/"), ours.path.lstrip("/")))
            return
        with tempfile.TemporaryDirectory(prefix="latentcache-") as folder:
            path = Path(folder, Path(key).name)
            Bucket(source, retry_s=self._retry_s).fetch(key, path)
            self.send(path, key)

    def remove(self, key: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._patiently(lambda: self._obstore.delete(self._store, key))

    def _put_if(self, key: str, data: bytes, mode: Any) -> bool:
        exceptions = self._obstore.exceptions

        def put() -> bool:
            try:
                self._obstore.put(self._store, key, data, mode=mode, use_multipart=False)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return False
            return True

        return self._patiently(put)

    def _patiently(self, action: Callable[[], Result]) -> Result:
        """What an action gives, which is tried again if the store does not answer. That is said once."""
        end, pause = time.monotonic() + self._retry_s, 0.5
        while True:
            try:
                with self._named():
                    return action()
            except RemoteError as error:
                left = end - time.monotonic()
                self._check_process_goes_on()
                if not error.is_transient or left <= 0:
                    raise
                if self._first_warning.acquire(blocking=False):  # of all threads, and never again
                    warnings.warn(f"{error.what}: trying again for {self._retry_s:.0f} s", stacklevel=2)
            time.sleep(min(pause, left))
            pause = min(2 * pause, _PAUSE_S)

    def _check_process_goes_on(self) -> None:
        if pool_threads._shutdown:  # the interpreter waits for the threads that fetch
            raise RemoteError("the process ends", where=self.url)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the store with their cause and fix; what a store says never holds credentials."""
        exceptions = self._obstore.exceptions
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" not in str(error):
                raise
            raise self._error("the bucket does not exist", error, "make the bucket, or check the URL") from None
        except exceptions.BaseError as error:
            causes = (cause[1:] for cause in _CAUSES if cause[0] in str(error))
            is_denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
            what, fix = next(causes, _DENIED if is_denied else _REPORTED)
            raise self._error(what, error, fix, is_transient=what in _TRANSIENT) from None

    def _error(self, what: str, error: Exception, fix: str, *, is_transient: bool = False) -> RemoteError:
        why = str(error).splitlines()[0].partition(": <?xml")[0]
        return RemoteError(f"{self.url}: {what}", where=self.url, why=why, fix=fix, is_transient=is_transient)


def is_stand_in(path: Path) -> bool:
    """True if a file has no bytes of its own and stands in for an object: its time is 0, and it takes no space."""
    return path.exists() and path.stat().st_mtime_ns == 0 == path.stat().st_blocks


def is_url(path: str) -> bool:
    """True for the URL of a store."""
    return "://" in path


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
        cache: The cache folder.
        url: ``s3://bucket/prefix``, or of ``gs`` and ``az``.
        dry_run: Say what would be sent, and send nothing.
        single_writer: Nobody else pushes to this URL: a store that ignores conditions is used all the same.
        progress: Called with the bytes that are sent and those that are to send.

    Raises:
        CacheNotFoundError: There is no finished cache.
        RemoteError: The store cannot be used, holds another cache, or has a newer snapshot of this one.
    """
    paths, bucket = CachePaths(cache), Bucket(url)
    number = paths.current_snapshot()
    if not number:
        raise CacheNotFoundError(f"no finished build in {cache}", where=str(cache), fix="build it, then push")
    if left_out := remembered(paths)["left_out"]:
        what, fix = (
            f"{cache} was pulled without {left_out}",
            f"latentcache pull {bucket.url} {shlex.quote(str(cache))}",
        )
        raise UsageError(what, why="a push would take these fields from the URL", fix=f"{fix}, then push")
    manifest, head = load_manifest(paths.snapshot(number)), current_head(bucket)
    if not all(paths.data(name).exists() for name in manifest["shards"]):
        fix = f"if it is the disk cache of a URL: latentcache pull URL {shlex.quote(str(cache))}; else build again"
        raise MissingEntryError(f"shards are missing from {cache}", where=str(cache), fix=fix)
    name = remembered(paths)["cache"] or secrets.token_hex(8)
    new = Head(snapshot=number, manifest=str(manifest["checksum"]), cache=name)
    if head is not None:
        _check_successor(bucket, paths, head, new)
    shards = [path for name in manifest["shards"] for path in sorted(paths.shard(name).iterdir())]
    keys = {path: path.relative_to(paths.root).as_posix() for path in shards}
    keys |= {path: f"{new.folder}/{path.name}" for path in sorted(paths.snapshot(number).iterdir())}
    there = bucket.sizes("shards") | bucket.sizes(new.folder)
    missing = [path for path, key in keys.items() if there.get(key) != path.stat().st_size]
    total = sum(path.stat().st_size for path in missing)
    transfer = Transfer(
        url=bucket.url,
        cache=cache,
        snapshot=number,
        files=len(missing),
        num_bytes=total,
        kept=len(keys) - len(missing),
        requests=sum(_requests(path.stat().st_size) for path in missing),
    )
    if dry_run or (head == new and not missing):
        return transfer
    if not single_writer:
        check_conditions(bucket)
    sent = 0
    for path in missing:
        bucket.send(path, keys[path])
        sent += path.stat().st_size
        progress(sent, total)
    there = bucket.sizes("shards")
    if gone := [path for path in shards if keys[path] not in there]:
        what, fix = f"{bucket.url}/{keys[gone[0]]} was removed meanwhile", "run the same command again"
        raise RemoteError(what, where=bucket.url, why="gc may have run at this URL", fix=fix)
    _note(paths, cache=new.cache)  # known if this process is killed below
    etag = "" if head is None else head.etag
    data = json.dumps({"snapshot": new.snapshot, "manifest": new.manifest, "cache": new.cache}).encode("ascii")
    is_ours = head == new or (bucket.replace(_CURRENT, data, etag) if etag else bucket.create(_CURRENT, data))
    if not is_ours and current_head(bucket) != new:  # it is, if only the answer was lost
        raise _somebody_else(bucket, paths)
    remember(paths, new)
    return transfer


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
    paths, bucket = CachePaths(cache), Bucket(url)
    head = current_head(bucket)
    if head is None:
        raise no_cache(bucket)
    make_folder(cache)
    with builder_lock(paths.lock):
        return _pulled(bucket, paths, head, progress, shards, fields)


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


def _pulled(
    bucket: Bucket, paths: CachePaths, head: Head, progress: Progress, with_shards: bool, fields: Sequence[str]
) -> Transfer:
    """Copy what is missing; the snapshot appears by a rename, then CURRENT names it."""
    have = paths.current_snapshot() if paths.current.exists() else 0
    if have:
        known = remembered(paths)
        is_partial = known["left_out"] and known["seen"].startswith(f"snapshots/{have:06d}-")
        manifest = str(load_manifest(paths.snapshot(have))["checksum"])
        mine = Head(
            snapshot=have,
            manifest=known["seen"].rpartition("-")[2] if is_partial else manifest,
            cache=known["cache"],
        )
        _check_predecessor(bucket, paths, mine, head)
    copy = CachePaths(paths.scratch / head.manifest)
    staged, left_out = copy.snapshot(head.snapshot), remembered(paths)["left_out"]
    make_folder(staged)
    is_new = have != head.snapshot or bool(left_out or fields)
    if is_new:
        fetch_snapshot(bucket, head, staged)
        left_out = _leave_out(staged, fields)
    snapshot = open_snapshot(copy.root if is_new else paths.root, head.snapshot)
    names = _shards_in_use(snapshot) if with_shards else set()
    sizes = {key: size for key, size in bucket.sizes("shards").items() if key.split("/")[1] in names}
    missing = {key: size for key, size in sizes.items() if not _is_there(paths.root / key, size)}
    total = sum(missing.values())
    if total > (free := shutil.disk_usage(paths.root).free):
        raise StoreError(
            f"the disk is too small for {bucket.url}",
            where=str(paths.root),
            why=f"{total} bytes to write, {free} bytes free",
            fix="free some space, or pull to a larger disk",
        )
    done = 0
    for key, size in missing.items():
        bucket.fetch(key, staged.with_name("part"))
        make_folder((paths.root / key).parent)
        staged.with_name("part").replace(paths.root / key)
        sync_file((paths.root / key).parent)
        done += size
        progress(done, total)
    if is_new:
        make_folder(paths.snapshots_folder)
        shutil.rmtree(paths.snapshot(head.snapshot), ignore_errors=True)  # of a pull that was cut before CURRENT
        staged.replace(paths.snapshot(head.snapshot))
        sync_file(paths.snapshots_folder)
        write_atomically(paths.current, f"{head.snapshot:06d}\n".encode("ascii"))
    write_json(
        paths.remote, {"cache": head.cache, "seen": head.folder} | ({"left_out": left_out} if left_out else {})
    )
    shutil.rmtree(paths.scratch, ignore_errors=True)
    return Transfer(
        url=bucket.url,
        cache=paths.root,
        snapshot=head.snapshot,
        files=len(missing),
        num_bytes=total,
        kept=len(sizes) - len(missing),
        requests=len(missing),
    )


def _requests(size: int) -> int:
    """Requests that send a file: one, or one for each part with one before and one behind."""
    return 1 if size < _PART else -(-size // _PART) + 2


def fetch_snapshot(bucket: Bucket, head: Head, folder: Path) -> None:
    """Write the files of a snapshot to a folder."""
    bucket.fetch_all({key: folder / Path(key).name for key in bucket.sizes(head.folder)})


def _leave_out(folder: Path, fields: Sequence[str]) -> str:
    """Take all but some fields out of the manifest of a snapshot; gives the names of the others."""
    manifest = load_manifest(folder)
    known, others = manifest["fields"], ", ".join(name for name in manifest["fields"] if name not in fields)
    for name in fields:
        if name not in known:
            names = ",".join(known)
            raise UsageError("no such field in this cache", argument="fields", value=name, fix=f"--fields {names}")
    if not fields or not others:
        return ""
    manifest |= {"fields": {name: known[name] for name in fields}, "left_out": others.split(", ")}
    write_json(folder / MANIFEST, manifest | {"checksum": own_checksum(manifest)})
    return others


def _shards_in_use(snapshot: Snapshot) -> set[str]:
    """The shards that its fields have entries in; all of them if no field is left out."""
    if "left_out" not in snapshot.manifest:
        return set(snapshot.shards)
    numbers = [np.unique(np.asarray(rows.shard)).tolist() for rows in snapshot.fields.values()]
    return {snapshot.shards[number] for number in chain.from_iterable(numbers)}


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def current_head(bucket: Bucket) -> Head | None:
    """What CURRENT at a URL says; None: there is no cache."""
    try:
        data, etag = bucket.read(_CURRENT)
    except FileNotFoundError:
        return None
    try:
        return Head(**json.loads(data), etag=etag)
    except (ValueError, TypeError) as error:
        fix = "use another URL"
        raise RemoteError(
            f"{bucket.url}/CURRENT is not of a cache", where=bucket.url, why=str(error), fix=fix
        ) from error


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
    return {
        "cache": "",
        "seen": "",
        "url": "",
        "left_out": "",
        **(read_json(paths.remote) if paths.remote.exists() else {}),
    }


def remember(paths: CachePaths, head: Head | None, *, url: str = "") -> None:
    """Note that a folder has the snapshot of a URL, and the URL if the folder is a view of it."""
    _note(paths, url=url, **({} if head is None else {"cache": head.cache, "seen": head.folder}))


def _note(paths: CachePaths, **values: str) -> None:
    known = remembered(paths) | {name: value for name, value in values.items() if value}
    write_json(paths.remote, {name: value for name, value in known.items() if value})


def _check_successor(bucket: Bucket, paths: CachePaths, head: Head, new: Head) -> None:
    """Raise RemoteError if a push would take the place of work that the folder does not have."""
    if head.cache != new.cache:
        raise _other(bucket, paths)
    known = paths.snapshot(head.snapshot)
    is_known = (known / MANIFEST).exists() and load_manifest(known)["checksum"] == head.manifest
    if head.snapshot > new.snapshot or not (is_known or head.folder == remembered(paths)["seen"]):
        raise _somebody_else(bucket, paths)


def _check_predecessor(bucket: Bucket, paths: CachePaths, mine: Head, head: Head) -> None:
    """Raise RemoteError if a pull would take the place of work that the URL does not have."""
    if head.cache != mine.cache:
        raise _other(bucket, paths)
    if mine.snapshot > head.snapshot or (mine.snapshot == head.snapshot and mine.manifest != head.manifest):
        raise RemoteError(
            f"{paths.root} has a snapshot that {bucket.url} does not have",
            where=str(paths.root),
            fix=f"latentcache push {shlex.quote(str(paths.root))} {bucket.url}, or pull into another folder",
        )


def _other(bucket: Bucket, paths: CachePaths) -> RemoteError:
    what = f"{bucket.url} holds another cache than {paths.root}"
    return RemoteError(what, where=bucket.url, fix="use another URL, or another folder")


def _somebody_else(bucket: Bucket, paths: CachePaths) -> RemoteError:
    is_view = bool(remembered(paths)["url"])
    return RemoteError(
        f"{bucket.url} got a snapshot from somebody else",
        where=bucket.url,
        why="meanwhile, and its CURRENT was not changed" if is_view else "this folder lacks it; nothing was changed",
        fix="run the same command again: it goes on from that snapshot, and no entry is encoded again"
        if is_view
        else f"latentcache pull {bucket.url} NEW, build there, then push NEW",
    )


def check_conditions(bucket: Bucket) -> None:
    """Raise RemoteError if nobody may write there, or the store writes objects although conditions do not hold."""
    key = f"probe-{secrets.token_hex(8)}"
    bucket.create(key, b"1")
    try:
        is_kept = not bucket.create(key, b"2") and not bucket.replace(key, b"3", '"0"')
    finally:
        bucket.remove(key)
    if not is_kept:
        raise RemoteError(
            f"{bucket.url}: this store ignores conditions, so two that push would lose a snapshot in silence",
            where=bucket.url,
            fix="use a store with conditional writes; or build into a folder, and push it with --single-writer if you"
            " alone push to this URL",
        )


def _checked(url: str) -> str:
    """A URL without a slash at its end; raises UsageError, and never shows a password."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or not parts.hostname or not re.fullmatch(r"[\w.~/+=:@%?&,-]+", url):
        shown = f"{parts.scheme}://..." if parts.password else url
        fix = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, without spaces and quotes"
        raise UsageError(f"{shown}: not the URL of a bucket", fix=fix)
    if parts.username or parts.password or parts.query:
        fix = "put credentials into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and the URL without them"
        raise UsageError(f"{parts.scheme}://...: a URL with credentials or a query", fix=fix)
    return url.rstrip("/")


def _of_profile() -> Any:
    """The credentials of AWS_PROFILE, which obstore does not read."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        fix = "pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise UsageError("AWS_PROFILE needs boto3", why=str(error), fix=fix) from error
    return Boto3CredentialProvider()
