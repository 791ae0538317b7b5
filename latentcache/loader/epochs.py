"""What every loader says of its epochs: how many batches, which epoch, where in it, and how training goes on there.

Guarantee: numbers are exact before anything is read, the same on every rank, and count as trainers count; ``len`` is
the whole epoch, also after a resume (Lightning compares it with its own counter).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Self

from latentcache.loader.position import Position
from latentcache.plan.batches import PlanReport


class Epochs(ABC):
    """A loader: ``report`` and ``_position`` say what it serves. A subclass sets them."""

    report: PlanReport
    rank: int
    _position: Position

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Serve the epoch, or what is left of it after ``load_state_dict``."""

    @abstractmethod
    def batch(self, rows: list[int], epoch: int | None = None) -> dict[str, Any]:
        """One batch of the given entries, as this epoch or a given one serves them."""

    def __len__(self) -> int:
        """Batches of an epoch on this rank (the same on every rank)."""
        return self.report.steps

    @property
    def sampler(self) -> Self:
        """The loader itself, for trainers that call ``loader.sampler.set_epoch`` and nothing else (Lightning)."""
        return self

    @property
    def position(self) -> Position:
        """Where this loader stands; shared with what serves its batches in another way."""
        return self._position

    def steps(self, epochs: float, grad_accum: int = 1) -> int:
        """Optimizer steps of so many epochs; what is left at the end of an epoch is a step too.

        Counted as the Trainer of transformers counts (``set_initial_training_values``).

        Args:
            epochs: Passes over the data, also a fraction.
            grad_accum: Batches of this rank per optimizer step.
        """
        return math.ceil(epochs * math.ceil(len(self) / grad_accum))

    def epoch_at(self, step: int, grad_accum: int = 1) -> float:
        """Epochs that are done after so many optimizer steps; the whole part is the epoch to set next.

        Args:
            step: Optimizer steps since the start of training.
            grad_accum: Batches of this rank per optimizer step.
        """
        whole, part = divmod(step, math.ceil(len(self) / grad_accum))
        return whole + part * grad_accum / len(self)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next pass serves."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass serves; a resumed epoch that is named again goes on."""
        self._position.set_epoch(epoch)

    def remaining(self) -> int:
        """Batches of this rank that are left of the epoch."""
        return self._position.remaining()

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, as plain values: batches handed out, not batches read ahead. Equal on all ranks."""
        return self._position.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was made, also with another batch size or number of ranks.

        The next pass serves the rest of that epoch; ``len`` stays the whole epoch.

        Raises:
            PlanError: The checkpoint belongs to other entries or another policy, or is newer than this version.
        """
        self._position.load(state)
