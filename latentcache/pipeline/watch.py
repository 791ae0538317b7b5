"""Is a worker stuck? Compared look by look, so that a build that was itself stopped or asleep accuses nobody.

Decides by progress, not by clocks: a step that is still the same one, and a heart that has not beaten, grow older by
the time between two looks, of which no more than a second counts. Guarantee: a process that was stopped is found, and
so is one that works on and gets nowhere. Waiting for a disk or for memory is no step and never too long.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from latentcache.errors import UsageError
from latentcache.pipeline.board import ENCODING, OPENING, Doing

#: Seconds without progress after which a worker is given up; a 100-megapixel PNG takes 8 s, loading a model minutes.
DEADLINE_S = 120.0
VARIABLE = "LATENTCACHE_WORKER_DEADLINE"
#: What opening an encoder may take, in deadlines; pictures of a batch that count as one more deadline on a device.
_OPENING, _BATCH = 10, 8
#: Of the time between two looks, this much counts.
_MOST_S = 1.0


def deadline_s() -> float:
    """Seconds without progress: :data:`DEADLINE_S`, or what the environment says.

    Raises:
        UsageError: It says something that is no number.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        found = float(text) if text else DEADLINE_S
    except ValueError:
        found = 0.0
    if not found > 0:
        raise UsageError(f"{VARIABLE}={text} is no number of seconds", fix=f"unset {VARIABLE}")
    return found


class Watch:
    """Looks at one worker again and again.

    Args:
        deadline: Seconds that one picture may take.
        on_cpu: Whether the encoder runs on the CPU, where a batch takes as long as its pictures together.
    """

    def __init__(self, deadline: float, *, on_cpu: bool) -> None:
        self._deadline, self._on_cpu = deadline, on_cpu
        self._beats = -1
        self._silent = 0.0
        self._ages: dict[tuple[int, int], float] = {}

    def stuck(self, beats: int, steps: Sequence[Doing], elapsed: float) -> str:
        """Why the worker is to be given up; empty while it is fine. Call it more often than once a second.

        Args:
            beats: How often its heart has beaten.
            steps: What it is doing.
            elapsed: Seconds since the last look.
        """
        elapsed = min(elapsed, _MOST_S)
        self._silent = 0.0 if beats != self._beats else self._silent + elapsed
        self._beats = beats
        ages = self._ages
        self._ages = {(step.slot, step.step): ages.get((step.slot, step.step), -elapsed) + elapsed for step in steps}
        if self._silent > self._deadline * (1 if beats else _OPENING):  # before the first beat it is being started
            return f"has shown no sign of life for {self._silent:.0f} s"
        late = self.late(steps)
        return f"has not moved for {self._ages[late[0].slot, late[0].step]:.0f} s" if late else ""

    def late(self, steps: Sequence[Doing]) -> list[Doing]:
        """Those of the steps that take too long, by the last look."""
        return [step for step in steps if self._ages.get((step.slot, step.step), 0.0) > self._allowed(step)]

    def _allowed(self, step: Doing) -> float:
        if step.stage == OPENING:
            return _OPENING * self._deadline
        if step.stage == ENCODING:
            return self._deadline * (max(len(step.items), 1) if self._on_cpu else 1 + len(step.items) / _BATCH)
        return self._deadline
