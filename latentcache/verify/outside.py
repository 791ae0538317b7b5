"""Look at the outside of a cache that somebody else made, before a byte of it is parsed.

No file outside the cache folder may be opened through it: links, special files and too large files are errors. Files
in it are read with bounded positional reads and parsed by code that cannot crash. The command limits its own memory.
Not guarded against: a cache that changes during the check.
"""

from __future__ import annotations

import itertools
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from latentcache.errors import CacheDamagedError

#: Largest sizes by name, bytes; everything else but shards has ``_MOST``.
_LIMITS = {"CURRENT": 64, "BUILDING": 1 << 20, "builder.lock": 1 << 16, "manifest.json": 1 << 26}
_MOST = 1 << 32
_FOLDERS_DEEP = 4
#: Memory beyond what columns and indexes need.
_MEMORY_BYTES = 2 << 30


def check_outside(root: Path) -> None:
    """See that a folder holds only folders and regular files of sizes that a cache has."""
    for path in (Path(folder, name) for folder, *names in os.walk(root) for name in itertools.chain(*names)):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise _foreign(path, f"it is a link to {path.readlink()}")
        if stat.S_ISREG(status.st_mode):
            most = _LIMITS.get(path.name, _MOST)
            if status.st_size > most and path.name != "data.mdb":
                raise _foreign(path, f"it has {status.st_size:,} bytes, at most {most:,} are expected")
        elif not stat.S_ISDIR(status.st_mode) or len(path.relative_to(root).parts) >= _FOLDERS_DEEP:
            raise _foreign(path, "it is neither a file nor a folder of a cache")


@contextmanager
def limited_memory(root: Path) -> Iterator[None]:
    """Let this process take no more memory than an honest cache of this size needs, while the block runs."""
    columns = [*root.glob("snapshots/*/*"), *root.glob("shards/*/index.safetensors")]
    taken = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    most = taken + _MEMORY_BYTES + 8 * sum(path.lstat().st_size for path in columns)
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def _foreign(path: Path, why: str) -> CacheDamagedError:
    return CacheDamagedError(
        "this cache holds something that no cache should",
        where=str(path),
        why=why,
        fix="do not use it; ask its maker for a copy made with `cp -rL` or `tar`",
    )
