"""One builder per cache: a flock of our own, taken before LMDB is touched.

LMDB's writer lock waits without a limit, ignores SIGINT and names no holder. This one answers at once, names the
holder, and ends with its processes, so a killed build leaves nothing to clean up. A forked process has no part in it;
workers are given its descriptor, and a build that finds the lock held in the name of a dead process waits for its
workers. The cache folder itself is locked as well, if its file system allows that: somebody may delete the lock file
while a build runs, and the next build would lock a new one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from latentcache.errors import CacheLockedError, StoreError
from latentcache.failpoint import failpoint
from latentcache.store.atomic_io import as_store_error, read_file

#: How often, and how far apart in seconds, an empty lock file is read again.
_TRIES, _WAIT_S = 20, 0.01
#: How long the workers of a dead build are waited for, in seconds; they end within 8.
ORPHANS_S = 10.0
#: Error numbers of a file system without flock.
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
#: Descriptors of the locks that this process holds.
_held: set[int] = set()


@contextmanager
def builder_lock(path: Path) -> Iterator[int]:
    """Hold the cache for building; give the descriptor that holds it, for workers to inherit.

    Raises:
        CacheLockedError: Another process holds it; ``holder`` says which.
        CacheReadOnlyError: The file cannot be opened or written.
    """
    try:
        # A link is not followed: what it leads to would be emptied.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise as_store_error(error, path) from error
    _held.add(descriptor)
    folder = -1
    try:
        with suppress(OSError):  # a folder that cannot be read cannot be locked
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _held.add(folder)
        _take(descriptor, path, folder)
        yield descriptor
    finally:
        for one in (descriptor, folder):
            if one in _held:  # else this is a fork of the process that took it
                _held.remove(one)
                os.close(one)


def builder_name(path: Path) -> str:
    """Name who holds the cache, as far as the file says, without touching the lock; empty if no holder is known.

    Taking the lock for a moment would turn away a build that starts at that moment.
    """
    try:
        holder = json.loads(read_file(path))
        pid, host, since = int(holder["pid"]), str(holder["host"]), str(holder["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    reused = pid == os.getpid() and not _held  # the number of a dead build, as containers give it out again
    if reused or _is_dead({"pid": pid, "host": host}):
        return ""
    return f"process {pid} on {host} since {since}"


def _let_go() -> None:
    """In a forked process: a flock lasts until all copies of its descriptor are closed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def _held_by(holder: dict[str, Any], where: Path, why: str) -> CacheLockedError:
    what = f"another build holds this cache: process {holder['pid']} on {holder['host']}"
    fix = "wait until it ends; it is safe to run this command again then"
    return CacheLockedError(what, holder=holder, where=str(where), why=why, fix=fix)


def _take(descriptor: int, path: Path, folder: int) -> None:
    try:
        held = not _locked(descriptor)
        holder = _read_holder(descriptor) if held else {}
        deadline = time.monotonic() + ORPHANS_S
        while held and _is_dead(holder) and time.monotonic() < deadline:
            time.sleep(_WAIT_S)
            held = not _locked(descriptor)
    except OSError as error:
        raise as_store_error(error, path) from error
    if held:
        left = "; that process is dead, and worker processes of it still run" if _is_dead(holder) else ""
        raise _held_by(holder, path, f"it has been running since {holder['since']}{left}")
    unknown = dict.fromkeys(("pid", "host", "since"), "unknown")
    if not is_still_there(descriptor, path):  # its holder was refused, and took its new cache folder away
        raise _held_by(unknown, path, "it has just given this cache up")
    if not _folder_locked(folder):
        from latentcache.store.lease import holders  # it imports snapshots, which import this module

        others = (one for one in map(asdict, holders(path.parent)) if one["pid"] != os.getpid())
        raise _held_by(unknown | next(others, {}), path.parent, f"its {path.name} was deleted: never delete it")
    since = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "since": since}).encode()
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
        failpoint("lock-taken")
    except OSError as error:
        raise as_store_error(error, path) from error


def _locked(descriptor: int) -> bool:
    """Take the lock, unless another process has it."""
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


def _folder_locked(folder: int) -> bool:
    """Lock the cache folder; True also where folders cannot be locked, as on NFS, or could not be opened (-1)."""
    if folder < 0:
        return True
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the process that took the lock is known to be gone, so that only workers of it can hold it."""
    if holder["host"] != os.uname().nodename or not isinstance(holder["pid"], int):
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def is_still_there(descriptor: int, path: Path) -> bool:
    """True if an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read_holder(descriptor: int) -> dict[str, Any]:
    """What the holder wrote; one that has only just taken the lock is given a moment to write it."""
    found: Any = None
    for _ in range(_TRIES):
        try:
            found = json.loads(os.pread(descriptor, 4096, 0))
            break
        except (OSError, ValueError):
            time.sleep(_WAIT_S)
    found = found if isinstance(found, dict) else {}
    return {name: found.get(name, "unknown") for name in ("pid", "host", "since")}
