"""Pins: a reader holds its generation, so that nothing collects what it still reads.

A pin is a shared ``flock`` on the generation's ``manifest.json``. Nothing is written, so it works on a folder that
may only be read and leaves nothing behind; it ends with the process, however that ends. A forked child shares the
pin of its parent, an unpickled one takes its own. Where the file system knows no locks, as some network mounts, a
reader works without a pin, and only the grace period of the collector protects it.
Cost: one ``open`` and one ``flock`` for each opened cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from latentcache.errors import CacheDamagedError, CacheFormatError
from latentcache.store.durable import READ_ONLY, open_file
from latentcache.store.generation import Generation, load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import TokenGeneration

#: How often, and how far apart in seconds, a generation is looked for that is not being removed.
_TRIES, _WAIT_S = 50, 0.02
_Pinned = TypeVar("_Pinned", Generation, TokenGeneration)
_PROCESSES = Path("/proc")


class Pin:
    """A hold on one generation, for as long as this object lives or until :meth:`close`.

    Args:
        manifest: The ``manifest.json`` of the generation.

    Raises:
        BlockingIOError: The generation is being removed.
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
        if not _is_still_there(descriptor, manifest):  # removed between the two calls
            self.close()
            raise FileNotFoundError(manifest)

    @property
    def held(self) -> bool:
        """Whether the generation is really held: the file system may know no locks."""
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
        """Another process takes a pin of its own, where the generation is still there and can be held."""
        self.manifest, self._descriptor = state["manifest"], -1
        with contextlib.suppress(OSError):
            self.__init__(state["manifest"])  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a pin, as far as this machine can tell; ``unknown`` for a process of another one."""

    pid: int | str = "unknown"
    host: str = "unknown"
    since: str = "unknown"
    """When the process was started, ISO 8601, UTC."""

    def as_json(self) -> dict[str, Any]:
        """The form of ``error.holder``."""
        return {"pid": self.pid, "host": self.host, "since": self.since}


def open_pinned(cache: Path) -> Generation:
    """The current generation of a cache of pictures. Arguments and errors as :func:`pinned`."""
    return pinned(cache, load_generation)


def pinned(cache: Path, load: Callable[[Path, int | None], _Pinned]) -> _Pinned:
    """The current generation of a cache, held until the last reference to it is gone.

    Args:
        cache: The cache folder.
        load: Opens a generation of the kind that is wanted.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it yet.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: A manifest or a column is not what was written.
    """
    layout = CacheLayout(cache)
    for _ in range(_TRIES):
        number = layout.current_generation()
        if not number:
            break
        try:
            pin = Pin(layout.generation(number) / "manifest.json")
        except BlockingIOError:  # a collector looks at it, or removes it because CURRENT has moved on
            time.sleep(_WAIT_S)
            continue
        except OSError:
            if layout.current_generation() != number:
                continue
            break
        try:
            return replace(load(cache, number), pins=(pin,))
        except (CacheDamagedError, CacheFormatError):
            pin.close()
            raise
    return load(cache, None)


@contextlib.contextmanager
def unpinned(manifest: Path) -> Iterator[bool]:
    """Keep readers away from a generation while the block runs; False where one holds it already."""
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
    """Processes of this machine that hold a generation; one that nobody knows where the system does not say."""
    found = manifest.stat()
    try:
        lines = (_PROCESSES / "locks").read_text("ascii").splitlines()
    except (OSError, ValueError):
        lines = []
    locks = [line.split() for line in lines if " FLOCK " in line and "->" not in line]
    pids = {int(lock[4]) for lock in locks if lock[5].rpartition(":")[2] == str(found.st_ino)}
    known = sorted(pid for pid in pids if pid > 0 and _has_open(pid, found))
    return [Holder(pid=pid, host=socket.gethostname(), since=_started(pid)) for pid in known] or [Holder()]


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Whether a process has this file open; the list of locks names inodes, and those repeat between disks."""
    try:
        return any(os.path.samestat(link.stat(), file) for link in (_PROCESSES / str(pid) / "fd").iterdir())
    except PermissionError:  # somebody else's process: the inode has to do
        return True
    except OSError:
        return False


def _started(pid: int) -> str:
    """When a process was started: ticks since the machine was (proc(5), fields ``starttime`` and ``btime``)."""
    try:
        ticks = int((_PROCESSES / str(pid) / "stat").read_text("ascii", "replace").rpartition(")")[2].split()[19])
        boot = next(line for line in (_PROCESSES / "stat").read_text("ascii").splitlines() if line[:6] == "btime ")
        moment = int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return "unknown"
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _open_for_locking(manifest: Path) -> int:
    """For writing where that is allowed: over a network only that takes an exclusive lock."""
    try:
        return os.open(manifest, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        return os.open(manifest, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_still_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
