"""Leases: a reader holds its snapshot, so that no collector removes the files it still reads.

A lease is a shared ``flock`` on the snapshot's ``manifest.json``. It writes nothing, so it works on a read-only
folder and leaves nothing behind; it ends with the process. A forked child shares the lease of its parent; a pickled
reader takes its own. On a file system without locks a reader works without a lease, and only the grace period of the
collector protects it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentcache.errors import CacheDamagedError, CacheFormatError
from latentcache.store.atomic_io import READ_ONLY, open_file
from latentcache.store.lock import is_still_there
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import MANIFEST, Snapshot, open_snapshot
from latentcache.value import Value

#: How often, and how far apart in seconds, a snapshot is looked for that is not being removed.
_TRIES, _WAIT_S = 50, 0.02
_PROCESSES = Path("/proc")


class Lease:
    """Holds one snapshot for as long as this object lives or until :meth:`close`.

    Args:
        manifest: The ``manifest.json`` of the snapshot.

    Raises:
        BlockingIOError: The snapshot is being removed.
        FileNotFoundError: It is gone.
    """

    _close_file = staticmethod(os.close)  # kept here: when the interpreter ends, names of a module go before objects

    def __init__(self, manifest: Path) -> None:
        self.manifest, self._descriptor = manifest, -1
        descriptor = open_file(manifest)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:  # a file system without locks: the grace period has to do
            os.close(descriptor)
            return
        self._descriptor = descriptor
        if not is_still_there(descriptor, manifest):  # removed between the two calls
            self.close()
            raise FileNotFoundError(manifest)

    @property
    def held(self) -> bool:
        """Whether the snapshot is really held: the file system may know no locks."""
        return self._descriptor >= 0

    def close(self) -> None:
        """Let go. Unlocking is left to the last copy: a forked child may still read."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._close_file(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Another process takes a lease of its own, if the snapshot is still there."""
        self.manifest, self._descriptor = state["manifest"], -1
        with contextlib.suppress(OSError):
            self.__init__(state["manifest"])  # type: ignore[misc]


class Holder(Value):
    """A process of this machine that holds a lease."""

    pid: int
    host: str


def open_leased(cache: Path) -> Snapshot:
    """The current snapshot of a cache, held until the last reference to it is gone.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it yet.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: A file of the snapshot is not what was written.
    """
    paths = CachePaths(cache)
    for _ in range(_TRIES):
        number = paths.current_snapshot()
        if not number:
            break
        try:
            lease = Lease(paths.snapshot(number) / MANIFEST)
        except BlockingIOError:  # a collector looks at it, or removes it because CURRENT has moved on
            time.sleep(_WAIT_S)
            continue
        except OSError:
            if paths.current_snapshot() != number:
                continue
            break
        try:
            return replace(open_snapshot(cache, number), lease=lease)
        except (CacheDamagedError, CacheFormatError):
            lease.close()
            raise
    return open_snapshot(cache)


@contextlib.contextmanager
def unleased(manifest: Path) -> Iterator[bool]:
    """Keep readers away from a snapshot while the block runs; False where one holds it already."""
    descriptor = _open_for_locking(manifest)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # no locks here: the grace period was asked for that
            pass
        yield True
    finally:
        os.close(descriptor)


def holders(manifest: Path) -> list[Holder]:
    """Processes of this machine that have a manifest open, as far as the system says (Linux: /proc)."""
    found, pids = manifest.stat(), set[int]()
    for link in _PROCESSES.glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if os.path.samestat(link.stat(), found):
                pids.add(int(link.parts[2]))
    return [Holder(pid=pid, host=os.uname().nodename) for pid in sorted(pids)]


def _open_for_locking(manifest: Path) -> int:
    """For writing where that is allowed: over a network only that takes an exclusive lock."""
    try:
        return os.open(manifest, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        return os.open(manifest, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
