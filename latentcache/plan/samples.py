"""Samples and their order in one epoch, as arithmetic: the same inputs give the same plan everywhere.

Guarantee: every step has one bucket. All ranks see the same steps. The order depends on (seed, epoch) and the
samples, not on worker counts or library versions. Rank ``r`` of ``W`` takes rows ``r, r + W, ...`` of a step. So two
layouts with equal rows per step have equal global batches. Cost: a shuffle of N numbers and a sort of N 16-bit ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError, count_of
from latentcache.identity.content import content_hash
from latentcache.plan.batching import (
    MAX_COPIES,
    BatchPlan,
    Bucket,
    BucketPlan,
    PlanReport,
    count_steps,
    rows_of_last_steps,
)
from latentcache.plan.documents import Ints, spread
from latentcache.plan.mixing import Mixture, occurrences
from latentcache.plan.shuffle import by_bucket, shuffled
from latentcache.value import Value

_NAMED = 3


class Blocks(Value, eq=False):
    """A shuffle of shards, then of the samples in each window: an epoch reads one window after the other."""

    shard: Ints
    """(N,) number of the shard that each sample is in."""
    samples: int
    """Samples of a window."""

    def order(self, drawn: Ints, seed: int | None, epoch: int) -> NDArray[np.int64]:
        """(K,) positions in ``drawn`` (K,), which are samples, in the order of an epoch."""
        shard = self.shard[drawn]
        position = np.empty(int(self.shard.max(initial=0)) + 1, dtype=np.int32)
        position[shuffled(len(position), seed, epoch, stream=4)] = np.arange(len(position), dtype=np.int32)
        by_shard = np.argsort(position[shard], kind="stable")
        mixed = shuffled(len(drawn), seed, epoch, stream=0)
        return by_shard[mixed[np.argsort(mixed // self.samples, kind="stable")]]

    @property
    def identity(self) -> list[int | str]:
        """What a checkpoint must agree with."""
        return [self.samples, content_hash(self.shard.astype(np.int32).tobytes()).hex()]


class SampleIndex(Value, eq=False):
    """The N samples (or rows of tokens) that a loader serves: all that a plan needs to know of them."""

    bucket: NDArray[np.int32]
    """(N,) bucket of each, as a position in :attr:`buckets`."""
    buckets: tuple[Bucket, ...]
    identify: Callable[[], str]
    """Gives :attr:`identity`."""
    mixture: Mixture | None = None
    parts: tuple[tuple[str, int], ...] = ()
    """Name and samples of each part, whose samples are together in this order."""
    names_of: Callable[[Ints], Sequence[str]] | None = None
    """Names of samples, for messages."""
    snapshot: int = 0
    """Number of the snapshot, for messages."""
    blocks: Blocks | None = None
    """None: all samples of an epoch are shuffled together."""

    @cached_property
    def identity(self) -> str:
        """The name of these samples and buckets, which a checkpoint must agree with."""
        return self.identify()

    def apart(self, batches: BatchPlan) -> SampleIndex:
        """These samples with buckets for each source alone, if every source has a batch size; else the same samples.

        Bucket ``number`` of source ``source`` has the position ``number + source * len(buckets)``.

        Raises:
            UsageError: There are other numbers of batch sizes and sources.
        """
        sizes, mixture = batches.batch_size, self.mixture
        if not isinstance(sizes, tuple):
            return self
        sources = self.parts if mixture is None else [(source.name, source.entries) for source in mixture.sources]
        if len(sizes) != len(sources):
            problem = f"{len(sizes)} values for {count_of(len(sources), 'sources')}"
            raise UsageError(problem, argument="batch_size", value=list(sizes), fix="give one number for each source")
        buckets, owner = list[Bucket](), np.repeat(np.arange(len(sources)), [entries for _, entries in sources])
        for number, (name, _) in enumerate(sources):
            buckets += [replace(bucket, label=f"{bucket} of {name}", source=number) for bucket in self.buckets]
        bucket = (self.bucket + owner * len(self.buckets)).astype(np.int32)
        return replace(self, bucket=bucket, buckets=tuple(buckets))


@dataclass(frozen=True, slots=True, eq=False)
class BatchIndex:
    """Everything that a worker has to know of one batch."""

    epoch: int
    step: int
    """Step of the epoch, from 0."""
    rows: Ints
    """(B,) samples, or rows of tokens."""
    bucket: int
    is_pad: NDArray[np.bool_] | None = None
    """(B,) padding rows; None: there are none."""
    seed: int = 0
    again: Ints | None = None
    """(B,) how often the epoch served each row before; None: never."""


class EpochPlan(Value, eq=False):
    """Every batch of one epoch, or of the rest of one."""

    rows: Ints
    """(K,) samples, step after step."""
    starts: NDArray[np.int64]
    """(steps + 1,) where each step begins in :attr:`rows`."""
    world_size: int
    is_pad: NDArray[np.bool_] | None = None
    """(K,) padding rows: a real row again, which has no loss and counts as nothing."""
    bucket: NDArray[np.int32]
    """(steps,) bucket of each step."""
    seed: int | None
    epoch: int
    before: int = 0
    """Steps of the epoch before these."""
    again: Ints | None = None
    """(K,) how often the epoch served each row before, with weights."""
    window: Ints | None = None
    """(steps,) the window of each step, rising; None: there is one."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, step: int, rank: int = 0) -> BatchIndex:
        """The samples of one rank in one step."""
        part = slice(int(self.starts[step]) + rank, int(self.starts[step + 1]), self.world_size)
        is_pad = None if self.is_pad is None else self.is_pad[part]
        again = None if self.again is None else self.again[part]
        return BatchIndex(
            self.epoch, self.before + step, self.rows[part], int(self.bucket[step]), is_pad, self.seed or 0, again
        )

    def real(self) -> Ints:
        """(n,) the samples that count, without padding."""
        return self.rows if self.is_pad is None else self.rows[~self.is_pad]

    def part(self, first: int, last: int) -> EpochPlan:
        """Some steps."""
        rows = slice(int(self.starts[first]), int(self.starts[last]))
        return replace(
            self,
            rows=self.rows[rows],
            starts=self.starts[first : last + 1] - rows.start,
            is_pad=None if self.is_pad is None else self.is_pad[rows],
            again=None if self.again is None else self.again[rows],
            bucket=self.bucket[first:last],
            window=None if self.window is None else self.window[first:last],
        )


