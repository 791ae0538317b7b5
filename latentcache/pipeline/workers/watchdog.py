"""Find workers that hang or were stopped, and the jobs that an ended worker had begun.

A worker reports each step (stage and jobs) before it begins. A report is in the system's hands once it is sent, so it
outlives the worker. The watchdog decides by progress, not by clocks. A look counts for one second at most, so a build
that was itself stopped or asleep accuses no worker. Waiting for a disk or for memory is not a step and has no
deadline.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from latentcache.errors import UsageError

#: Stages of a step.
IDLE, PREPARING, ENCODING, OPENING = range(4)

#: Seconds without progress after which a worker is killed; a 100-megapixel PNG takes 8 s, loading a model minutes.
DEADLINE_S = 120.0
VARIABLE = "LATENTCACHE_WORKER_DEADLINE"
#: Deadlines that opening an encoder may take; items of a batch that count as one more deadline on an accelerator.
_OPENING, _BATCH = 10, 8
#: Seconds of the time between two looks that count.
_MOST_S = 1.0


class Step(NamedTuple):
    """From a worker: a thread of it begins something, and its step before is over."""

    thread: int
    """0 encodes, the others prepare."""
    stage: int
    jobs: tuple[int, ...] = ()
    """Their numbers."""


class Beat(NamedTuple):
    """From a worker, twice a second: its process runs."""


def deadline_s() -> float:
    """Seconds without progress: :data:`DEADLINE_S`, or the value of :data:`VARIABLE`."""
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else DEADLINE_S
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"{VARIABLE}={text}: not a positive number of seconds", fix=f"unset {VARIABLE}")
    return seconds


class Watchdog:
    """Looks at one worker again and again; ``on_cpu`` a batch takes as long as its items together.

    One thread takes its reports, and another one looks.
    """

    def __init__(self, deadline: float, *, on_cpu: bool) -> None:
        self._deadline, self._on_cpu = deadline, on_cpu
        self._has_beaten, self._is_silent = False, False
        self._silent_s = 0.0
        self._steps: dict[int, tuple[Step, list[float]]] = {}
        """By thread: its step, and the seconds since it began."""

    def report(self, report: Step | Beat) -> None:
        """Take what a worker reports."""
        if isinstance(report, Beat):
            self._has_beaten, self._is_silent = True, False
        elif report.stage == IDLE:
            self._steps.pop(report.thread, None)
        else:
            self._steps[report.thread] = (report, [0.0])

    @property
    def begun(self) -> dict[int, int]:
        """Number -> stage of the jobs that are in work."""
        return {job: step.stage for step, _ in list(self._steps.values()) for job in step.jobs}

    def stuck(self, elapsed: float) -> str:
        """Return the reason to kill the worker, or an empty one. Call it more often than once a second."""
        elapsed = min(elapsed, _MOST_S)
        self._silent_s = self._silent_s + elapsed if self._is_silent else 0.0
        self._is_silent = True
        # Before the first beat it is being started.
        if self._silent_s > self._deadline * (1 if self._has_beaten else _OPENING):
            return f"has shown no sign of life for {self._silent_s:.0f} s"
        late = ""
        for step, age in list(self._steps.values()):
            age[0] += elapsed
            if age[0] > self._allowed(step):
                late = f"has not moved for {age[0]:.0f} s"
        return late

    def _allowed(self, step: Step) -> float:
        if step.stage == OPENING:
            return _OPENING * self._deadline
        count = len(step.jobs)
        return self._deadline * max(count if self._on_cpu or step.stage == PREPARING else 1 + count / _BATCH, 1)
