"""Where an epoch stands, and what is left of it when training goes on, also with other batch or world sizes.

Decides resume. Guarantee: with the same sizes the rest of the epoch is exactly the rest of the plan; with other
sizes what the epoch still owes is served, in the same global order, cut into steps of the new size: what the old
sizes would have repeated or dropped to fill their steps is neither. A cursor is a few integers; nothing is drained
or replayed. Cost: that of planning the epoch, and a sort of its rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import PlanError
from latentcache.geometry.sizes import Size
from latentcache.plan.batches import MAX_STEP, BatchPlan, plan_report
from latentcache.plan.epoch import EpochPlan, due, interleave, plan_epoch, step_sizes
from latentcache.plan.fill import filled, real
from latentcache.plan.lengths import merged_upward
from latentcache.plan.shuffle import by_bucket
from latentcache.plan.weights import Mixture

CURSOR_VERSION = 1
#: With weights. Before 2 the order followed from the place of a data set among the others, not from its name.
MIXED_VERSION = 2

_ANOTHER = "resume with another checkpoint, or start the epoch again with set_epoch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A stretch of an epoch that was served with one batch size and one number of ranks."""

    batch_size: int
    world_size: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in training: the same for every rank."""

    seed: int
    epoch: int
    small_buckets: str
    legs: tuple[Leg, ...]
    """What was served of this epoch; the last leg has the sizes in use."""

    @property
    def steps(self) -> int:
        """Steps of this epoch that were delivered."""
        return sum(leg.steps for leg in self.legs)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        legs = [[leg.batch_size, leg.world_size, leg.steps] for leg in self.legs]
        facts = {"seed": self.seed, "epoch": self.epoch, "small_buckets": self.small_buckets}
        return {"version": CURSOR_VERSION, **facts, "legs": legs}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cursor:
        """Inverse of :meth:`as_json`.

        Raises:
            PlanError: Written by a newer version, or no cursor.
        """
        found = data if isinstance(data, Mapping) else {}
        weighted = found.get("datasets") is not None
        known, version = MIXED_VERSION if weighted else CURSOR_VERSION, found.get("version")
        if version != known:
            raise PlanError(
                f"this checkpoint's position has version {version!r}",
                why=f"this version of latentcache reads version {known} of one {'with' if weighted else 'without'}"
                " weights of data sets",
                fix="resume with the version that wrote it, or start the epoch again",
                slug="resume-version",
            )
        try:
            legs = tuple(_leg(*leg) for leg in data["legs"])
            seed, epoch = index(data["seed"]), index(data["epoch"])
            policy = str(data["small_buckets"])
        except KeyError as error:
            raise unreadable(f"{error} is missing") from error
        except (TypeError, ValueError) as error:
            raise unreadable(str(error)) from error
        if epoch < 0:
            raise unreadable(f"epoch {epoch}, where epochs count from 0")
        if not legs:
            raise unreadable("legs is empty, where the last one names the sizes in use")
        return cls(seed=seed, epoch=epoch, small_buckets=policy, legs=legs)


def unreadable(why: str) -> PlanError:
    """A checkpoint's position that is none."""
    return PlanError("this checkpoint's position cannot be read", why=why, fix=_ANOTHER, slug="resume-version")


def _leg(batch_size: Any, world_size: Any, steps: Any) -> Leg:
    """A leg as it was saved.

    Raises:
        TypeError: No whole numbers.
        ValueError: No sizes, or fewer steps than none.
    """
    leg = Leg(batch_size=index(batch_size), world_size=index(world_size), steps=index(steps))
    if leg.steps < 0 or min(leg.batch_size, leg.world_size) < 1 or leg.batch_size * leg.world_size > MAX_STEP:
        raise ValueError(f"leg {[leg.batch_size, leg.world_size, leg.steps]} of batch size, world size and steps")
    return leg


