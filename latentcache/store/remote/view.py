"""A cache at a URL as a local folder that every command reads, and in which a build makes the next snapshot.

Snapshot and indexes are fetched. Of each shard's data the folder has an empty file of its size, which stands in for
the object: whoever reads it in this process gets ranges of the object. Thus a check needs no space for the data.

A sealed shard that is sent becomes such a stand-in. Its index is sent last, so a shard with an index is whole. If a
build is cut, shards stay at the URL that no snapshot names. The next build uses them, from any machine.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from latentcache.errors import CacheLockedError
from latentcache.store.atomic_io import make_folder, write_atomically, writing
from latentcache.store.gather import STAND_INS, identity
from latentcache.store.lock import builder_lock
from latentcache.store.paths import CachePaths
from latentcache.store.remote.bucket import Bucket, is_stand_in
from latentcache.store.remote.transfer import (
    current_head,
    fetch_snapshot,
    no_cache,
    push,
    remember,
    remembered,
)
from latentcache.store.shard import INDEX
from latentcache.store.snapshot import load_manifest

#: Bytes that a thread gets at once when it reads on, and how far it may skip for that.
_AHEAD, _SKIPPED = 8 << 20, 1 << 16
#: Held while stand-ins are made: several threads of a build may do so.
_filling = threading.Lock()


class _Ranges(threading.local):
    """The bytes of objects. Each thread keeps the last range it got, and gets a longer one if it reads on."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._key = ""
        self._first = 0
        self._data = b""

    def read(self, key: str, size: int, first: int, memory: memoryview) -> int:
        """Read an object of this size from a byte on; gives the bytes that there are."""
        length = max(min(len(memory), size - first), 0)
        at = first - self._first
        is_near = key == self._key and 0 <= at <= len(self._data) + _SKIPPED
        if not is_near or at + length > len(self._data):
            ahead = min(_AHEAD, size - first) if is_near else 0
            (self._data,) = self._bucket.ranges(key, [first], [max(length, ahead)]) if length else [b""]
            self._key, self._first, at = key, first, 0
        part = self._data[at : at + length]
        memory[: len(part)] = part
        return len(part)


