"""A cache at a URL as a local folder that every command reads.

Snapshot and indexes are fetched. Of each shard's data the folder has an empty file of its size, which stands in for
the object: whoever reads it in this process gets ranges of the object. Thus a check needs no space for the data. What
a command publishes in such a folder can be pushed: new shards are files, and the others are at the URL already.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from latentcache.store.atomic_io import make_folder, write_atomically
from latentcache.store.gather import STAND_INS, identity
from latentcache.store.index import INDEX
from latentcache.store.paths import CachePaths
from latentcache.store.remote import Bucket, current_head, fetch_snapshot, no_cache, push, remember
from latentcache.store.snapshot import load_manifest

#: Bytes that a thread gets at once when it reads on, and how far it may skip for that.
_AHEAD, _SKIPPED = 8 << 20, 1 << 16


class _Ranges(threading.local):
    """The bytes of objects. Each thread keeps the last range it got, and gets a longer one if it reads on."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._key, self._first, self._data = bucket, "", 0, b""

    def read(self, key: str, size: int, first: int, memory: memoryview) -> int:
        """Read an object of this size from a byte on; gives the bytes that there are."""
        length, at = max(min(len(memory), size - first), 0), first - self._first
        is_near = key == self._key and 0 <= at <= len(self._data) + _SKIPPED
        if not is_near or at + length > len(self._data):
            ahead = min(_AHEAD, size - first) if is_near else 0
            self._data = self._bucket.read_range(key, first, max(length, ahead)) if length else b""
            self._key, self._first, at = key, first, 0
        part = self._data[at : at + length]
        memory[: len(part)] = part
        return len(part)


@contextmanager
def local_view(url: str, *, is_new: bool = False) -> Iterator[Path]:
    """A temporary folder with the cache of a URL; a snapshot that is published there is pushed at the end.

    ``is_new``: there need be no cache at the URL. Raises RemoteError, UsageError, CacheNotFoundError.
    """
    bucket = Bucket(url)
    with TemporaryDirectory(prefix="latentcache-") as name:
        root = Path(name).resolve() / bucket.url.rpartition("/")[2]
        root.mkdir()
        before = _fill(bucket, CachePaths(root), is_new=is_new)
        try:
            yield root
            paths = CachePaths(root)
            if paths.current.exists() and paths.current_snapshot() != before:
                push(root, url)
        finally:
            for path in root.glob("shards/*/data.mdb"):
                STAND_INS.pop(identity(path.stat()), None)


def _fill(bucket: Bucket, paths: CachePaths, *, is_new: bool) -> int:
    """Fetch all but data; gives the number of the current snapshot, 0 if there is none."""
    head, sizes = current_head(bucket), bucket.sizes("shards")
    if head is None and not sizes and not is_new:
        raise no_cache(bucket)
    names = {key.split("/")[1] for key in sizes}
    if head is not None:
        folder = paths.snapshot(head.snapshot)
        fetch_snapshot(bucket, head, folder)
        names = names if is_new else names & set(load_manifest(folder)["shards"])
    files = {key: paths.root / key for key in sizes if key.split("/")[1] in names}
    bucket.fetch_all({key: path for key, path in files.items() if path.name == INDEX})
    ranges = _Ranges(bucket)
    for key, path in files.items():
        if path.name != INDEX:
            _stand_in(path, sizes[key], partial(ranges.read, key, sizes[key]))
    if head is None:
        return 0
    write_atomically(paths.current, f"{head.snapshot:06d}\n".encode("ascii"))
    remember(paths, head)
    return head.snapshot


def _stand_in(path: Path, size: int, read: partial[int]) -> None:
    make_folder(path.parent)
    with path.open("wb") as file:
        file.truncate(size)
    STAND_INS[identity(path.stat())] = read
