"""Units of work: the plan in runs of one bucket, given out, taken back, and split until a culprit is alone.

Decides who is to blame when a worker dies: only samples it had begun on. They are tried again by themselves; a unit
that ends its worker twice is halved; a sample that does so twice alone (three times where the process was killed from
outside, which most often is no fault of the sample) is convicted. Pure arithmetic, no processes.
Cost of one culprit among n suspects: about ``2 + log2(n) + 2`` workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from latentcache.pipeline.work import Planned

#: Pictures of one unit at most: 2 to 4 s of a device, so the slowest of several is waited for no longer.
MAX_UNIT = 256
#: Units that each worker gets where there are enough pictures, so that all end together.
_UNITS_EACH = 8
#: Workers that a unit of several, a sample alone, and a sample alone under SIGKILL may end.
_TRIES, _TRIES_ALONE, _TRIES_KILLED = 2, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some planned samples."""

    items: tuple[Planned, ...]
    suspect: bool = False
    """Goes to a worker that has nothing else, so that it is known what kills it."""
    strikes: int = 0
    """Workers that it has ended."""


def cut(todo: Sequence[Planned], *, workers: int, batch_size: int) -> list[Unit]:
    """Runs of one bucket in the order of the plan, none above :data:`MAX_UNIT`.

    With several workers they are so small that each gets some, but not below a batch.
    """
    share = MAX_UNIT if workers == 1 else -(-len(todo) // (workers * _UNITS_EACH))
    most = min(max(-(-share // batch_size) * batch_size, 1), MAX_UNIT)
    units = []
    for _, run in groupby(todo, key=lambda planned: planned.placements[0].bucket):
        items = tuple(run)
        units += [Unit(items=items[start : start + most]) for start in range(0, len(items), most)]
    return units


class UnitQueue:
    """What is still to be given out."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._fresh = deque(units)
        self._suspects: deque[Unit] = deque()

    def __len__(self) -> int:
        return len(self._fresh) + len(self._suspects)

    def next(self, *, idle: bool) -> Unit | None:
        """The next unit for a worker; suspects only for one that has nothing to do, when all others are given out."""
        if self._fresh:
            return self._fresh.popleft()
        return self._suspects.popleft() if idle and self._suspects else None

    def give_back(self, items: Sequence[Planned]) -> None:
        """Take back what a worker had not begun on."""
        if items:
            self._fresh.appendleft(Unit(items=tuple(items)))

    def blame(
        self, unit: Unit | None, begun: Collection[int], items: Sequence[Planned], *, killed: bool
    ) -> list[Planned]:
        """Take back what a dead worker held; gives the samples that are convicted by it.

        Args:
            unit: The suspect unit that it was trying; None where it had ordinary ones.
            begun: Indices of the samples that it was in the middle of.
            items: Everything it held that is not done.
            killed: Whether it was ended from outside, or hung.
        """
        suspects = [item for item in items if item.index in begun]
        self.give_back([item for item in items if item.index not in begun])
        if not suspects:
            return []
        strikes = 1 + (unit.strikes if unit is not None else 0)
        alone = len(suspects) == 1
        if alone and unit is not None and len(unit.items) == 1:
            if strikes >= (_TRIES_KILLED if killed else _TRIES_ALONE):
                return suspects
        elif strikes >= _TRIES and not alone:
            middle = len(suspects) // 2
            for half in (suspects[:middle], suspects[middle:]):
                self._suspects.append(Unit(items=tuple(half), suspect=True, strikes=1 if len(half) > 1 else 0))
            return []
        elif alone:
            strikes = 0  # whatever ended the last worker, it was not known to be this one
        self._suspects.append(Unit(items=tuple(suspects), suspect=True, strikes=strikes))
        return []
