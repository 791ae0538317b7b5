"""Shards of a cache at a URL, on a local disk that the processes of a node share.

Guarantee: a shard appears whole, by a rename; its entries are proven when they are read. One process fetches a shard
and the others wait. A file that is in use has a lock, which ends with its process, so a crash leaves nothing behind
but a part that the next process fetches again. With ``max_bytes`` the newest shard that nobody uses makes room for
the next: what was fetched first is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from latentcache.errors import DiskFullError, MissingEntryError, RemoteError, UsageError
from latentcache.store.atomic_io import as_store_error, make_folder, open_file, sync_folder
from latentcache.store.gather import Ints
from latentcache.store.paths import CachePaths
from latentcache.store.reader import ShardFile
from latentcache.store.remote.bucket import Bucket
from latentcache.store.remote.transfer import pull_snapshot
from latentcache.store.snapshot import load_manifest

#: Shards that are fetched side by side.
_THREADS = 4
#: Seconds between two looks at a shard that another process fetches.
_POLL_S = 0.05


class DiskCache:
    """The shards of one cache. Picklable; a process that was forked from one that reads cannot use it."""

    def __init__(self, url: str, folder: Path, sizes: Mapping[str, int], max_bytes: int | None) -> None:
        self.url, self.max_bytes = url, max_bytes
        """None: everything that is read stays on the disk."""
        self._sizes = sizes
        self._paths = CachePaths(folder)
        self._process, self._mutex, self._first_warning = os.getpid(), threading.Lock(), threading.Lock()
        self._fetched: MutableMapping[str, Future[ShardFile]] = {}
        if max_bytes is not None:
            self._fetched = weakref.WeakValueDictionary()

    def __reduce__(self) -> Any:
        return DiskCache, (self.url, self._paths.root, self._sizes, self.max_bytes)

    def size(self, shard: str) -> int:
        """Bytes of the data of a shard."""
        return self._sizes.get(_key(shard), 0)

    def file(self, shard: str) -> ShardFile | None:
        """A shard for reading; None if it is neither on the disk nor wanted, so that ranges of it are to be read.

        Raises UsageError in a forked process, MissingEntryError, RemoteError, StoreError.
        """
        self._check_process()
        if (fetched := self._fetched.get(shard)) is not None:
            return fetched.result()
        if self.max_bytes is None:
            return self.want(shard).result()
        return self._opened(shard)

    def want(self, shard: str) -> Future[ShardFile]:
        """Fetch a shard if it is not on the disk. It stays there while the result is in use."""
        self._check_process()
        with self._mutex:
            fetched = self._fetched.get(shard)
            if fetched is None:
                if (file := self._opened(shard)) is not None:
                    fetched = Future()
                    fetched.set_result(file)
                else:
                    fetched = self._threads.submit(self._fetch, shard)
                self._fetched[shard] = fetched
                fetched.add_done_callback(partial(self._forget_failed, shard))
            return fetched

    def has(self, shard: str) -> bool:
        """True if a shard is on the disk."""
        return self._paths.data(shard).exists()

    def ranges(self, shard: str, first: Ints, length: Ints) -> ShardFile:
        """A file of ranges of a shard, one after the other. Raises RemoteError."""
        parts = self._bucket.ranges(_key(shard), first.tolist(), length.tolist())
        with tempfile.TemporaryFile() as file:
            file.writelines(parts)
            file.flush()
            return ShardFile(os.dup(file.fileno()))

    def _forget_failed(self, shard: str, fetched: Future[ShardFile]) -> None:
        """Have the next one that wants a shard try again."""
        if fetched.exception() is not None:
            self._fetched.pop(shard, None)

    @cached_property
    def _bucket(self) -> Bucket:
        return Bucket(self.url)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, "latentcache-fetch")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                f"a forked process reads {self.url}",
                why="its connections to the store are in the parent process",
                fix="DataLoader(..., multiprocessing_context='spawn'), or iterate over the loader itself",
            )

    def _opened(self, shard: str) -> ShardFile | None:
        """A shard that is on the disk, with a lock."""
        try:
            file = ShardFile(open_file(self._paths.data(shard)))
        except FileNotFoundError:
            return None
        if os.fstat(file.descriptor).st_size != self.size(shard):  # of a copy that something else made
            self._paths.data(shard).unlink(missing_ok=True)
            return None
        fcntl.flock(file.descriptor, fcntl.LOCK_SH)
        return file

    def _fetch(self, shard: str) -> ShardFile:
        path = self._paths.data(shard)
        part = path.with_name("data.mdb.part")
        try:
            while (file := self._opened(shard)) is None:
                make_folder(path.parent)
                if (file := _taken(part)) is None:
                    time.sleep(_POLL_S)
                elif path.exists():
                    part.unlink()
                else:
                    try:
                        self._download(shard, part)
                    except BaseException:  # its traceback keeps the file open
                        fcntl.flock(file.descriptor, fcntl.LOCK_UN)
                        raise
                    with self._alone():  # else a process that counts the files may see neither name
                        part.rename(path)
                    fcntl.flock(file.descriptor, fcntl.LOCK_SH)  # without a moment in which another may remove it
                    sync_folder(path.parent)
                    break
        except FileNotFoundError as error:
            why = str(error).splitlines()[0]
            raise MissingEntryError("a shard of this cache is gone", where=self.url, why=why) from None
        return file

    def _download(self, shard: str, part: Path) -> None:
        path = self._paths.data(shard)
        size = self.size(shard)
        self._make_room(part, size)
        self._bucket.fetch(f"shards/{shard}/index.safetensors", path.with_name("index.safetensors"))
        self._bucket.fetch(_key(shard), part)
        if part.stat().st_size != size:
            why = f"{part.stat().st_size} of {size} bytes"
            fix = "open the cache again"
            raise RemoteError(f"{self.url}: a shard has another size than before", why=why, fix=fix)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Names and sizes of the files do not change meanwhile."""
        descriptor = os.open(self._paths.shards, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, part: Path, size: int) -> None:
        """Reserve bytes for a part; the newest shards that nobody uses go, those of other snapshots first."""
        if self.max_bytes is None:
            return
        with self._alone():
            files = dict[Path, os.stat_result]()
            for path in self._paths.shards.glob("*/data.mdb*"):
                with contextlib.suppress(FileNotFoundError):  # a part that was not needed has just gone
                    files[path] = path.stat()
            files.pop(part)
            used = size + sum(status.st_size for status in files.values())
            newest = sorted(files, key=lambda path: files[path].st_mtime, reverse=True)
            for path in sorted(newest, key=lambda path: _key(path.parent.name) in self._sizes):
                if used > self.max_bytes and _remove_unused(path):
                    used -= files[path].st_size
            if used > self.max_bytes and self._first_warning.acquire(blocking=False):  # once
                problem = f"shards in use need {used} bytes, more than disk_cache_bytes={self.max_bytes}"
                fix = "take a smaller shuffle_block or more bytes"
                warnings.warn(f"{self._paths.root}: {problem}; {fix}", stacklevel=2)
            try:
                os.truncate(part, size)
            except OSError as error:
                raise as_store_error(error, part) from error


