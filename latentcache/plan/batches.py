"""How many steps, of which bucket, and what becomes of the samples that fill no batch.

Decides the length of an epoch before anything is read. Guarantee: a step holds one bucket, the same on every
rank, and the same number of samples on every rank; every sample is counted as used, repeated or dropped, none
is left out in silence. Reports R1 (OneTrainer: steps fly by at 0.0 it/s) and R2 end here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptyPlanError, PlanError, UsageError
from latentcache.geometry.sizes import Size
from latentcache.plan.given_numbers import is_whole
from latentcache.plan.weights import Dataset, Mixture, bucket_counts

#: Samples in one step of all ranks; a typing error beyond it would fill the memory with repeats.
MAX_STEP = 1 << 24

SmallBuckets = Literal["repeat", "drop", "partial", "error", "mask"]
"""What happens to samples that do not fill a batch.

``repeat``: the last batch is filled with samples of the same bucket. ``drop``: they are left out.
``partial``: the last batch is smaller, filled only up to equal shares for all ranks. ``error``: refuse. ``mask``, for
rows of tokens: the last batch is filled with rows of which nothing is learned, so nothing counts twice.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Sizes of batches: how many samples a rank gets in a step, on how many ranks."""

    batch_size: int
    """Samples per rank and step."""
    world_size: int = 1
    small_buckets: SmallBuckets = "repeat"

    def __post_init__(self) -> None:
        if not (is_whole(self.batch_size, 1) and is_whole(self.world_size, 1)):
            raise UsageError(
                f"batch size {self.batch_size!r} on {self.world_size!r} ranks",
                why="both are whole numbers, at least 1",
                fix="use --batch-size 1 or more and --world-size 1 or more",
            )
        object.__setattr__(self, "batch_size", int(self.batch_size))  # numpy's would stand in checkpoints,
        object.__setattr__(self, "world_size", int(self.world_size))  # which are plain values
        if self.global_batch_size > MAX_STEP:
            raise UsageError(
                f"batch size {self.batch_size} on {self.world_size} ranks",
                why=f"a step has at most {MAX_STEP:,} samples of all ranks together",
                fix="use a smaller --batch-size or --world-size",
            )
        if self.small_buckets not in get_args(SmallBuckets):
            raise UsageError(
                f"unknown policy {self.small_buckets!r} for small buckets",
                fix=f"use one of {', '.join(get_args(SmallBuckets))}",
            )

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in one step."""
        return self.batch_size * self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """What one epoch does with one bucket."""

    size: Size
    samples: int
    """Its entries; with weights the servings that are due in the first epoch (in others one more or less for each
    data set; steps stay). With weights and several allowed lengths all numbers of a length are those of the first
    epoch, and those of all lengths together hold in every one."""
    least: int
    """Samples in any epoch at least; the same number without weights."""
    steps: int
    """Steps of this bucket in an epoch; on each rank one batch a step."""
    repeated: int
    dropped: int
    last: int
    """Samples per rank in the bucket's last step (the batch size, or less under ``partial``)."""
    masked: int = 0
    """Rows that only fill, under ``mask``."""
    blank: int = 0
    """Batches of one rank in which every row only fills: there a mean over the labels is nan."""

    @property
    def fill(self) -> float:
        """Part of the bucket's servings that are first ones; 0 without a step."""
        used = self.samples - self.dropped
        return used / (used + self.repeated + self.masked) if used else 0.0


class UnevenNames(Protocol):
    """Samples that an epoch does not serve as often as is due, found when they are first asked for."""

    @property
    def repeated(self) -> tuple[str, ...]:
        """Those it serves more often."""

    @property
    def dropped(self) -> tuple[str, ...]:
        """Those it serves less often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What an epoch does, bucket by bucket."""

    batches: BatchPlan
    buckets: tuple[BucketPlan, ...]
    mixture: Mixture | None = None
    """How often each data set is served, where there are several with weights."""
    names: UnevenNames | None = field(default=None, repr=False, compare=False)
    """Of the first epoch, where it is known what samples are called."""

    @property
    def repeated_names(self) -> tuple[str, ...]:
        """Samples that the first epoch serves beyond what is due; it is planned when they are first asked for."""
        return self.names.repeated if self.names else ()

    @property
    def dropped_names(self) -> tuple[str, ...]:
        """Samples that the first epoch leaves out, or serves less often than is due; see :attr:`repeated_names`."""
        return self.names.dropped if self.names else ()

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """What an epoch takes of each data set; empty without weights."""
        return self.mixture.datasets if self.mixture else ()

    @property
    def steps(self) -> int:
        """Loader steps of an epoch, the same on every rank."""
        return sum(bucket.steps for bucket in self.buckets)

    @property
    def samples_used(self) -> int:
        """Entries that an epoch serves; with weights each as often as it is due."""
        return sum(bucket.samples - bucket.dropped for bucket in self.buckets)

    @property
    def samples_dropped(self) -> int:
        """Servings that are due and left out."""
        return sum(bucket.dropped for bucket in self.buckets)

    @property
    def samples_repeated(self) -> int:
        """Servings beyond those that are due."""
        return sum(bucket.repeated for bucket in self.buckets)

    @property
    def rows_masked(self) -> int:
        """Rows that only fill, under ``mask``."""
        return sum(bucket.masked for bucket in self.buckets)

    @property
    def blank_batches(self) -> int:
        """Batches of one rank in which every row only fills."""
        return sum(bucket.blank for bucket in self.buckets)