class StoredShards:
    """The shards at a URL, as stand-ins in a local folder."""

    def __init__(self, url: str) -> None:
        self.bucket = Bucket(url)
        self._ranges = _Ranges(self.bucket)

    def fill(self, paths: CachePaths, names: set[str] | None = None) -> int:
        """Show these shards in the folder, by default those that are there whole; gives the number of objects."""
        sizes = self.bucket.sizes("shards")
        names = {key.split("/")[1] for key in sizes if key.endswith(f"/{INDEX}")} if names is None else names
        files = {key: paths.root / key for key in sizes if key.split("/")[1] in names}
        with _filling, writing(paths.root):
            lacking = {
                key: path
                for key, path in files.items()
                if path.name == INDEX and not (path.is_file() and path.stat().st_size == sizes[key])
            }
            self.bucket.fetch_all(lacking)
            for key, path in files.items():
                if path.name != INDEX and not (path.exists() and identity(path.stat()) in STAND_INS):
                    self._stand_in(key, path, sizes[key])
        return len(sizes)

    def send(self, folder: Path) -> None:
        """Send a sealed shard, unless it is a stand-in, and give its space back."""
        data = folder / "data.mdb"
        key = f"shards/{folder.name}"
        if folder.exists() and not is_stand_in(data):
            self.bucket.send(data, f"{key}/{data.name}")
            self.bucket.send(folder / INDEX, f"{key}/{INDEX}")
            with _filling, writing(folder):
                self._stand_in(f"{key}/{data.name}", data, data.stat().st_size)

    def take(self, part: CachePaths, name: str) -> None:
        """Copy a shard of another cache whole, inside the store if it is there too."""
        url = remembered(part)["url"]
        for file in ("data.mdb", INDEX):
            key = f"shards/{name}/{file}"
            if url:
                self.bucket.copy(url, key)
            else:
                self.bucket.send(part.shard(name) / file, key)

    def _stand_in(self, key: str, path: Path, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        empty = path.with_suffix(".empty")
        with empty.open("wb") as file:
            file.truncate(size)
        os.utime(empty, (0, 0))  # the mark that Bucket.send knows, in any process
        STAND_INS[identity(empty.stat())] = partial(self._ranges.read, key, size)
        empty.replace(path)


class Uploads:
    """Sends sealed shards, one behind the work of who seals them."""

    def __init__(self, url: str) -> None:
        self._shards = StoredShards(url)
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def put(self, folder: Path | None, report: Callable[[], object]) -> None:
        """Send a shard, if there is one, once the one before is sent; then report. Raises what that one raised."""
        self.wait()
        self._last = self._pool.submit(self._send, folder, report)

    def check(self) -> None:
        """Raise the error of a transfer that failed."""
        if self._last is not None and self._last.done():
            self._last.result()

    def wait(self) -> None:
        """Wait until all is sent. Raises RemoteError."""
        if self._last is not None:
            self._last.result()

    def _send(self, folder: Path | None, report: Callable[[], object]) -> None:
        if folder is not None:
            self._shards.send(folder)
        report()


def scratch_folder(scratch: Path | str | None) -> Path:
    """The folder for work on caches at URLs: as given, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(scratch or Path(base, "latentcache").expanduser()).absolute()


@contextmanager
def worker_folder(scratch: Path) -> Iterator[Path]:
    """A folder for the shards of one process; what processes that are gone left behind goes."""
    make_folder(scratch)
    folder = scratch / f"worker-{os.urandom(8).hex()}"
    for other in scratch.glob("worker-*"):
        with suppress(CacheLockedError), builder_lock(CachePaths(other).lock):
            shutil.rmtree(other)
    make_folder(folder)
    with builder_lock(CachePaths(folder).lock):
        yield folder
        shutil.rmtree(folder)


@contextmanager
def local_view(url: str, *, scratch: Path | None = None) -> Iterator[Path]:
    """A folder with the cache of a URL; a snapshot that is published there is pushed at the end.

    Args:
        url: The cache.
        scratch: Where the folder is made, for a command that writes a cache, which need not be there yet. If the
            command fails, the folder stays, and the next one with this URL goes on with it. None: a temporary folder.

    Raises:
        RemoteError: The store cannot be used, or another snapshot was pushed meanwhile.
        CacheNotFoundError: There is no cache at the URL.
        CacheLockedError: Another command writes in the folder.
    """
    shards = StoredShards(url)
    folder = None
    address = shards.bucket.url
    if scratch is not None:
        shards.bucket.check_conditions()
        folder = scratch / sha256(address.encode("ascii")).hexdigest()[:16]
    with TemporaryDirectory(prefix="latentcache-", ignore_cleanup_errors=True) as temporary:
        paths = CachePaths((folder or Path(temporary).resolve()) / address.rpartition("/")[2])
        make_folder(paths.root)
        try:
            with builder_lock(paths.lock):
                _fill(shards, paths, is_new=scratch is not None)
            yield paths.root
            published = f"snapshots/{paths.current_snapshot():06d}-" if paths.snapshots() else ""
            if not remembered(paths)["seen"].startswith(published):
                push(paths.root, address)
        finally:
            for path in paths.root.glob("shards/*/data.mdb"):
                STAND_INS.pop(identity(path.stat()), None)
        if folder is not None:
            shutil.rmtree(folder)


def _fill(shards: StoredShards, paths: CachePaths, *, is_new: bool) -> None:
    """Show the snapshot and the shards of a URL in a folder, which may have them from before."""
    head = current_head(shards.bucket)
    names = None
    current = paths.current_snapshot() if paths.current.exists() else 0
    if head is None or (current, remembered(paths)["seen"]) != (head.snapshot, head.folder):
        # A snapshot that could not be pushed goes: its entries are in shards.
        shutil.rmtree(paths.snapshots_folder, ignore_errors=True)
        paths.current.unlink(missing_ok=True)
    if head is not None and not paths.current.exists():
        fetch_snapshot(shards.bucket, head, paths.snapshot(head.snapshot))
        write_atomically(paths.current, f"{head.snapshot:06d}\n".encode("ascii"))
    remember(paths, url=shards.bucket.url)
    if head is not None:
        remember(paths, cache=head.cache, seen=head.folder)
        names = None if is_new else set(load_manifest(paths.snapshot(head.snapshot))["shards"])
    for folder in paths.sealed_shards():
        if is_stand_in(folder / "data.mdb"):  # of the command before; the shard may be gone
            shutil.rmtree(folder)
    if not shards.fill(paths, names) and head is None and not is_new:
        raise no_cache(shards.bucket)