def rest_of_epoch(
    bucket: NDArray[np.integer],
    sizes: Sequence[Size],
    cursor: Cursor,
    batches: BatchPlan,
    mixture: Mixture | None = None,
    *,
    upward: bool = False,
) -> EpochPlan:
    """What is left of an epoch, in steps of ``batches``; the arguments are those of :func:`walked`.

    Raises:
        PlanError: The cursor counts steps that the epoch does not have.
    """
    left = walked(bucket, sizes, cursor, batches, mixture, upward=upward).left
    same = _sizes_of(cursor.legs[-1], batches) == batches
    return left if same else recut(left.rows, bucket, sizes, batches, upward=upward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What a cursor has behind it and before it."""

    served: NDArray[np.integer]
    """Entries in the order they were served, on all ranks."""
    left: EpochPlan
    """In steps where the last sizes are those to go on with, else in no steps yet; nothing of an epoch that was
    served to its end with its last sizes."""


def walked(
    bucket: NDArray[np.integer],
    sizes: Sequence[Size],
    cursor: Cursor,
    batches: BatchPlan,
    mixture: Mixture | None = None,
    *,
    upward: bool = False,
) -> Walk:
    """What was served of an epoch, and what is left of it.

    Args:
        bucket: (N,) bucket of every entry, as a position in ``sizes``.
        sizes: The buckets.
        cursor: What was served, and with which sizes.
        batches: The sizes to go on with.
        mixture: How often each data set is served, as it was from the start.
        upward: Whether what fills no step of its bucket goes with the next ones, where sizes change.

    Raises:
        PlanError: The cursor counts steps that the epoch does not have.
    """
    report = plan_report(bucket, sizes, _sizes_of(cursor.legs[0], batches), mixture)
    plan = plan_epoch(bucket, report, seed=cursor.seed, epoch=cursor.epoch)
    served, last = plan.rows[:0], report.batches

    def owed() -> EpochPlan:
        return still_owed(plan, served, due(bucket, report, seed=cursor.seed, epoch=cursor.epoch))

    for leg in cursor.legs:
        used = _sizes_of(leg, batches)
        if used != last:
            plan, last = recut(owed().rows, bucket, sizes, used, upward=upward), used
        require_served(leg, len(plan))
        served = np.concatenate([served, plan.rows[: plan.starts[leg.steps]]])
        plan = after(plan, leg.steps)
    return Walk(served=served, left=plan if last == batches else owed())


def still_owed(plan: EpochPlan, served: NDArray[np.integer], due: NDArray[np.integer]) -> EpochPlan:
    """Entries that an epoch owes after so much of it, as one stretch without steps.

    Args:
        plan: The steps that are left.
        served: The entries that were served.
        due: (N,) how often the epoch serves each.
    """
    if not len(plan):
        return plan
    owed = np.maximum(due - np.bincount(real(served), minlength=len(due)), 0)
    coming = real(plan.rows)
    order = np.argsort(coming, kind="stable")
    ordered = coming[order]
    times = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)  # how often it came before, in this rest
    kept = coming[np.sort(order[times < owed[ordered]])]
    missing = np.repeat(np.arange(len(due), dtype=np.int32), owed - np.bincount(kept, minlength=len(due)))
    rows = np.concatenate([kept, missing]).astype(np.int32, copy=False)
    return EpochPlan(rows=rows, starts=np.array([0, len(rows)], dtype=np.int64), world_size=1)


def _sizes_of(leg: Leg, batches: BatchPlan) -> BatchPlan:
    """What a leg was served with; the policy is one for the epoch."""
    return replace(batches, batch_size=leg.batch_size, world_size=leg.world_size)


def require_served(leg: Leg, steps: int) -> None:
    """Refuse a leg that is longer than what there was to serve.

    Raises:
        PlanError: It counts more than so many steps.
    """
    if leg.steps > steps:
        raise PlanError(
            "this checkpoint's position counts more batches than its epoch has",
            why=f"{leg.steps} steps of batch size {leg.batch_size} and world size {leg.world_size}, of {steps}",
            fix=_ANOTHER,
            slug="resume-mismatch",
        )


def after(plan: EpochPlan, steps: int) -> EpochPlan:
    """The plan without its first steps."""
    start = int(plan.starts[steps])
    return EpochPlan(rows=plan.rows[start:], starts=plan.starts[steps:] - start, world_size=plan.world_size)


def recut(
    rows: NDArray[np.integer],
    bucket: NDArray[np.integer],
    sizes: Sequence[Size],
    batches: BatchPlan,
    *,
    upward: bool = False,
) -> EpochPlan:
    """Entries in steps, in the order they come in; ``upward`` as in :func:`walked`."""
    own = bucket[rows]
    if upward:
        own = merged_upward(own, range(len(sizes)), batches.global_batch_size)
    report = plan_report(own, sizes, batches)
    grouped = by_bucket(own, len(sizes))
    pieces, lengths, begins, start = [rows[:0]], [np.empty(0, dtype=np.int64)], [grouped[:0]], 0
    for part in report.buckets:
        positions = grouped[start : start + part.samples]
        start += part.samples
        cut = step_sizes(part, batches)
        lengths.append(cut)
        pieces.append(filled(rows[positions], int(cut.sum()), batches))
        begins.append(positions[np.concatenate(([0], np.cumsum(cut)))[:-1]])
    order = np.argsort(np.concatenate(begins), kind="stable")  # by where the first entry of each step stood
    return interleave(np.concatenate(pieces), np.concatenate(lengths), order, batches.world_size)