def plan_report(index: SampleIndex, batches: BatchPlan) -> PlanReport:
    """Count the steps and samples of an epoch, bucket by bucket."""
    index = index.apart(batches)
    report = count_steps(index.bucket, index.buckets, batches, index.mixture)
    overfilled = sorted((plan for plan in report.buckets if plan.copies > MAX_COPIES), key=lambda plan: -plan.copies)
    return replace(report, overfilled=tuple(_overfilled(index, plan) for plan in overfilled))


def _overfilled(index: SampleIndex, plan: BucketPlan) -> str:
    """Say that a bucket is mostly repeats, and name its first samples."""
    held = np.flatnonzero(index.bucket == plan.number)[:_NAMED]
    more = ", ..." if plan.samples > _NAMED else ""
    named = f" ({', '.join(index.names_of(held))}{more})" if index.names_of is not None else ""
    return (
        f"bucket {plan.bucket} has {count_of(plan.samples, 'samples')}{named} and repeats"
        f" {'them' if plan.samples > 1 else 'it'} {plan.copies} times in an epoch to fill a batch"
    )


def times_counted(times: NDArray[np.integer] | None, samples: int) -> dict[int, int]:
    """Count samples by occurrences in an epoch: ``{1: 90, 10: 5}``; without ``times`` (n,) each is served once."""
    if times is None:
        return {1: samples}
    counts = np.bincount(times)
    return {number: int(counts[number]) for number in np.flatnonzero(counts).tolist()}


