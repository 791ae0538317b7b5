"""Who builds a cache and who reads it: flocks that end with their processes, so nothing is left to clean up.

The builder's lock answers at once and names its holder. Workers inherit its descriptor; a build that finds it held in
the name of a dead process waits for its workers.

A reader has a lease of its snapshot: a shared lock on ``manifest.json``. Thus ``gc`` removes no file that is still
read. A lease writes nothing, so it works on a read-only folder. A forked child shares it; a pickled
reader takes its own. Without locks in the file system, do not collect while a reader is open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from latentcache.errors import CacheDamagedError, CacheLockedError, StoreError
from latentcache.failpoint import failpoint
from latentcache.store.atomic_io import READ_ONLY, open_file, read_file, read_json, writing

#: How far apart the tries to take a lock of a dead build are, in seconds.
_WAIT_S = 0.01
#: How long the workers of a dead build are waited for, in seconds; they end within 8.
ORPHANS_S = 10.0
#: How long a build of another host has to be silent before its open shards are taken over, in seconds.
SILENCE_S = 60.0
#: Error numbers of a file system without flock.
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
_UNKNOWN: dict[str, Any] = dict.fromkeys(("pid", "host", "since"), "unknown")
#: Descriptors of the builder's locks that this process holds.
_held: set[int] = set()


@contextmanager
def builder_lock(path: Path) -> Iterator[int]:
    """Hold the cache for building; give the descriptor that holds it, for workers to inherit."""
    with writing(path):
        # A link is not followed: what it leads to would be emptied.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    _held.add(descriptor)
    try:
        with writing(path):
            _take(path, descriptor)
        yield descriptor
    finally:
        if descriptor in _held:  # not in a fork of the process that took it
            _held.remove(descriptor)
            os.close(descriptor)


def builder_name(path: Path) -> str:
    """Name who holds the cache, as far as the file says, without touching the lock; empty if no holder is known.

    Taking the lock for a moment would turn away a build that starts at that moment.
    """
    holder = _UNKNOWN
    with contextlib.suppress(OSError):
        holder = _holder(read_file(path))
    reused = holder["pid"] == os.getpid() and not _held  # the number of a dead build, as containers give it out again
    is_known = isinstance(holder["pid"], int) and not reused and not _is_dead(holder)
    return "process {pid} on {host} since {since}".format(**holder) if is_known else ""


def check_owner(building: Path, owner: str) -> None:
    """Raise CacheLockedError unless ``BUILDING`` names this build, by its random id, as the owner of open shards.

    An empty id is not looked for. Raises StoreError if the file cannot be read.
    """
    if not owner:
        return
    with contextlib.suppress(CacheDamagedError):  # none, or not that of this build
        if read_json(building).get("owner") == owner:
            return
    raise CacheLockedError(
        "another build has taken this cache over",
        where=str(building),
        why="it names another owner of the open shards; never delete builder.lock",
        fix="wait until the other build ends, then run this command again: committed entries are kept",
    )


def wait_for_silence(building: Path, lock: Path, *, is_stopped: Callable[[], bool]) -> None:
    """Wait until a build of another host, which ``BUILDING`` names, has not written the file for 60 s.

    Where locks do not reach across hosts, that build may still run, and the open shards are its own. The ``lock`` was
    just written here: the times of both files are those of one file server. Raises CacheLockedError if it goes on.
    """
    try:
        host = str(read_json(building)["host"])
        written = building.stat().st_mtime
    except (CacheDamagedError, FileNotFoundError, KeyError):
        return
    deadline = time.monotonic() + SILENCE_S - max(lock.stat().st_mtime - written, 0)
    while host != os.uname().nodename and time.monotonic() < deadline and not is_stopped():
        time.sleep(min(1.0, SILENCE_S))
        if building.exists() and building.stat().st_mtime != written:
            raise _held_by(_UNKNOWN | {"host": host}, building, f"the build on {host} goes on: it writes this file")


def _let_go() -> None:
    """In a forked process: a flock lasts until all copies of its descriptor are closed."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


def _take(path: Path, descriptor: int) -> None:
    holder = dict[str, Any]()
    deadline = time.monotonic() + ORPHANS_S
    while not (free := _locked(descriptor)):
        holder = holder or _holder(os.pread(descriptor, 4096, 0))
        if not _is_dead(holder) or time.monotonic() >= deadline:
            break
        time.sleep(_WAIT_S)
    if not free:
        left = "; that process is dead, and worker processes of it still run" if _is_dead(holder) else ""
        raise _held_by(holder, path, f"it has been running since {holder['since']}{left}")
    if not _is_still_there(descriptor, path):  # its holder was rejected, and removed its new cache folder
        raise _held_by(_UNKNOWN, path, "it has just given this cache up")
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "host": os.uname().nodename, "since": since}
    # Not emptied before: ext4 would then wait for the disk when the file is closed.
    os.ftruncate(descriptor, os.pwrite(descriptor, json.dumps(holder).encode(), 0))
    failpoint("lock-taken")


def _held_by(holder: dict[str, Any], where: Path, why: str) -> CacheLockedError:
    problem = f"another build holds this cache: process {holder['pid']} on {holder['host']}"
    fix = "wait until it ends; it is safe to run this command again then"
    return CacheLockedError(problem, holder=holder, where=str(where), why=why, fix=fix)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise StoreError(
            "this file system cannot lock files",
            why=f"flock: {error.strerror}; two builds at once would damage the cache",
            fix="build on a local disk with --out, then copy the cache here: reading needs no locks",
        ) from error
    return True


def _is_dead(holder: dict[str, Any]) -> bool:
    """Return True if the process that took the lock is known to be gone; only its workers can hold it."""
    if holder["host"] != os.uname().nodename or not isinstance(holder["pid"], int):
        return False
    try:
        os.kill(holder["pid"], 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def _is_still_there(descriptor: int, path: Path) -> bool:
    """True if an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(record: bytes) -> dict[str, Any]:
    """Who holds the cache, by the file of the lock."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return _UNKNOWN | dict(json.loads(record))
    return _UNKNOWN


class Lease:
    """Holds the snapshot of a ``manifest.json`` until :meth:`close`; BlockingIOError while it is being removed."""

    def __init__(self, manifest: Path) -> None:
        self._manifest = manifest
        descriptor = open_file(manifest)
        self.close = weakref.finalize(self, os.close, descriptor)  # a forked child may still read with its copy
        self.close.atexit = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise
            return  # a file system without locks
        if not _is_still_there(descriptor, manifest):  # removed between the two calls
            self.close()
            raise FileNotFoundError(manifest)

    def __reduce__(self) -> Any:
        return _lease_again, (self._manifest,)


def _lease_again(manifest: Path) -> Lease | None:
    """Another process takes a lease of its own, if the snapshot is still there."""
    with contextlib.suppress(OSError):
        return Lease(manifest)
    return None


@contextmanager
def unleased(manifest: Path) -> Iterator[bool]:
    """Keep readers away from a snapshot while the block runs; False where one holds it already."""
    flags = os.O_NONBLOCK | os.O_CLOEXEC
    free = True
    try:
        descriptor = os.open(manifest, os.O_RDWR | flags)  # over a network only that takes an exclusive lock
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        descriptor = os.open(manifest, os.O_RDONLY | flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # without locks nobody can tell
        free = not isinstance(error, BlockingIOError)
    try:
        yield free
    finally:
        os.close(descriptor)
