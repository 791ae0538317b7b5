"""Positions in training: what was delivered, what is left, and how training goes on, also with other sizes.

Guarantee: only delivered batches count. With the same rows per step the rest of an epoch is exactly the rest of its
plan, however ranks divide a step; with other sizes what the epoch still has to serve is laid out as an epoch of its
own, and nothing is repeated or dropped that the old sizes would have needed to fill their steps. A state is a few
plain values, the same on every rank; a state of other samples is refused by name. Cost: that of planning the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index as as_index
from typing import Any

import numpy as np

from latentcache.errors import EmptyPlanError, PlanError
from latentcache.plan.batching import BatchPlan, PlanReport, Remainder
from latentcache.plan.samples import EpochPlan, SampleIndex, plan_epoch

STATE_VERSION = 1
_ANOTHER = "resume with another checkpoint, or start the epoch again with set_epoch"
Leg = tuple[int, int, int]
"""Batch size, number of ranks, and the steps of an epoch that were served with these."""


def rest_of_epoch(
    index: SampleIndex, legs: Sequence[Leg], remainder: Remainder, *, seed: int | None, epoch: int
) -> EpochPlan:
    """The rest of an epoch, in steps of the sizes of the last leg; all legs have one policy.

    Raises:
        PlanError: A leg has more steps than there were to serve.
        EmptyPlanError: Samples are left, and they do not fill a batch of this size.
    """
    plan, begin, served = None, 0, np.empty(0, dtype=np.int32)
    layout: tuple[int, ...] = ()
    for batch_size, world_size, steps in legs:
        batches = BatchPlan(batch_size=batch_size, world_size=world_size, remainder=remainder)
        if plan is None:
            plan = plan_epoch(index, batches, seed=seed, epoch=epoch)
        elif batches.layout != layout and begin < len(plan):
            served = np.concatenate([served, plan.part(0, begin).real()])
            plan, begin = plan_epoch(index, batches, seed=seed, epoch=epoch, served=served), 0
            if not len(plan):
                raise EmptyPlanError(
                    f"the rest of epoch {epoch} fills no batch of size {batch_size}",
                    why=f"remainder={remainder!r} leaves out what fills no step of {batches.global_batch_size}",
                    fix=f"resume with a smaller batch_size, or go on with the next epoch: set_epoch({epoch + 1})",
                )
        plan, layout, begin = replace(plan, world_size=world_size), batches.layout, begin + steps
        if begin > len(plan):
            raise PlanError(
                "this checkpoint's position counts more batches than its epoch has",
                why=f"{steps} steps of {batch_size} x {world_size} ranks, of {len(plan) - begin + steps}",
                fix=_ANOTHER,
                slug="resume-mismatch",
            )
    assert plan is not None  # there is a leg
    return plan.part(begin, len(plan))


class Position:
    """The place of one loader in one epoch.

    Args:
        index: What is served.
        report: The steps of an epoch.
        seed: Of the order; that of the checkpoint after :meth:`load`.
    """

    def __init__(self, index: SampleIndex, report: PlanReport, *, seed: int | None) -> None:
        self.attach(index, report)
        self.seed, self.epoch, self.iteration = seed, 0, 0
        self._before: tuple[Leg, ...] = ()  # of other sizes
        self._delivered, self._loaded, self._identity = 0, False, ""

    def attach(self, index: SampleIndex, report: PlanReport) -> None:
        """Go on over the same samples in another process."""
        self._index, self._report = index, report

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_index", "_report")}

    def copied(self) -> Position:
        """A place of its own that begins as this one."""
        other = Position.__new__(Position)
        vars(other).update(vars(self))
        return other

    @property
    def legs(self) -> tuple[Leg, ...]:
        """What was delivered of this epoch; the last leg has the sizes in use."""
        batches = self._report.batches
        return (*self._before, (batches.batch_size, batches.world_size, self._delivered))

    @property
    def steps(self) -> int:
        """Steps of this epoch that were delivered."""
        return sum(steps for *_, steps in self.legs)

    def go_to(self, seed: int | None, epoch: int) -> None:
        """Go to the start of an epoch of a seed."""
        self.seed, self.epoch, self._before, self._delivered, self._loaded = seed, epoch, (), 0, False
        self.iteration += 1

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the current epoch keeps its place (a trainer that resumes names it again)."""
        if epoch != self.epoch:
            self.go_to(self.seed, epoch)

    def begin(self) -> EpochPlan:
        """What the next iteration serves: the rest of a loaded epoch, once; else the whole epoch again.

        A loaded epoch that is complete is served again too, so an iteration is never empty.
        """
        if not self._loaded or not self.remaining():
            self.go_to(self.seed, self.epoch)
        self._loaded = False
        self.iteration += 1
        return self._rest()

    def advance(self, iteration: int) -> None:
        """One more batch was delivered by an iteration; nothing is counted if that iteration is over."""
        if iteration == self.iteration:
            self._delivered += 1

    def remaining(self) -> int:
        """Batches of this rank that are left of the epoch."""
        return len(self._rest()) if self._before else self._report.steps - self._delivered  # without planning it

    def _rest(self) -> EpochPlan:
        return rest_of_epoch(self._index, self.legs, self._report.batches.remainder, seed=self.seed, epoch=self.epoch)

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        self._identity = self._identity or self._index.identify()
        mixture = self._report.mixture
        sources = [[one.entries, one.samples] for one in mixture.sources] if mixture else None
        return {"plan_id": self._identity, "remainder": self._report.batches.remainder, "weights": sources}

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values, the same on every rank."""
        head = {"version": STATE_VERSION, "seed": self.seed, "epoch": self.epoch, "legs": list(map(list, self.legs))}
        return {**head, "snapshot": self._index.snapshot, **self._facts()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go where a checkpoint says; batch size and number of ranks may differ from those of the checkpoint.

        Raises:
            PlanError: The checkpoint belongs to other samples, another policy or other weights, is newer, or is
                broken.
            EmptyPlanError: Samples are left of its epoch, and they do not fill a batch of this size.
        """
        try:
            if state["version"] != STATE_VERSION:
                raise ValueError(f"version {state['version']!r}; this version of latentcache reads {STATE_VERSION}")
            seed = None if state["seed"] is None else as_index(state["seed"])
            epoch = as_index(state["epoch"])
            legs = [(as_index(size), as_index(ranks), as_index(steps)) for size, ranks, steps in state["legs"]]
            if epoch < 0 or not legs or min(map(min, legs)) < 0:
                raise ValueError(f"epoch {epoch} with the legs {legs}")
            for batch_size, world_size, _ in legs:
                BatchPlan(batch_size=batch_size, world_size=world_size)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                "this checkpoint's position cannot be read",
                why=f"{type(error).__name__}: {error}",
                fix=_ANOTHER,
                slug="resume-version",
            ) from error
        for name, now in self._facts().items():
            if state.get(name) != now:
                raise PlanError(
                    "this checkpoint belongs to another cache, to other contents of it, or to other settings",
                    where=f"snapshot {state.get('snapshot')} then, {self._index.snapshot} now",
                    why=f"{name}: expected {state.get(name)}, found {now}",
                    fix="resume with the cache and the settings of the checkpoint, or start the epoch again with"
                    " set_epoch",
                    slug="resume-mismatch",
                )
        batches, place = self._report.batches, self.copied()
        place.go_to(seed, epoch)
        place._loaded, place._before = True, tuple(leg for leg in legs if leg[2])
        if place._before and place._before[-1][:2] == (batches.batch_size, batches.world_size):
            *before, (_, _, place._delivered) = place._before
            place._before = tuple(before)
        if place._before or place.remaining() < 0:
            place._rest()  # refuses what does not fit
        vars(self).update(vars(place))
