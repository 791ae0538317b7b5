"""Find workers that hang or were stopped, and the jobs that an ended worker had begun.

A worker writes each step (stage and jobs) to an activity board before it begins: 2 us, no system call. The board is
memory shared with the build, and it outlives the worker. The watchdog decides by progress, not by clocks. A look
counts for one second at most, so a build that was itself stopped or asleep accuses no worker. Waiting for a disk or
for memory is not a step and has no deadline.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, NamedTuple

import numpy as np

from latentcache.errors import UsageError

#: Stages, as numbers on the board.
IDLE, PREPARING, ENCODING, OPENING = range(4)
#: Row of the encoding thread, and the first of the preparing threads.
ENCODER, FIRST_PREPARER = 0, 1
#: Jobs that a row has room for. Jobs beyond it would not be suspected.
_ROOM = 1024
_STEP, _STAGE, _COUNT, _ITEMS = 0, 1, 2, 3
_WIDTH = _ITEMS + _ROOM

#: Seconds without progress after which a worker is killed; a 100-megapixel PNG takes 8 s, loading a model minutes.
DEADLINE_S = 120.0
VARIABLE = "LATENTCACHE_WORKER_DEADLINE"
#: Deadlines that opening an encoder may take; items of a batch that count as one more deadline on an accelerator.
_OPENING, _BATCH = 10, 8
#: Seconds of the time between two looks that count.
_MOST_S = 1.0


class Activity(NamedTuple):
    """One step that has begun and not ended."""

    row: int
    step: int
    """Goes up with every step of the row, so two looks show if it has moved."""
    stage: int
    items: tuple[int, ...]
    """Numbers of jobs."""


class ActivityBoard:
    """One row of numbers for each thread that takes steps, and a heartbeat."""

    def __init__(self, num_preparers: int = 0, descriptor: int | None = None) -> None:
        rows = 1 + FIRST_PREPARER + num_preparers
        self._is_here = descriptor is None
        if descriptor is None:
            self._rows = np.zeros((rows, _WIDTH), dtype=np.int64)
            return
        size = 8 * rows * _WIDTH
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._rows = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.int64).reshape(rows, _WIDTH)

    @contextmanager
    def activity(self, row: int, stage: int, items: Sequence[int] = ()) -> Iterator[None]:
        """Note the step of this thread while the block runs; after an error the note stays, to name its jobs."""
        numbers = self._rows[1 + row]
        count = min(len(items), _ROOM)
        numbers[_ITEMS : _ITEMS + count] = items[:count]
        numbers[_COUNT] = count
        numbers[_STEP] += 1
        numbers[_STAGE] = stage
        yield
        numbers[_STAGE] = IDLE

    def beat(self) -> None:
        """Show that the process is alive."""
        self._rows[0, _STEP] += 1

    @property
    def beats(self) -> int:
        """Number of heartbeats so far. A thread of this process is alive."""
        if self._is_here:
            self.beat()
        return int(self._rows[0, _STEP])

    def steps(self) -> list[Activity]:
        """All steps that have begun and not ended."""
        return [
            Activity(row, int(own[_STEP]), int(own[_STAGE]), tuple(own[_ITEMS : _ITEMS + int(own[_COUNT])].tolist()))
            for row, own in enumerate(self._rows[1:])
            if own[_STAGE] != IDLE
        ]


def anonymous_file() -> IO[bytes]:
    """A file in memory without a name, or on a disk if the system has no such files."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("latentcache-board", os.MFD_CLOEXEC), "r+b")
    return tempfile.TemporaryFile()


def deadline_s() -> float:
    """Seconds without progress: :data:`DEADLINE_S`, or the value of :data:`VARIABLE`."""
    text = os.environ.get(VARIABLE, "")
    try:
        found = float(text) if text else DEADLINE_S
    except ValueError:
        found = 0.0
    if not found > 0:
        raise UsageError(f"{VARIABLE}={text}: not a positive number of seconds", fix=f"unset {VARIABLE}")
    return found


class Watchdog:
    """Looks at one worker again and again; ``on_cpu`` a batch takes as long as its items together."""

    def __init__(self, deadline: float, *, on_cpu: bool) -> None:
        self._deadline, self._on_cpu = deadline, on_cpu
        self._beats, self._silent = -1, 0.0
        self._ages: dict[tuple[int, int], float] = {}

    def stuck(self, beats: int, steps: Sequence[Activity], elapsed: float) -> str:
        """Return the reason to kill the worker, or an empty one. Call it more often than once a second."""
        elapsed = min(elapsed, _MOST_S)
        self._silent = 0.0 if beats != self._beats else self._silent + elapsed
        self._beats = beats
        if self._silent > self._deadline * (1 if beats else _OPENING):  # before the first beat it is being started
            return f"has shown no sign of life for {self._silent:.0f} s"
        self._ages = {one[:2]: self._ages.get(one[:2], -elapsed) + elapsed for one in steps}
        late = [self._ages[one[:2]] for one in steps if self._ages[one[:2]] > self._allowed(one)]
        return f"has not moved for {late[0]:.0f} s" if late else ""

    def _allowed(self, step: Activity) -> float:
        if step.stage == OPENING:
            return _OPENING * self._deadline
        items = len(step.items)
        return self._deadline * max(items if self._on_cpu or step.stage == PREPARING else 1 + items / _BATCH, 1)
