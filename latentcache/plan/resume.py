"""Positions in training: what was delivered, what is left, and how training goes on, also with other sizes.

Guarantee: only delivered batches count. With the same rows per step the rest of an epoch is exactly the rest of its
plan, however ranks divide a step. With other sizes the samples that are left are laid out as an epoch of their own.
Nothing is repeated or dropped that the old sizes would have needed to fill their steps. A state is a few plain
values, the same on every rank; a state of other samples raises an error. Cost: that of planning the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index as as_index
from typing import Any

import numpy as np

from latentcache.errors import EmptyPlanError, PlanError
from latentcache.plan.batching import BatchPlan, require_steps
from latentcache.plan.samples import EpochPlan, SampleIndex, plan_epoch, plan_report

STATE_VERSION = 1
_ANOTHER = "resume with another checkpoint, or start the epoch again with set_epoch"
Leg = tuple[BatchPlan, int]
"""Sizes of batches, and the steps of an epoch that were served with these."""


def rest_of_epoch(index: SampleIndex, legs: Sequence[Leg], *, seed: int | None, epoch: int) -> EpochPlan:
    """The rest of an epoch, in steps of the sizes of the last leg; all legs have one policy."""
    plan, begin, served = None, 0, np.empty(0, dtype=np.int32)
    layout: tuple[object, ...] = ()
    for batches, steps in legs:
        if plan is None:
            plan = plan_epoch(index, batches, seed=seed, epoch=epoch)
        elif batches.layout != layout and begin < len(plan):
            served = np.concatenate([served, plan.part(0, begin).real()])
            plan, begin = plan_epoch(index, batches, seed=seed, epoch=epoch, served=served), 0
            if not len(plan) and batches.remainder == "drop":  # else all that was due is served
                raise EmptyPlanError(
                    f"the rest of epoch {epoch} fills no batch of size {batches.words}",
                    why=f"remainder='drop' leaves out samples that fill no step of {batches.world_size} ranks",
                    fix=f"resume with a smaller batch_size, or go on with the next epoch: set_epoch({epoch + 1})",
                )
        plan, layout, begin = replace(plan, world_size=batches.world_size), batches.layout, begin + steps
        if begin > len(plan):
            raise PlanError(
                "this checkpoint's position counts more batches than its epoch has",
                why=f"{steps} steps of {batches.words} x {batches.world_size} ranks, of {len(plan) - begin + steps}",
                fix=_ANOTHER,
                slug="resume-mismatch",
            )
    assert plan is not None  # there is a leg
    return replace(plan.part(begin, len(plan)), before=sum(steps for _, steps in legs))


@dataclass(slots=True)
class Position:
    """Position of one iteration. The next one has its own, so one that goes on beside it counts for nothing."""

    seed: int | None
    epoch: int = 0
    earlier: tuple[Leg, ...] = ()
    """Steps of this epoch that were delivered with other sizes."""
    delivered: int = 0
    """Steps of this epoch that were delivered with the sizes in use."""
    is_loaded: bool = False
    """True until an iteration goes on from here."""


class Epochs:
    """All epochs of the samples of an index; EmptyPlanError if they have no step."""

    def __init__(self, index: SampleIndex, batches: BatchPlan) -> None:
        self._index, self.report = index, require_steps(plan_report(index, batches))

    def begin(self, position: Position) -> tuple[Position, EpochPlan]:
        """The position of a new iteration, and what it serves: the rest of a loaded epoch, else the whole epoch."""
        begun = replace(position, is_loaded=False)
        if not position.is_loaded:
            begun = Position(position.seed, position.epoch)
        return begun, self._rest(begun)

    def remaining(self, position: Position) -> int:
        """Batches of one rank that are left of the epoch."""
        return len(self._rest(position)) if position.earlier else self.report.steps - position.delivered

    def state(self, position: Position) -> dict[str, Any]:
        """For a checkpoint: plain values, the same on every rank."""
        head = {"version": STATE_VERSION, "seed": position.seed, "epoch": position.epoch}
        legs = [[_size_state(batches), batches.world_size, steps] for batches, steps in self._legs(position)]
        return {**head, "legs": legs, "snapshot": self._index.snapshot, **self._identity()}

    def load(self, state: Mapping[str, Any]) -> Position:
        """The position of a checkpoint; batch size and number of ranks may differ from those of the checkpoint.

        A checkpoint at the end of an epoch gives the beginning of the next one.
        """
        try:
            if state["version"] != STATE_VERSION:
                raise ValueError(f"version {state['version']!r}; this version of latentcache reads {STATE_VERSION}")
            seed = None if state["seed"] is None else as_index(state["seed"])
            epoch = as_index(state["epoch"])
            legs = [
                (self._sizes(size, as_index(world_size)), as_index(steps))
                for size, world_size, steps in state["legs"]
            ]
            if epoch < 0 or not legs or min(steps for _, steps in legs) < 0:
                raise ValueError(f"epoch {epoch} with the legs {legs}")
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                "this checkpoint's position cannot be read",
                why=f"{type(error).__name__}: {error}",
                fix=_ANOTHER,
                slug="resume-version",
            ) from error
        for name, now in self._identity().items():
            if state.get(name) != now:
                raise PlanError(
                    "this checkpoint belongs to another cache, to other contents of it, or to other settings",
                    where=f"snapshot {state.get('snapshot')} then, {self._index.snapshot} now",
                    why=f"{name}: expected {state.get(name)}, found {now}",
                    fix="resume with the settings and the snapshot of the checkpoint:"
                    f" open_cache(..., snapshot={state.get('snapshot')}), or start the epoch again with set_epoch",
                    slug="resume-mismatch",
                )
        batches, delivered = self.report.batches, 0
        earlier = tuple(leg for leg in legs if leg[1])
        if earlier and earlier[-1][0] == batches:
            *before, (_, delivered) = earlier
            earlier = tuple(before)
        position = Position(seed, epoch, earlier, delivered, is_loaded=True)
        if earlier or self.remaining(position) < 0:
            self._rest(position)  # raises an error if the state does not fit
        return position if self.remaining(position) else Position(seed, epoch + 1)

    def _legs(self, position: Position) -> tuple[Leg, ...]:
        """Return the legs of an epoch that were delivered; the last leg has the sizes in use."""
        return (*position.earlier, (self.report.batches, position.delivered))

    def _sizes(self, size: Any, world_size: int) -> BatchPlan:
        """The sizes of a checkpoint; raises an error if they are none."""
        sizes = size if isinstance(size, dict) else {"batch_size": size}
        return BatchPlan(**sizes, world_size=world_size, remainder=self.report.batches.remainder)

    def _rest(self, position: Position) -> EpochPlan:
        return rest_of_epoch(self._index, self._legs(position), seed=position.seed, epoch=position.epoch)

    def _identity(self) -> dict[str, Any]:
        """Return the values that a checkpoint must agree with."""
        mixture = self.report.mixture
        sources = [[source.entries, source.samples] for source in mixture.sources] if mixture else None
        blocks = self._index.blocks
        return {
            "plan_id": self._index.identity,
            "remainder": self.report.batches.remainder,
            "weights": sources,
            "shuffle_block": None if blocks is None else blocks.identity,
        }


def _size_state(batches: BatchPlan) -> Any:
    """The size of a batch as plain values: a number, a list of numbers, or a budget with its argument's name."""
    if batches.batch_size is not None:
        return list(batches.batch_size) if isinstance(batches.batch_size, tuple) else batches.batch_size
    unit, budget = batches.budget
    return {f"batch_{unit}": budget, "multiple_of": batches.multiple_of}
