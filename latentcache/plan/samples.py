"""What is served, and the order of one epoch of it, as arithmetic: the same inputs give the same plan everywhere.

Guarantee: every step has one bucket; all ranks see the same steps; the order depends on (seed, epoch) and the
samples, not on worker counts or library versions. With a mixture a sample is served as often as that says, in an
order that another source does not change (``plan.mixing``). Rank ``r`` of ``W`` takes rows ``r, r + W, ...`` of a
step, so two layouts with the same rows per step have the same global batches. Cost: a sort of N 64-bit and one of N
16-bit numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.batching import (
    MAX_COPIES,
    BatchPlan,
    Bucket,
    BucketPlan,
    Overfilled,
    PlanReport,
    count_steps,
    rows_of_last_steps,
)
from latentcache.plan.length_buckets import fitting, merged_upward
from latentcache.plan.mixing import Mixture, mixed_order, occurrences
from latentcache.plan.shuffle import grouped, shuffled, visit

Ints = NDArray[np.integer]
#: Samples that a message names.
_NAMED = 5
_NO_ROWS = np.empty(0, dtype=np.int32)
_NO_STEPS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleIndex:
    """The N samples (or rows of tokens) that a loader serves: all that a plan needs to know of them."""

    bucket: NDArray[np.int32]
    """(N,) bucket of each, as a position in :attr:`buckets`; with :attr:`lengths` the smallest that holds the row."""
    buckets: tuple[Bucket, ...]
    identify: Callable[[], str]
    """Gives the name of these samples and buckets, which a checkpoint must agree with; asked for once."""
    mixture: Mixture | None = None
    lengths: Ints | None = None
    """(N,) tokens of each row if there are several allowed lengths: a row may then be served at a longer one."""
    names_of: Callable[[Ints], Sequence[str]] | None = None
    """Names of samples, for reports."""
    snapshot: int = 0
    """Number of the snapshot, for messages."""

    def space(self, seed: int, epoch: int, global_batch: int) -> Space:
        """What an epoch deals out: the samples, or their occurrences at the lengths of this epoch."""
        if self.lengths is None:
            return Space(bucket=self.bucket, row=None, mixture=self.mixture)
        allowed = [bucket.dims["length"] for bucket in self.buckets]
        row = np.arange(len(self.lengths), dtype=np.int32)
        if self.mixture is not None:
            row = np.repeat(row, occurrences(fitting(self.lengths, allowed), self.mixture, seed=seed, epoch=epoch))
        return Space(bucket=merged_upward(self.lengths[row], allowed, global_batch), row=row, mixture=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """What one epoch deals out. S samples or occurrences."""

    bucket: NDArray[np.int32]
    """(S,)"""
    row: NDArray[np.int32] | None
    """(S,) the sample that each is an occurrence of; None: they are the samples."""
    mixture: Mixture | None


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The samples of one rank in one step."""

    rows: Ints
    """(B,)"""
    is_pad: NDArray[np.bool_] | None
    """(B,) padding rows; None: there are none."""
    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochPlan:
    """Every batch of one epoch, or of the rest of one."""

    rows: Ints
    """(K,) samples, step after step."""
    starts: NDArray[np.int64]
    """(steps + 1,) where each step begins in :attr:`rows`."""
    world_size: int
    is_pad: NDArray[np.bool_] | None = None
    """(K,) padding rows: a real row again, which has no loss and counts as nothing."""
    bucket: NDArray[np.int32] | None = None
    """(steps,) bucket of each step."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, step: int, rank: int = 0) -> BatchRows:
        """The samples of one rank in one step."""
        part = slice(int(self.starts[step]) + rank, int(self.starts[step + 1]), self.world_size)
        is_pad = None if self.is_pad is None else self.is_pad[part]
        return BatchRows(self.rows[part], is_pad, -1 if self.bucket is None else int(self.bucket[step]))

    def real(self) -> Ints:
        """(n,) the samples that count, without padding."""
        return self.rows if self.is_pad is None else self.rows[~self.is_pad]

    def blank_batches(self) -> int:
        """Batches of one rank that hold padding rows only."""
        if self.is_pad is None:
            return 0
        real = np.add.reduceat((~self.is_pad).astype(np.int64), self.starts[:-1]) if len(self) else _NO_STEPS
        return int(np.maximum(self.world_size - real, 0).sum())


def plan_report(index: SampleIndex, batches: BatchPlan, *, seed: int = 0) -> PlanReport:
    """What an epoch does, bucket by bucket; names are those of epoch 0 and are found when they are asked for.

    Raises:
        PlanError: Under ``error``, a bucket does not divide into full batches.
    """
    space = index.space(seed, 0, batches.global_batch_size)
    report = replace(count_steps(space.bucket, index.buckets, batches, space.mixture), mixture=index.mixture)
    report = replace(report, overfilled=_overfilled(index, report))
    if index.names_of is None or not (report.samples_repeated or report.samples_dropped):
        return report
    return replace(report, names=FirstEpochNames(index, batches, seed))


def _overfilled(index: SampleIndex, report: PlanReport) -> tuple[Overfilled, ...]:
    """Buckets whose samples are repeated often to fill a batch, with the first names of each; worst first."""
    found = sorted((plan for plan in report.buckets if plan.copies > MAX_COPIES), key=lambda plan: -plan.copies)
    numbers = [index.buckets.index(plan.bucket) for plan in found]
    held = np.flatnonzero(np.isin(index.bucket, numbers)) if found and index.names_of is not None else _NO_ROWS
    names = [
        index.names_of(held[index.bucket[held] == number][:_NAMED]) if index.names_of is not None else ()
        for number in numbers
    ]
    return tuple(
        Overfilled(bucket=plan.bucket, samples=plan.samples, copies=plan.copies, names=tuple(dict.fromkeys(some)))
        for plan, some in zip(found, names, strict=True)
    )


def plan_epoch(index: SampleIndex, batches: BatchPlan, *, seed: int, epoch: int) -> EpochPlan:
    """Lay out one epoch.

    Args:
        index: The samples.
        batches: Batch size, ranks and policy.
        seed: Changes the order of all epochs.
        epoch: Number of the epoch, from 0.
    """
    space = index.space(seed, epoch, batches.global_batch_size)
    return finished(lay_out(space, index.buckets, batches, seed=seed, epoch=epoch), space, index.bucket)


def finished(plan: EpochPlan, space: Space, bucket: Ints) -> EpochPlan:
    """A plan over a space as a plan over samples; each step has the bucket of its longest row."""
    if not len(plan):
        return replace(plan, bucket=_NO_ROWS)
    if space.row is None:
        return replace(plan, bucket=bucket[plan.rows[plan.starts[:-1]]].astype(np.int32))
    longest = np.maximum.reduceat(space.bucket[plan.rows], plan.starts[:-1])
    return replace(plan, rows=space.row[plan.rows], bucket=longest.astype(np.int32))


def lay_out(space: Space, buckets: Sequence[Bucket], batches: BatchPlan, *, seed: int, epoch: int) -> EpochPlan:
    """The steps of an epoch over a space, without their buckets."""
    report = count_steps(space.bucket, buckets, batches, space.mixture)
    if space.mixture is not None:
        return _mixed(space.bucket, space.mixture, report, seed, epoch)
    held = np.bincount(space.bucket)
    order = grouped(shuffled(len(space.bucket), seed, epoch, stream=0), space.bucket, len(held))
    steps = Steps(batches)
    for plan, rows in zip(report.buckets, np.split(order, np.cumsum(held[held > 0]))[:-1], strict=True):
        steps.add(rows, step_sizes(plan, batches))
    return steps.ordered(shuffled(report.steps, seed, epoch, stream=1))


def times_counted(times: NDArray[np.integer] | None, samples: int) -> dict[int, int]:
    """How many samples an epoch serves how often: ``{1: 90, 10: 5}``; without ``times`` (n,) each is served once."""
    if times is None:
        return {1: samples}
    counts = np.bincount(times)
    return {number: int(counts[number]) for number in np.flatnonzero(counts).tolist()}


def due(space: Space, *, seed: int, epoch: int) -> NDArray[np.int32]:
    """(S,) how often an epoch serves each before the policy for incomplete batches."""
    if space.mixture is None:
        return np.ones(len(space.bucket), dtype=np.int32)
    return occurrences(space.bucket, space.mixture, seed=seed, epoch=epoch)


def _mixed(bucket: Ints, mix: Mixture, report: PlanReport, seed: int, epoch: int) -> EpochPlan:
    """An epoch with weights: each step comes when the first of its occurrences does."""
    batches, steps, firsts = report.batches, Steps(report.batches), [_NO_STEPS]
    times = occurrences(bucket, mix, seed=seed, epoch=epoch)
    for plan, own in zip(report.buckets, mixed_order(bucket, mix, times, seed=seed, epoch=epoch), strict=True):
        sizes = step_sizes(plan, batches)
        total = int(sizes.sum())
        missing = 0 if batches.remainder == "pad" else total - len(own.rows)
        steps.add(np.concatenate([own.rows, _some(own.spare, missing, seed, epoch)]), sizes)
        firsts.append(np.append(own.places, np.full(total, mix.samples))[np.cumsum(sizes) - sizes])
    return steps.ordered(np.argsort(np.concatenate(firsts), kind="stable"))


def _some(rows: NDArray[np.int32], wanted: int, seed: int, epoch: int) -> NDArray[np.int32]:
    """Up to ``wanted`` of the rows, other ones in every epoch: they fill a step before anything is repeated."""
    if wanted <= 0 or not len(rows):
        return rows[:0]
    start, stride = visit(len(rows), seed, epoch, int(rows[0]))
    return rows[(start + stride * np.arange(min(wanted, len(rows)), dtype=np.int64)) % len(rows)]


def step_sizes(plan: BucketPlan, batches: BatchPlan) -> NDArray[np.int64]:
    """(steps,) samples of all ranks in each step of one bucket."""
    sizes = np.full(plan.steps, batches.global_batch_size, dtype=np.int64)
    if plan.steps:
        sizes[-1] = plan.last * batches.world_size
    return sizes


class Steps:
    """Collects the steps of an epoch bucket by bucket, then puts them in order."""

    def __init__(self, batches: BatchPlan) -> None:
        self._batches = batches
        self._rows: list[Ints] = [_NO_ROWS]
        self._pads: list[NDArray[np.bool_]] = [np.empty(0, dtype=np.bool_)]
        self._sizes = [_NO_STEPS]

    def add(self, rows: Ints, sizes: NDArray[np.int64]) -> None:
        """Steps of one bucket: its rows in order, repeated from the front, cut or padded to fill the steps."""
        total = int(sizes.sum())
        if self._batches.remainder == "pad" and total > len(rows):
            filled, is_pad = _padded(rows, total, self._batches.global_batch_size)
        else:
            filled, is_pad = np.resize(rows, total), np.zeros(total, dtype=np.bool_)
        self._rows.append(filled)
        self._pads.append(is_pad)
        self._sizes.append(sizes)

    def ordered(self, order: Ints) -> EpochPlan:
        """The plan; ``order`` (steps,) says which step comes first, second, ..."""
        rows, is_pad, sizes = np.concatenate(self._rows), np.concatenate(self._pads), np.concatenate(self._sizes)
        starts = np.concatenate(([0], np.cumsum(sizes[order]))).astype(np.int64)
        if len(sizes) and (sizes == sizes[0]).all():  # a fifth of the time of the general way
            rows = rows.reshape(len(sizes), -1)[order].reshape(-1)
            is_pad = is_pad.reshape(len(sizes), -1)[order].reshape(-1)
        else:
            begins = np.cumsum(sizes) - sizes
            places = np.arange(int(starts[-1]), dtype=np.int64)
            places += np.repeat(begins[order] - starts[:-1], sizes[order])
            rows, is_pad = rows[places], is_pad[places]
        padded = is_pad if is_pad.any() else None
        return EpochPlan(rows=rows, starts=starts, world_size=self._batches.world_size, is_pad=padded)


def _padded(rows: Ints, total: int, size: int) -> tuple[Ints, NDArray[np.bool_]]:
    """The rows of a bucket and padding: the last two steps share the real rows, which come first in each."""
    last = rows_of_last_steps(len(rows), size)
    filled, is_pad = np.resize(rows, total), np.zeros(total, dtype=np.bool_)
    place, taken = total - size * len(last), len(rows) - sum(last)
    for real in last:
        filled[place : place + real] = rows[taken : taken + real]
        filled[place + real : place + size] = np.resize(rows, size - real)
        is_pad[place + real : place + size] = True
        place, taken = place + size, taken + real
    return filled, is_pad


class FirstEpochNames:
    """``batching.UnevenNames`` of epoch 0 of a seed. Picklable if ``names_of`` is."""

    def __init__(self, index: SampleIndex, batches: BatchPlan, seed: int) -> None:
        self._index, self._batches, self._seed = index, batches, seed

    @property
    def repeated(self) -> tuple[str, ...]:
        """Samples that it serves more often than due."""
        return self._both[0]

    @property
    def dropped(self) -> tuple[str, ...]:
        """Samples that it serves less often than due."""
        return self._both[1]

    @cached_property
    def _both(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        index, count = self._index, len(self._index.bucket)
        space = index.space(self._seed, 0, self._batches.global_batch_size)
        each = due(space, seed=self._seed, epoch=0)
        expected = each if space.row is None else np.bincount(space.row, minlength=count)
        served = plan_epoch(index, self._batches, seed=self._seed, epoch=0).real()
        times = np.bincount(served, minlength=count)
        names = index.names_of or (lambda rows: [str(row) for row in rows.tolist()])
        return tuple(names(np.flatnonzero(times > expected))), tuple(names(np.flatnonzero(times < expected)))
