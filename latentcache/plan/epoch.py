"""The order of one epoch, as arithmetic: the same inputs give the same plan on any machine and any rank.

Decides which entries make which batch. Guarantee: every step has one bucket; all ranks see the same step
sequence; the order depends on (seed, epoch) and the entries, not on worker counts or library versions. With a
mixture of data sets an entry is served as often as that says, before the policy for short buckets, and in an order
that one more data set leaves as it is (``plan.mixed``).
Cost: a sort of N 64-bit numbers and one of N 16-bit numbers; those of ``weights`` where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.batches import BatchPlan, BucketPlan, PlanReport
from latentcache.plan.fill import filled, real
from latentcache.plan.mixed import mixed_turns
from latentcache.plan.shuffle import grouped, shuffled, visit
from latentcache.plan.weights import servings

_NO_ROWS = np.empty(0, dtype=np.int32)
_NO_STEPS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """Every batch of one epoch."""

    rows: NDArray[np.integer]
    """Entries in the order they are served: step after step, within a step rank after rank. Below 0 is ``~entry``: a
    row that only fills (``small_buckets="mask"``)."""
    starts: NDArray[np.int64]
    """(steps + 1,) where each step begins in ``rows``."""
    world_size: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, step: int, rank: int = 0) -> NDArray[np.integer]:
        """Entries of one rank in one step."""
        start, end = int(self.starts[step]), int(self.starts[step + 1])
        share = (end - start) // self.world_size
        return self.rows[start + rank * share : start + (rank + 1) * share]


def plan_epoch(bucket: NDArray[np.integer], report: PlanReport, *, seed: int, epoch: int) -> EpochPlan:
    """Lay out one epoch.

    Args:
        bucket: (N,) bucket of every entry, as given to ``plan_report``.
        report: How many steps each bucket has.
        seed: Changes the order of all epochs.
        epoch: Number of the epoch, from 0.
    """
    if report.mixture is not None:
        return _mixed_epoch(bucket, report, seed, epoch)
    held = np.bincount(bucket)
    order = grouped(shuffled(len(bucket), seed, epoch, stream=0), bucket, len(held))
    pieces: list[NDArray[np.integer]] = [_NO_ROWS]
    lengths = [_NO_STEPS]
    for plan, turns in zip(report.buckets, np.split(order, np.cumsum(held[held > 0]))[:-1], strict=True):
        lengths.append(step_sizes(plan, report.batches))
        pieces.append(filled(turns, int(lengths[-1].sum()), report.batches))
    steps = shuffled(report.steps, seed, epoch, stream=1)
    return interleave(np.concatenate(pieces), np.concatenate(lengths), steps, report.batches.world_size)


def due(bucket: NDArray[np.integer], report: PlanReport, *, seed: int, epoch: int) -> NDArray[np.int32]:
    """(N,) how often an epoch serves each entry before the policy for short buckets."""
    if report.mixture is None:
        return np.ones(len(bucket), dtype=np.int32)
    return servings(bucket, report.mixture, seed=seed, epoch=epoch)


def uneven(plan: EpochPlan, expected: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The entries that the epoch serves more often than is due, and those that it serves less often.

    Args:
        plan: The epoch.
        expected: (N,) how often each entry is due.
    """
    served = np.bincount(real(plan.rows), minlength=len(expected))
    return np.flatnonzero(served > expected), np.flatnonzero(served < expected)


def _mixed_epoch(bucket: NDArray[np.integer], report: PlanReport, seed: int, epoch: int) -> EpochPlan:
    """An epoch with weights: each step comes when the first of its servings does."""
    assert report.mixture is not None
    times, batches = due(bucket, report, seed=seed, epoch=epoch), report.batches
    pieces: list[NDArray[np.integer]] = [_NO_ROWS]
    lengths, firsts = [_NO_STEPS], [_NO_STEPS]
    turns = mixed_turns(bucket, report.mixture, times, seed=seed, epoch=epoch)
    for plan, own in zip(report.buckets, turns, strict=True):
        sizes = step_sizes(plan, batches)
        total = int(sizes.sum())
        missing = 0 if batches.small_buckets == "mask" else total - len(own.rows)
        spare = _some(own.spare, missing, seed, epoch)
        lengths.append(sizes)
        pieces.append(filled(np.concatenate([own.rows, spare]), total, batches))
        begins = np.cumsum(sizes) - sizes
        firsts.append(np.append(own.places, np.full(total, report.mixture.samples))[begins])
    steps = np.argsort(np.concatenate(firsts), kind="stable")
    return interleave(np.concatenate(pieces), np.concatenate(lengths), steps, batches.world_size)


