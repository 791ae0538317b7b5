"""A cache that somebody else made: what must hold before its bytes are parsed in this process.

Guarantee: nothing outside the cache folder is opened through it (no links, no special files; the data folder that its
manifest names is not looked at); no file is larger than its place allows; manifest, columns, indexes and payloads are
parsed by a child of limited memory and time before, or instead of, this process. The engine never opens a shard, and
a lock file that came along is ignored. What it does not guard against: a cache that changes while it is checked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from latentcache.errors import CacheDamagedError
from latentcache.store.layout import CacheLayout
from latentcache.verify.child import Work, limits_for, run_child
from latentcache.verify.selection import Limits

#: Largest sizes by name, bytes; an index is never larger than its shard, everything else has ``_MOST``.
_LIMITS = {
    "CURRENT": 64,
    "BUILDING": 1 << 20,
    "builder.lock": 1 << 16,
    "shard.json": 1 << 16,
    "manifest.json": 1 << 26,
}
_MOST = 1 << 32
_UNLIMITED = frozenset({"data.mdb"})
_DEPTH = 4
_PREFIX_BYTES = 4096


def check_foreign(layout: CacheLayout) -> Limits:
    """Look at the outside of a cache, then have a child read its facts; gives the limits for reading the rest.

    Raises:
        CacheDamagedError: A link, a special file, a file too large, or a child that did not come through.
        CacheNotFoundError: No cache there, or no finished build in it.
    """
    for path in _files(layout.root, _DEPTH):
        _check_size(path)
    limits = limits_for(layout)
    work = Work(cache=str(layout.root), generation=layout.current_generation(), shards=(), probe=True, limits=limits)
    for _ in run_child(work):
        pass
    return limits


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """Every regular file of a cache.

    Raises:
        CacheDamagedError: Something else is there.
    """
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            path, mode = Path(entry.path), entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise _foreign(path, f"it is a link to {os.readlink(path)}")  # noqa: PTH115 - as it stands there
            if stat.S_ISDIR(mode) and depth > 1:
                yield from _files(path, depth - 1)
            elif stat.S_ISREG(mode):
                yield path
            else:
                raise _foreign(path, "it is neither a file nor a folder of a cache")


def _check_size(path: Path) -> None:
    most = _LIMITS.get(path.name, _MOST)
    if path.name == "index.npy":
        shard = path.with_name("data.mdb")
        most = _PREFIX_BYTES + (shard.lstat().st_size if shard.exists() else 0)
    size = path.lstat().st_size
    if size > most and path.name not in _UNLIMITED:
        raise _foreign(path, f"it has {size:,} bytes, at most {most:,} are expected")


def _foreign(path: Path, why: str) -> CacheDamagedError:
    return CacheDamagedError(
        "this cache holds what no cache should",
        where=str(path),
        why=why,
        fix="do not use it; ask its maker for a copy made with `cp -rL` or `tar`",
    )