def plan_report(
    bucket: NDArray[np.integer], sizes: Sequence[Size], batches: BatchPlan, mixture: Mixture | None = None
) -> PlanReport:
    """Count the steps of an epoch.

    Args:
        bucket: (N,) bucket of every entry, as a position in ``sizes``.
        sizes: The buckets.
        batches: Batch size, ranks and policy.
        mixture: How often each data set is served; without it every entry is served once.

    Raises:
        PlanError: Under ``error``, a bucket does not divide into full batches.
    """
    if mixture is None:
        counts = np.bincount(bucket, minlength=len(sizes)).tolist()
        plans = [_bucket_plan(size, count, batches) for size, count in zip(sizes, counts, strict=True) if count]
    else:
        found = bucket_counts(bucket, mixture, len(sizes)).T.tolist()
        plans = [_weighted(size, counts, batches) for size, counts in zip(sizes, found, strict=True) if counts[2]]
    return PlanReport(batches=batches, buckets=tuple(plans), mixture=mixture)


def require_steps(report: PlanReport) -> PlanReport:
    """The report, if it has a step.

    Raises:
        EmptyPlanError: It has none; the message lists buckets, counts and what would mend it.
    """
    if report.steps:
        return report
    batches = report.batches
    short = ", ".join(f"{bucket.size}: {bucket.samples}" for bucket in report.buckets[:8])
    raise EmptyPlanError(
        f"no full batch can be formed (0 steps per epoch) at batch size {batches.batch_size}"
        f" on {batches.world_size} rank{'s' * (batches.world_size > 1)}",
        where=f"buckets (height x width: samples) {short}" if short else "there are no entries",
        why=f"a step holds one bucket and needs {batches.global_batch_size} samples of it",
        fix=_remedy(report),
    )


def _remedy(report: PlanReport) -> str:
    """What would give the epoch a step; nothing is named that would not."""
    most, world_size = max((bucket.least for bucket in report.buckets), default=0), report.batches.world_size
    if not report.buckets:
        return "add pictures, then run `latentcache build` again"
    if not most:
        return "--small-buckets repeat, or more --samples"
    if most < world_size:
        return f"--small-buckets repeat, or at most {most} rank{'s' * (most > 1)}, or more pictures"
    return f"--small-buckets repeat, or a --batch-size of at most {most // world_size}, or more pictures"


def _bucket_plan(size: Size, count: int, batches: BatchPlan) -> BucketPlan:
    """Steps of one bucket of ``count`` entries."""
    whole, rest = divmod(count, batches.global_batch_size)
    policy, full = batches.small_buckets, batches.batch_size
    if rest == 0 or policy == "drop":
        return BucketPlan(size=size, samples=count, least=count, steps=whole, repeated=0, dropped=rest, last=full)
    if policy == "error":
        raise PlanError(
            f"bucket {size} does not divide into full batches",
            where=f"bucket {size}: {count} samples",
            why=f"steps of {batches.global_batch_size} leave over {rest}",
            fix="--small-buckets repeat, drop or partial",
        )
    if policy == "mask":
        return _masked(size, count, batches)
    last = full if policy == "repeat" else -(-rest // batches.world_size)
    repeated = last * batches.world_size - rest
    steps = whole + 1
    return BucketPlan(size=size, samples=count, least=count, steps=steps, repeated=repeated, dropped=0, last=last)


def _masked(size: Size, count: int, batches: BatchPlan) -> BucketPlan:
    """Steps of a bucket that is filled with rows of which nothing is learned."""
    steps = -(-count // batches.global_batch_size)
    return BucketPlan(
        size=size,
        samples=count,
        least=count,
        steps=steps,
        repeated=0,
        dropped=0,
        last=batches.batch_size,
        masked=steps * batches.global_batch_size - count,
        blank=max(batches.world_size - rows_of_last_step(count, batches), 0),
    )


def rows_of_last_step(count: int, batches: BatchPlan) -> int:
    """Real rows in the last step of a bucket of so many, under ``mask``: one for each rank, where that can be.

    The step before gives them up. With batches of one row it would only move the empty ones.
    """
    rest = count % batches.global_batch_size or batches.global_batch_size
    wanted = batches.world_size if batches.batch_size > 1 and count > rest else 0
    return max(rest, wanted)


def _weighted(size: Size, counts: Sequence[int], batches: BatchPlan) -> BucketPlan:
    """Steps of a bucket whose servings differ from epoch to epoch: enough for the most, or, to drop, for the least.

    So the number of steps is the same in every epoch; samples are those of the first one.
    """
    first, least, most = counts
    dropping = batches.small_buckets == "drop"
    if batches.small_buckets in ("error", "mask") and least != most:
        raise PlanError(
            f"bucket {size} does not divide into full batches",
            where=f"bucket {size}: {least} samples in one epoch, {most} in another",
            why="with these weights the entries of a data set take turns",
            fix="--small-buckets repeat, drop or partial, or other weights",
        )
    plan = _bucket_plan(size, least if dropping else most, batches)
    if plan.masked:
        return plan
    served = plan.samples - plan.dropped + plan.repeated
    more, fewer = max(served - first, 0), max(first - served, 0)
    return replace(plan, samples=first, least=least, repeated=more, dropped=fewer)
