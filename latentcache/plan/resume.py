"""Positions in training: what was delivered, what is left, and how training goes on, also with other sizes.

Guarantee: only delivered batches count. With the same rows per step the rest of an epoch is exactly the rest of its
plan, however ranks divide a step; with other sizes the rest of the samples is served in the same global order, cut
into steps of the new size, and nothing is repeated or dropped that the old sizes would have needed to fill their
steps. A state is a few plain values, the same on every rank; a state of other samples is refused by name. Cost: that
of planning the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import index as as_index
from typing import Any

import numpy as np

from latentcache.errors import EmptyPlanError, PlanError
from latentcache.plan.batching import BatchPlan, PlanReport, count_steps
from latentcache.plan.length_buckets import merged_upward
from latentcache.plan.samples import EpochPlan, Ints, SampleIndex, Steps, due, lay_out, step_sizes, with_buckets
from latentcache.plan.shuffle import by_bucket
from latentcache.value import Value

STATE_VERSION = 1
_ANOTHER = "resume with another checkpoint, or start the epoch again with set_epoch"


class Leg(Value):
    """Steps of an epoch that were served with one batch size and one number of ranks."""

    batches: BatchPlan
    steps: int


class Cursor(Value):
    """A position in training: the same for every rank."""

    seed: int
    epoch: int
    legs: tuple[Leg, ...]
    """What was served of this epoch; the last leg has the sizes in use. All have one policy."""

    @property
    def steps(self) -> int:
        """Steps of this epoch that were delivered."""
        return sum(leg.steps for leg in self.legs)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        legs = [[leg.batches.batch_size, leg.batches.world_size, leg.steps] for leg in self.legs]
        head = {"version": STATE_VERSION, "seed": self.seed, "epoch": self.epoch}
        return {**head, "remainder": self.legs[0].batches.remainder, "legs": legs}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cursor:
        """Inverse of :meth:`as_json`."""
        try:
            if data["version"] != STATE_VERSION:
                raise ValueError(f"version {data['version']!r}; this version of latentcache reads {STATE_VERSION}")
            seed, epoch = as_index(data["seed"]), as_index(data["epoch"])
            legs = tuple(_leg(leg, data["remainder"]) for leg in data["legs"])
            if epoch < 0 or not legs or min(leg.steps for leg in legs) < 0:
                raise ValueError(f"epoch {epoch} with the legs {data['legs']}")
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(f"{type(error).__name__}: {error}") from error
        return cls(seed=seed, epoch=epoch, legs=legs)


def _leg(saved: Iterable[Any], policy: Any) -> Leg:
    batch_size, world_size, steps = map(as_index, saved)
    return Leg(batches=BatchPlan(batch_size=batch_size, world_size=world_size, remainder=policy), steps=steps)


def _unreadable(why: str) -> PlanError:
    return PlanError("this checkpoint's position cannot be read", why=why, fix=_ANOTHER, slug="resume-version")


def rest_of_epoch(index: SampleIndex, cursor: Cursor, batches: BatchPlan) -> EpochPlan:
    """The rest of an epoch, in steps of ``batches``."""
    bucket = index.served_at(cursor.legs[0].batches.global_batch_size)
    left = _walk(index, bucket, cursor, batches)
    if cursor.legs[-1].batches.layout != batches.layout:
        left = _recut(left.rows, index, bucket, batches)
    return with_buckets(replace(left, world_size=batches.world_size), index, bucket)


def _walk(index: SampleIndex, bucket: Ints, cursor: Cursor, batches: BatchPlan) -> EpochPlan:
    """What a cursor has before it.

    In steps if the sizes of its last leg are those of ``batches``, else as one piece that holds all samples still
    due.
    """
    last = cursor.legs[0].batches
    plan = lay_out(index, bucket, last, seed=cursor.seed, epoch=cursor.epoch)
    expected = due(index, bucket, seed=cursor.seed, epoch=cursor.epoch)
    served: Ints = plan.rows[:0]
    for leg in cursor.legs:
        if leg.batches.layout != last.layout:
            last = leg.batches
            plan = _recut(_still_due(plan, served, expected).rows, index, bucket, last)
        _require_served(leg, len(plan))
        served = np.concatenate([served, _part(plan, 0, leg.steps).real()])
        plan = _part(plan, leg.steps, len(plan))
    return plan if last.layout == batches.layout else _still_due(plan, served, expected)


def _still_due(plan: EpochPlan, served: Ints, expected: Ints) -> EpochPlan:
    """Samples that an epoch still has to serve, in the order of the steps that are left, as one piece."""
    if not len(plan):
        return plan
    owed = np.maximum(expected - np.bincount(served, minlength=len(expected)), 0)
    coming = plan.real()
    order = np.argsort(coming, kind="stable")
    ordered = coming[order]
    times = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)  # how often it came before, in this rest
    kept = coming[np.sort(order[times < owed[ordered]])]
    missing = np.repeat(np.arange(len(expected), dtype=np.int32), owed - np.bincount(kept, minlength=len(expected)))
    rows = np.concatenate([kept, missing]).astype(np.int32, copy=False)
    return EpochPlan(rows=rows, starts=np.array([0, len(rows)], dtype=np.int64), world_size=1)


def _recut(rows: Ints, index: SampleIndex, bucket: Ints, batches: BatchPlan) -> EpochPlan:
    """Samples in steps of other sizes, in the order they come in."""
    own = bucket[rows]
    if index.lengths is not None:
        own = merged_upward(own, range(len(index.buckets)), batches.global_batch_size)
    report = count_steps(own, index.buckets, batches)
    by_own = by_bucket(own, len(index.buckets))
    steps, begins, start = Steps(batches), [by_own[:0]], 0
    for part in report.buckets:
        positions = by_own[start : start + part.samples]
        start += part.samples
        sizes = step_sizes(part, batches)
        steps.add(rows[positions], sizes)
        begins.append(positions[np.cumsum(sizes) - sizes])
    return steps.ordered(np.argsort(np.concatenate(begins), kind="stable"))  # by the first sample of each step


def _require_served(leg: Leg, steps: int) -> None:
    """Refuse a leg with more steps than there were to serve."""
    if leg.steps > steps:
        raise PlanError(
            "this checkpoint's position counts more batches than its epoch has",
            why=f"{leg.steps} steps of {leg.batches.batch_size} x {leg.batches.world_size} ranks, of {steps}",
            fix=_ANOTHER,
            slug="resume-mismatch",
        )


def _part(plan: EpochPlan, first: int, last: int) -> EpochPlan:
    """Some steps of a plan."""
    start, end = int(plan.starts[first]), int(plan.starts[last])
    is_pad = None if plan.is_pad is None else plan.is_pad[start:end]
    return replace(plan, rows=plan.rows[start:end], starts=plan.starts[first : last + 1] - start, is_pad=is_pad)


class Position:
    """The place of one loader in one epoch.

    Args:
        index: What is served.
        report: The steps of an epoch.
        seed: Of the order.
    """

    def __init__(self, index: SampleIndex, report: PlanReport, *, seed: int) -> None:
        self.attach(index, report)
        self._cursor = self._start(seed, 0)
        self._loaded = False
        self._identity = ""
        self._delivered = 0
        self.iteration = 0
        """Names the iteration whose batches count; another number after begin, another epoch or load."""

    @property
    def seed(self) -> int:
        """Of the order; that of the checkpoint after :meth:`load`."""
        return self._cursor.seed

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._cursor.epoch

    @property
    def steps(self) -> int:
        """Steps of this epoch that were delivered."""
        return self._cursor.steps + self._delivered

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the current epoch keeps its place (a trainer that resumes names it again)."""
        if epoch != self.epoch:
            self._move(self._start(self.seed, epoch), loaded=False)

    def begin(self) -> EpochPlan:
        """What the next iteration serves: the rest of a loaded epoch, once; else the whole epoch again.

        A loaded epoch that is complete is served again too, so an iteration is never empty.

        Raises:
            EmptyPlanError: Samples are left of the loaded epoch, and they do not fill a batch of this size.
        """
        cursor = self.cursor()
        if not self._loaded or self._is_complete(cursor):
            cursor = self._start(self.seed, self.epoch)
        plan = rest_of_epoch(self._index, cursor, self._report.batches)
        done = tuple(leg for leg in cursor.legs if leg.steps)
        if not done or done[-1].batches != self._report.batches:
            done = (*done, self._leg())
        self._move(replace(cursor, legs=done), loaded=False)
        return plan

    def copied(self) -> Position:
        """A place of its own that begins as this one."""
        other = Position.__new__(Position)
        vars(other).update(vars(self))
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_index", "_report")}

    def attach(self, index: SampleIndex, report: PlanReport) -> None:
        """Go on over the same samples in another process."""
        self._index, self._report = index, report

    def go_to(self, seed: int, epoch: int) -> None:
        """Go to the start of an epoch of a seed."""
        self._move(self._start(seed, epoch), loaded=False)

    def advance(self, iteration: int) -> None:
        """One more batch was delivered by an iteration; nothing is counted if that iteration is over."""
        if iteration == self.iteration:
            self._delivered += 1

    def remaining(self) -> int:
        """Batches of this rank that are left of the epoch."""
        cursor = self.cursor()
        if [leg.batches for leg in cursor.legs] == [self._report.batches]:
            return self._report.steps - cursor.steps  # without planning it
        return len(rest_of_epoch(self._index, cursor, self._report.batches))

    def cursor(self) -> Cursor:
        """The place, with what was delivered."""
        *before, last = self._cursor.legs
        return replace(self._cursor, legs=(*before, replace(last, steps=last.steps + self._delivered)))

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values, the same on every rank."""
        state = {**self.cursor().as_json(), "snapshot": self._index.snapshot, "plan_id": self._plan_id()}
        mixture = self._report.mixture
        return {**state, "sources": mixture.as_json()} if mixture else state

    def load(self, state: Mapping[str, Any]) -> None:
        """Go where a checkpoint says; batch size and number of ranks may differ from those of the checkpoint.

        Raises:
            PlanError: The checkpoint belongs to other samples, another policy or other weights, is newer, or is
                broken.
        """
        cursor = Cursor.from_json(state)
        self._refuse_other("samples", str(state.get("plan_id")), self._plan_id(), state)
        policy = cursor.legs[0].batches.remainder
        self._refuse_other("remainder", policy, self._report.batches.remainder, state, "another remainder=")
        mixture = self._report.mixture
        then, now = _spelled(state.get("sources")), _spelled(mixture.as_json() if mixture else None)
        self._refuse_other("occurrences", then, now, state, "other weights or names of its sources")
        cursor = replace(cursor, legs=tuple(leg for leg in cursor.legs if leg.steps) or (self._leg(),))
        if [leg.batches for leg in cursor.legs] == [self._report.batches]:
            _require_served(cursor.legs[0], self._report.steps)
        else:
            rest_of_epoch(self._index, cursor, self._report.batches)
        self._move(cursor, loaded=True)

    def _move(self, cursor: Cursor, *, loaded: bool) -> None:
        self._cursor, self._loaded, self._delivered = cursor, loaded, 0
        self.iteration += 1

    def _plan_id(self) -> str:
        self._identity = self._identity or self._index.identify()
        return self._identity

    def _start(self, seed: int, epoch: int) -> Cursor:
        return Cursor(seed=seed, epoch=epoch, legs=(self._leg(),))

    def _leg(self) -> Leg:
        return Leg(batches=self._report.batches, steps=0)

    def _is_complete(self, cursor: Cursor) -> bool:
        """True if a loaded epoch was served to its end."""
        if self.remaining():
            return False
        batches, index = self._report.batches, self._index
        if cursor.legs[-1].batches.layout == batches.layout:
            return True
        bucket = index.served_at(cursor.legs[0].batches.global_batch_size)
        left = bucket[_walk(index, bucket, cursor, batches).rows]
        if not len(left):
            return True
        raise EmptyPlanError(
            f"the rest of epoch {cursor.epoch} fills no batch of size {batches.batch_size}",
            where=f"{len(left)} samples left in the epoch",
            why=f"remainder={batches.remainder!r} leaves out what fills no step of {batches.global_batch_size}",
            fix=f"resume with a smaller batch_size, or go on with the next epoch: set_epoch({cursor.epoch + 1})",
        )

    def _refuse_other(
        self, name: str, expected: str, found: str, state: Mapping[str, Any], settings: str = ""
    ) -> None:
        if expected != found:
            made = f"was made with {settings}" if settings else "belongs to another cache, or to other contents of it"
            raise PlanError(
                f"this checkpoint {made}",
                where=f"snapshot {state.get('snapshot')} then, {self._index.snapshot} now",
                why=f"{name}: expected {expected}, found {found}",
                fix=f"resume with the {'settings' if settings else 'cache'} of the checkpoint, or start the epoch"
                " again with set_epoch",
                slug="resume-mismatch",
            )


def _spelled(sources: Any) -> str:
    """Sources of a mixture as text; an error if they cannot be read."""
    if sources is None:
        return "no weights"
    try:
        return ", ".join(f"{samples} samples of {entries} entries of {name}" for name, entries, samples in sources)
    except (TypeError, ValueError) as error:
        raise _unreadable(f"sources: {error}") from error
