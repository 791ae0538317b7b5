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

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.batching import (
    MAX_COPIES,
    BatchPlan,
    Bucket,
    BucketPlan,
    PlanReport,
    count_steps,
    rows_of_last_steps,
)
from latentcache.plan.length_buckets import merged_upward
from latentcache.plan.mixing import Mixture, mixed_order, occurrences
from latentcache.plan.shuffle import grouped, shuffled, visit
from latentcache.value import Value

Ints = NDArray[np.integer]
#: Samples that a message names.
_NAMED = 3
_NO_ROWS = np.empty(0, dtype=np.int32)
_NO_STEPS = np.empty(0, dtype=np.int64)


class SampleIndex(Value, eq=False):
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
    """Names of samples, for messages."""
    snapshot: int = 0
    """Number of the snapshot, for messages."""

    def served_at(self, global_batch: int) -> NDArray[np.int32]:
        """(N,) bucket at which epochs with this many rows in a step serve each: rows move to longer lengths."""
        if self.lengths is None:
            return self.bucket
        return merged_upward(self.lengths, [bucket.dims["length"] for bucket in self.buckets], global_batch)


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The samples of one rank in one step."""

    rows: Ints
    """(B,)"""
    is_pad: NDArray[np.bool_] | None
    """(B,) padding rows; None: there are none."""
    bucket: int


class EpochPlan(Value, eq=False):
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


def plan_report(index: SampleIndex, batches: BatchPlan) -> PlanReport:
    """What an epoch does, bucket by bucket."""
    report = count_steps(index.served_at(batches.global_batch_size), index.buckets, batches, index.mixture)
    found = sorted((one for one in report.buckets if one.copies > MAX_COPIES), key=lambda one: -one.copies)
    return replace(report, overfilled=tuple(_overfilled(index, one) for one in found))


def _overfilled(index: SampleIndex, plan: BucketPlan) -> str:
    """That a bucket is mostly repeats, with its first samples."""
    held = np.flatnonzero(index.bucket == index.buckets.index(plan.bucket))[:_NAMED]
    more = ", ..." if plan.samples > _NAMED else ""
    named = f" ({', '.join(index.names_of(held))}{more})" if index.names_of is not None else ""
    return (
        f"bucket {plan.bucket} has {plan.samples} sample{'s' * (plan.samples != 1)}{named} and repeats"
        f" {'them' if plan.samples > 1 else 'it'} {plan.copies} times in an epoch to fill a batch"
    )


def plan_epoch(index: SampleIndex, batches: BatchPlan, *, seed: int, epoch: int) -> EpochPlan:
    """Lay out one epoch."""
    bucket = index.served_at(batches.global_batch_size)
    return with_buckets(lay_out(index, bucket, batches, seed=seed, epoch=epoch), index, bucket)


def with_buckets(plan: EpochPlan, index: SampleIndex, bucket: Ints) -> EpochPlan:
    """The plan, each step with the bucket of its longest row."""
    starts = plan.starts[:-1]
    if not len(plan) or index.lengths is None:
        return replace(plan, bucket=bucket[plan.rows[starts]].astype(np.int32))
    return replace(plan, bucket=np.maximum.reduceat(bucket[plan.rows], starts).astype(np.int32))


def lay_out(index: SampleIndex, bucket: Ints, batches: BatchPlan, *, seed: int, epoch: int) -> EpochPlan:
    """The steps of an epoch that serves samples at these buckets (N,)."""
    report = count_steps(bucket, index.buckets, batches, index.mixture)
    if index.mixture is not None:
        return _mixed(bucket, index.mixture, report, seed, epoch)
    held = np.bincount(bucket)
    order = grouped(shuffled(len(bucket), seed, epoch, stream=0), bucket, len(held))
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


def due(index: SampleIndex, bucket: Ints, *, seed: int, epoch: int) -> NDArray[np.int32]:
    """(N,) how often an epoch serves each sample before the policy for incomplete batches."""
    if index.mixture is None:
        return np.ones(len(index.bucket), dtype=np.int32)
    return occurrences(bucket, index.mixture, seed=seed, epoch=epoch)


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
