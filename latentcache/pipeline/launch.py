"""Starts workers: as processes of their own, or as a thread of this one.

Decides how a worker process comes to be: a fresh interpreter, never a fork (threads and CUDA do not survive one), in
the process group of the build, so that job control and ``kill`` of the group mean all of it. It inherits its end of
the channel, the file of its board and the lock of the cache, which is held until the last of them has ended.
Cost: 0.3 s of one core for a process, nothing for a thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import latentcache
from latentcache import failpoint
from latentcache.pipeline.board import Board, Doing, shared_descriptor
from latentcache.pipeline.books import Holding
from latentcache.pipeline.channel import Channel, Line, channel_pair
from latentcache.pipeline.devices import Device
from latentcache.pipeline.units import Unit
from latentcache.pipeline.watch import Watch
from latentcache.pipeline.worker import serve

#: ``-P``: a folder in which somebody left a ``numpy.py`` is no place to import from.
_COMMAND = ("-P", "-c", "from latentcache.pipeline.worker import main; main()")
_DEBUG = "LATENTCACHE_DEBUG"
_TAIL_BYTES = 2000
_REAP_S = 10.0
#: A thread that was asked to end is waited for as long; it is in the middle of a batch then.
_LAST_S = 0.1


class Launched(Protocol):
    """A worker that was started, and the line to it."""

    line: Line

    def watched(self, num_decoders: int) -> Board | None:
        """What it is doing; None where a look would not help."""

    def kill(self) -> None:
        """End it at once, as far as that can be done."""

    def ended(self) -> tuple[int, str]:
        """Wait until it is gone; the signal that ended it (0 where none did), and how it ended in words."""


class WorkerProcess:
    """A worker in a process of its own.

    Args:
        variables: Environment beside that of this process.
        lock: Descriptor of the lock on the cache; None where none is held.
        again: Whether it stands in for one that has ended.
    """

    def __init__(self, variables: Mapping[str, str], *, lock: int | None, again: bool = False) -> None:
        self.line: Line
        self.line, theirs = channel_pair()
        self._board = shared_descriptor()
        self._talk = os.memfd_create("latentcache-talk", os.MFD_CLOEXEC)
        inherited = (theirs.fileno(), self._board, *(() if lock is None else (lock,)))
        environment = os.environ | _place() | dict(variables)
        if again and failpoint.VARIABLE in environment:
            environment[failpoint.VARIABLE] = failpoint.for_another(environment[failpoint.VARIABLE])
        options = ("-X", "utf8") if sys.flags.utf8_mode else ()
        numbers = map(str, (theirs.fileno(), self._board, os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, *options, *_COMMAND, *numbers],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get(_DEBUG) else self._talk,
            env=environment,
            pass_fds=inherited,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def watched(self, num_decoders: int) -> Board | None:
        """As in :class:`Launched`."""
        return Board(num_decoders, self._board)

    def kill(self) -> None:
        """As in :class:`Launched`: SIGKILL, which also ends a process that was stopped."""
        self._process.kill()

    def ended(self) -> tuple[int, str]:
        """As in :class:`Launched`."""
        try:
            status = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # it hangs in the system: it will never run a line of ours again
            self._process.kill()
            return signal.SIGKILL, "does not end"
        finally:
            talk = os.pread(self._talk, _TAIL_BYTES, max(os.fstat(self._talk).st_size - _TAIL_BYTES, 0))
            self.close()
        if status < 0:
            return -status, f"was ended by {_signal_name(-status)}"
        last = talk.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return 0, f"ended with status {status}" + (f": {last}" if last else "")

    def close(self) -> None:
        """Give back what is open."""
        for descriptor in (self._board, self._talk):
            if descriptor >= 0:
                os.close(descriptor)
        self._board = self._talk = -1


class WorkerThread:
    """A worker in a thread of this process: starts at once, and shares the fate of the process."""

    def __init__(self) -> None:
        self.line: Line
        self.line, theirs = channel_pair()
        channel = Channel(theirs)
        self._thread = threading.Thread(target=self._run, args=(channel,), name="worker", daemon=True)
        self._thread.start()

    def watched(self, num_decoders: int) -> Board | None:
        """As in :class:`Launched`."""
        return None

    def kill(self) -> None:
        """As in :class:`Launched`: a thread cannot be ended; it ends with the process."""

    def ended(self) -> tuple[int, str]:
        """As in :class:`Launched`."""
        self._thread.join(_LAST_S)
        return 0, "ended"

    def _run(self, channel: Channel) -> None:
        try:
            serve(channel, None)
        finally:
            channel.close()


@dataclass(slots=True, kw_only=True)
class Hand:
    """One worker."""

    launched: Launched
    shard: str
    board: Board | None
    watch: Watch
    holding: Holding = field(default_factory=Holding)
    suspect: Unit | None = None
    """The unit that it tries alone."""
    opened: bool = False
    ending: bool = False
    """It was told that there is no more."""
    said_end: bool = False
    error: BaseException | None = None
    stuck: str = ""
    begun: list[Doing] = field(default_factory=list)
    """What it was about when it was given up."""

    def look(self, elapsed: float) -> None:
        """Give it up where it does not move; call it every now and then."""
        if self.board is None or self.stuck:
            return
        steps = self.board.steps()
        self.stuck = self.watch.stuck(self.board.beats, steps, elapsed)
        if self.stuck:
            self.begun = self.watch.late(steps) or steps
            self.launched.kill()

    def was_doing(self) -> list[Doing]:
        """The steps that it had begun when it ended."""
        return self.begun or ([] if self.board is None else self.board.steps())


@dataclass(slots=True, kw_only=True)
class Place:
    """One device, and who works on it."""

    device: Device
    hand: Hand | None = None
    hired: int = 0
    lost: int = 0
    """Workers in a row that the device failed."""
    unexplained: int = 0
    """Workers in a row that died of nothing that is known."""
    retired: bool = False


def _place() -> dict[str, str]:
    """The place of this package first on the path, and memory that goes back to the system when it is free.

    Without the second, glibc keeps what large pictures took: blocks below a limit that it raises by itself.
    """
    here, others = str(Path(latentcache.__file__).parent.parent), os.environ.get("PYTHONPATH")
    path = f"{here}{os.pathsep}{others}" if others else here
    return {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": os.environ.get("MALLOC_MMAP_THRESHOLD_", str(1 << 20))}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