def _some(rows: NDArray[np.int32], wanted: int, seed: int, epoch: int) -> NDArray[np.int32]:
    """Up to so many of the rows, other ones in every epoch: what fills a step before anything comes twice."""
    if wanted <= 0 or not len(rows):
        return rows[:0]
    start, stride = visit(len(rows), seed, epoch, int(rows[0]))
    return rows[(start + stride * np.arange(min(wanted, len(rows)), dtype=np.int64)) % len(rows)]


NamesOf = Callable[[NDArray[np.int64]], Sequence[str]]


class FirstEpochNames:
    """``batches.UnevenNames`` of the first epoch of a seed. Picklable where ``names_of`` is."""

    def __init__(self, report: PlanReport, bucket: NDArray[np.integer], names_of: NamesOf, seed: int) -> None:
        self._report, self._bucket, self._names_of, self._seed = report, bucket, names_of, seed

    @property
    def repeated(self) -> tuple[str, ...]:
        """Those it serves more often than is due."""
        return self._both[0]

    @property
    def dropped(self) -> tuple[str, ...]:
        """Those it serves less often than is due."""
        return self._both[1]

    @cached_property
    def _both(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        plan = plan_epoch(self._bucket, self._report, seed=self._seed, epoch=0)
        more, fewer = uneven(plan, due(self._bucket, self._report, seed=self._seed, epoch=0))
        return tuple(self._names_of(more)), tuple(self._names_of(fewer))


def with_names(report: PlanReport, bucket: NDArray[np.integer], names_of: NamesOf, *, seed: int = 0) -> PlanReport:
    """The report with the samples that the first epoch of a seed repeats or leaves out; later epochs choose others.

    They are found when they are first asked for: that costs what planning an epoch costs.

    Args:
        report: Of ``plan_report``.
        bucket: (N,) bucket of every entry, as given to ``plan_report``.
        names_of: The samples of these entries.
        seed: Of the order.
    """
    if not (report.samples_repeated or report.samples_dropped):
        return report
    return replace(report, names=FirstEpochNames(report, bucket, names_of, seed))


def step_sizes(plan: BucketPlan, batches: BatchPlan) -> NDArray[np.int64]:
    """(steps,) samples of all ranks in each step of one bucket."""
    sizes = np.full(plan.steps, batches.global_batch_size, dtype=np.int64)
    if plan.steps:
        sizes[-1] = plan.last * batches.world_size
    return sizes


def interleave(
    rows: NDArray[np.integer], lengths: NDArray[np.int64], order: NDArray[np.integer], world_size: int
) -> EpochPlan:
    """Put steps in another order.

    Args:
        rows: Entries, step after step.
        lengths: (steps,) entries in each step.
        order: (steps,) which step comes first, second, ...
        world_size: Ranks that share a step.
    """
    begins = np.concatenate(([0], np.cumsum(lengths)))[:-1]
    shuffled = lengths[order]
    starts = np.concatenate(([0], np.cumsum(shuffled))).astype(np.int64)
    if len(lengths) and (lengths == lengths[0]).all():  # a fifth of the time of the general way
        return EpochPlan(rows=rows.reshape(len(lengths), -1)[order].reshape(-1), starts=starts, world_size=world_size)
    within = np.arange(int(starts[-1]), dtype=np.int64) - np.repeat(starts[:-1], shuffled)
    return EpochPlan(rows=rows[np.repeat(begins[order], shuffled) + within], starts=starts, world_size=world_size)