def plan_epoch(
    index: SampleIndex, batches: BatchPlan, *, seed: int | None, epoch: int, served: Ints | None = None
) -> EpochPlan:
    """Lay out one epoch, or what is left of one that served some samples (n,) before.

    Without a seed: bucket by bucket, samples in the order of the index.
    """
    num_buckets = len(index.buckets)
    index = index.apart(batches)
    count, mixture = len(index.bucket), index.mixture
    drawn = spare = None
    if mixture is not None or served is not None:
        times = np.ones(count, dtype=np.int64)
        if mixture is not None:
            times = occurrences(index.bucket, mixture, seed=seed, epoch=epoch)
        if served is not None:
            times = np.maximum(times - np.bincount(served, minlength=count), 0)
        elif batches.remainder != "pad":  # fill a step before anything is repeated, also where nothing is due
            spare = np.flatnonzero(times == 0).astype(np.int32)
        drawn = np.repeat(np.arange(count, dtype=np.int32), times)
    if index.blocks is None:
        order = shuffled(count if drawn is None else len(drawn), seed, epoch, stream=0)
    else:
        order = index.blocks.order(np.arange(count) if drawn is None else drawn, seed, epoch).astype(np.int32)
    order = order if drawn is None else drawn[order]
    if served is not None:
        report = count_steps(index.bucket[order], index.buckets, batches)
    else:
        report = count_steps(index.bucket, index.buckets, batches, mixture)
    if spare is not None:
        order = np.concatenate([order, spare[shuffled(len(spare), seed or 0, epoch, stream=3)]])
    bucket = index.bucket[order]
    held = np.bincount(bucket, minlength=len(index.buckets))
    positions: Ints = by_bucket(bucket, len(held)) if len(held) > 1 else np.arange(len(order))
    cuts = np.cumsum(held)[:-1]
    parts = np.split(order[positions], cuts)
    begins = None
    if index.blocks is not None:
        begins = _begins(report, np.split(positions, cuts))
    plan = _in_steps(report, [parts[plan.number] for plan in report.buckets], seed, epoch, begins)
    if begins is not None and index.blocks is not None:
        plan = replace(plan, window=np.sort(begins) // index.blocks.samples)
    if len(index.buckets) > num_buckets:
        plan = replace(plan, bucket=plan.bucket % num_buckets)
    return plan if mixture is None else replace(plan, again=_again(plan, served, count))


def _again(plan: EpochPlan, served: Ints | None, count: int) -> Ints:
    """(K,) 0 when the epoch serves a sample first, 1 the second time; ``served`` (n,) came before the plan."""
    real = np.arange(len(plan.rows)) if plan.is_pad is None else np.flatnonzero(~plan.is_pad)
    rows, again = plan.real(), np.zeros(len(plan.rows), dtype=np.uint32)
    order, times = np.argsort(rows, kind="stable"), np.bincount(rows, minlength=count)
    before = 0 if served is None else np.bincount(served, minlength=count)
    again[real[order]] = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times - before, times)
    return again


def _begins(report: PlanReport, positions: Sequence[Ints]) -> Ints:
    """(steps,) where each step begins in an epoch's order, bucket by bucket; ``positions`` are those of samples."""
    begins: list[Ints] = [np.empty(0, dtype=np.int64)]
    for plan in report.buckets:
        of_bucket = positions[plan.number]
        begins.append(of_bucket[(np.arange(plan.steps) * plan.size).clip(max=len(of_bucket) - 1)])
    return np.concatenate(begins)


def _in_steps(
    report: PlanReport, parts: Sequence[Ints], seed: int | None, epoch: int, begins: Ints | None = None
) -> EpochPlan:
    """The rows of each bucket, repeated from the front, cut or padded to fill its steps.

    The steps are shuffled, or in the order of where they begin (steps,).
    """
    batches, plans = report.batches, report.buckets
    filled = [_filled(rows, plan) for rows, plan in zip(parts, plans, strict=True) if plan.steps]
    rows = np.concatenate([np.empty(0, dtype=np.int32), *(some for some, _ in filled)])
    is_pad = np.concatenate([np.empty(0, dtype=np.bool_), *(some for _, some in filled)])
    counts = np.array([plan.steps for plan in plans], dtype=np.int64)
    bucket = np.repeat(np.array([plan.number for plan in plans], dtype=np.int32), counts)
    sizes = np.repeat(np.array([plan.size for plan in plans], dtype=np.int64), counts)
    sizes[(np.cumsum(counts) - 1)[counts > 0]] = [plan.last for plan in plans if plan.steps]
    order = shuffled(len(bucket), seed, epoch, stream=1) if begins is None else np.argsort(begins, kind="stable")
    starts = np.concatenate(([0], np.cumsum(sizes[order])))
    if len(sizes) and (sizes == sizes[0]).all():  # a fifth of the time of the general way
        rows = rows.reshape(len(sizes), -1)[order].reshape(-1)
        is_pad = is_pad.reshape(len(sizes), -1)[order].reshape(-1)
    else:
        positions = spread((np.cumsum(sizes) - sizes)[order], sizes[order])
        rows, is_pad = rows[positions], is_pad[positions]
    padded = is_pad if is_pad.any() else None
    return EpochPlan(rows=rows, starts=starts, world_size=batches.world_size, is_pad=padded, bucket=bucket[order],
                     seed=seed, epoch=epoch)  # fmt: skip


def _filled(rows: Ints, plan: BucketPlan) -> tuple[Ints, NDArray[np.bool_]]:
    """The rows that the steps of one bucket serve, and which are padding; the last two steps share real rows."""
    total, size = plan.served + plan.padded, plan.size
    filled, is_pad = np.resize(rows, total), np.zeros(total, dtype=np.bool_)
    last = rows_of_last_steps(len(rows), size) if plan.padded else ()
    start, taken = total - size * len(last), len(rows) - sum(last)
    for real in last:
        filled[start : start + real] = rows[taken : taken + real]
        filled[start + real : start + size] = np.resize(rows, size - real)
        is_pad[start + real : start + size] = True
        start, taken = start + size, taken + real
    return filled, is_pad