def open_disk_cache(url: str, folder: Path, max_bytes: int | None) -> DiskCache:
    """Copy the current snapshot at a URL to a folder, whose shards are fetched when they are wanted.

    Raises:
        RemoteError: The store cannot be used, or holds another cache than the folder.
        CacheNotFoundError: There is no cache at the URL.
        DiskFullError: The disk has no room for the shards.
    """
    sizes = pull_snapshot(url, folder)
    paths = CachePaths(folder)
    shards = load_manifest(paths.snapshot(paths.current_snapshot()))["shards"]
    total = sum(sizes.get(_key(shard), 0) for shard in shards)
    if max_bytes is not None and total > max_bytes:
        return DiskCache(url, folder, sizes, max_bytes)
    missing = sum(sizes.get(_key(shard), 0) for shard in shards if not paths.data(shard).exists())
    status = os.statvfs(folder)
    if missing > (free := status.f_bavail * status.f_frsize):
        raise DiskFullError(
            f"the disk is too small for {url}",
            where=str(folder),
            why=f"{missing} bytes to fetch, {free} bytes free",
            fix=f"a larger disk, or open_cache(..., disk_cache_bytes={free // 2}) and loader(..., shuffle_block=N)",
        )
    return DiskCache(url, folder, sizes, None)


def _key(shard: str) -> str:
    return f"shards/{shard}/data.mdb"


def _taken(part: Path) -> ShardFile | None:
    """A part with a lock; None: another process has it, or has just renamed or removed it."""
    file = ShardFile(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.descriptor), part.stat()):
            return file
    return None


def _remove_unused(path: Path) -> bool:
    """Remove a shard or a part, unless a process uses it."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass  # another process has just removed it
    return True
