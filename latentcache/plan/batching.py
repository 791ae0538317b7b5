"""The steps of an epoch: how many, of which bucket, and what happens to samples that do not fill a batch.

Decides the length of an epoch before anything is read. Guarantee: a step holds one bucket, the same on every rank,
and the same number of samples on every rank. Every sample is counted as used, repeated, padded or dropped, so reports
R1 (OneTrainer: 0 steps, nothing trains) and R2 (unknown length) cannot happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptyPlanError, PlanError, UsageError, count_of
from latentcache.fields.registry import load
from latentcache.plan.mixing import MixedSource, Mixture, bucket_counts
from latentcache.plan.numbers import choice, whole
from latentcache.value import Value

#: Samples in one step of all ranks. A typing error beyond it would fill the memory with repeats.
MAX_STEP = 1 << 24

#: An epoch that serves a sample more often than this to fill a batch is said.
MAX_COPIES = 4

Remainder = Literal["repeat", "drop", "partial", "pad", "error"]
"""Rule for samples that do not fill a batch.

``repeat``: the last batch is filled with samples of the same bucket. ``drop``: they are left out. ``partial``: the
last batch is smaller, filled only up to equal sizes on all ranks. ``pad``: the last batch is filled with padding
rows, which have no loss and count as nothing. ``error``: raise an error.
"""


class Bucket(Value):
    """Samples of one shape, or rows of one length."""

    label: str
    """Name in messages: ``512x768`` (height x width, pixels) or ``4096 tokens``."""
    size: tuple[int, int, int] = (1, 1, 1)
    """Frames, and height and width in pixels, of images and clips."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Stacked field -> shape of one item."""
    length: int = 0
    """Tokens in a row."""

    @property
    def dims(self) -> dict[str, int]:
        """Its numbers, as ``plan --json`` gives them: ``height``, ``width`` (clips: ``frames``), or ``length``."""
        frames, height, width = self.size
        if height * width > 1:
            return ({"frames": frames} if frames > 1 else {}) | {"height": height, "width": width}
        return {"length": self.length} if self.length else {}

    def __str__(self) -> str:
        return self.label


def size_rank(size: tuple[int, int, int]) -> tuple[int, int, int]:
    """Sort key of buckets (frames, height, width): largest first. The order of an epoch depends on it."""
    frames, height, width = size
    return -frames * height * width, height, width


class BatchPlan(Value):
    """Sizes of batches: how many samples a rank gets in a step, on how many ranks."""

    batch_size: int
    """Samples per rank and step."""
    world_size: int = 1
    remainder: Remainder = "repeat"

    def __post_init__(self) -> None:
        for name in ("batch_size", "world_size"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1))
        choice("remainder", self.remainder, get_args(Remainder))
        if self.global_batch_size > MAX_STEP:
            raise UsageError(
                f"{self.global_batch_size:,} samples in one step of all ranks",
                argument="batch_size",
                value=self.batch_size,
                why=f"a step has at most {MAX_STEP:,} samples of all ranks together",
                fix="use a smaller batch size or fewer ranks",
            )

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in one step."""
        return self.batch_size * self.world_size

    @property
    def layout(self) -> tuple[int, ...]:
        """Two plans of one epoch with equal layouts have the same steps; ranks only divide them differently."""
        if self.remainder == "partial":
            return self.batch_size, self.world_size
        return (self.global_batch_size,)


class BucketPlan(Value):
    """Steps and samples of one bucket in one epoch."""

    bucket: Bucket
    number: int = 0
    """Its position among all buckets."""
    samples: int
    """Its samples; with weights the occurrences in the first epoch (later epochs have one
    more or less per source; the number of steps stays)."""
    steps: int
    """Steps of this bucket in an epoch; each rank gets one batch per step."""
    repeated: int = 0
    dropped: int = 0
    last: int
    """Samples per rank in the bucket's last step: the batch size, or less under ``partial``."""
    padded: int = 0
    """Padding rows, under ``pad``."""
    blank: int = 0
    """Batches of one rank that hold padding rows only; a mean over their labels is nan."""

    @property
    def served(self) -> int:
        """Samples in its steps, repeats included."""
        return self.samples - self.dropped + self.repeated

    @property
    def copies(self) -> int:
        """Most occurrences of one of its samples in an epoch, if it repeats them to fill a batch; else 1."""
        return -(-self.served // self.samples) if self.samples and self.repeated else 1

    @property
    def efficiency(self) -> float:
        """Fraction of the served samples that are neither repeats nor padding; 0 without a step."""
        used = self.samples - self.dropped
        return used / (self.served + self.padded) if used else 0.0


class PlanReport(Value):
    """Steps and samples of an epoch, bucket by bucket."""

    batches: BatchPlan
    buckets: tuple[BucketPlan, ...]
    mixture: Mixture | None = None
    """Counts of each source in an epoch, if there are several with weights."""
    overfilled: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """One sentence for each bucket whose samples fill batches more than ``MAX_COPIES`` times in an epoch."""

    @property
    def sources(self) -> tuple[MixedSource, ...]:
        """Counts of each source in an epoch; empty without weights."""
        return self.mixture.sources if self.mixture else ()

    @cached_property
    def steps(self) -> int:
        """Loader steps of an epoch, the same on every rank."""
        return sum(bucket.steps for bucket in self.buckets)

    @property
    def samples_used(self) -> int:
        """Samples that an epoch serves; with weights each as often as it is due."""
        return sum(bucket.samples - bucket.dropped for bucket in self.buckets)

    @property
    def samples_dropped(self) -> int:
        """Occurrences that are due and left out."""
        return sum(bucket.dropped for bucket in self.buckets)

    @property
    def samples_repeated(self) -> int:
        """Samples repeated to fill incomplete batches."""
        return sum(bucket.repeated for bucket in self.buckets)

    @property
    def rows_padded(self) -> int:
        """Padding rows, under ``pad``."""
        return sum(bucket.padded for bucket in self.buckets)

    @property
    def blank_batches(self) -> int:
        """Batches of one rank that hold padding rows only."""
        return sum(bucket.blank for bucket in self.buckets)

    @property
    def beside(self) -> str:
        """Counts of samples that are repeated, dropped or padded, as ``, 3 repeated``; empty without any."""
        counts = {"repeated": self.samples_repeated, "dropped": self.samples_dropped, "padded": self.rows_padded}
        return "".join(f", {number} {name}" for name, number in counts.items() if number)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(load("latentcache.report.page:html_of")(self))

    def __repr__(self) -> str:
        largest = ", ".join(f"{plan.bucket}: {plan.samples}" for plan in self.buckets[:4])
        rest = f", {len(self.buckets) - 4} more" if len(self.buckets) > 4 else ""
        return (
            f"PlanReport({self.steps} steps of {self.batches.batch_size} x {self.batches.world_size} ranks,"
            f" remainder={self.batches.remainder!r}\n"
            f"  {self.samples_used} samples used{self.beside}\n  buckets: {largest}{rest})"
        )


def count_steps(
    bucket: NDArray[np.integer], buckets: Sequence[Bucket], batches: BatchPlan, mixture: Mixture | None = None
) -> PlanReport:
    """Count the steps of an epoch of samples, of which ``bucket`` (N,) has the positions in ``buckets``."""
    if mixture is None:
        first = least = most = np.bincount(bucket, minlength=len(buckets))
    else:
        first, least, most = bucket_counts(bucket, mixture, len(buckets))
    plans = [
        _bucket_plan(buckets[number], number, int(first[number]), int(least[number]), int(most[number]), batches)
        for number in np.flatnonzero(most).tolist()
    ]
    return PlanReport(batches=batches, buckets=tuple(plans), mixture=mixture)


def require_steps(report: PlanReport) -> PlanReport:
    """The report, if it has at least one step."""
    if report.steps:
        return report
    batches = report.batches
    short = ", ".join(f"{plan.bucket}: {plan.samples}" for plan in report.buckets[:8])
    raise EmptyPlanError(
        f"0 steps per epoch, no bucket fills a batch on {count_of(batches.world_size, 'ranks')}",
        argument="batch_size",
        value=batches.batch_size,
        where=f"buckets and samples: {short}" if short else "there are no samples",
        why=f"a step holds one bucket and needs {batches.global_batch_size} samples of it",
        fix="--remainder=repeat, or more data" if short else "add data, then run `latentcache build` again",
        fix_python="remainder='repeat', or more data" if short else "",
    )


def _bucket_plan(bucket: Bucket, number: int, first: int, least: int, most: int, batches: BatchPlan) -> BucketPlan:
    """Steps of one bucket: enough for the most samples of any epoch, or for the least to drop, so never others."""
    size, policy, last, padded = batches.global_batch_size, batches.remainder, batches.batch_size, 0
    steps, rest = divmod(least if policy == "drop" else most, size)
    if (policy == "error" and rest) or (policy in ("error", "pad") and least != most):
        counts = f"{least} to {most} samples, by epoch" if least != most else f"{most} samples"
        raise PlanError(
            f"bucket {bucket} does not divide into full batches",
            where=f"bucket {bucket}: {counts}",
            why=f"steps of {size} samples leave {rest} over",
            fix="--remainder repeat, drop or partial",
            fix_python="remainder='repeat', 'drop' or 'partial'",
        )
    if rest and policy != "drop":
        steps += 1
        padded = size - rest if policy == "pad" else 0
        last = -(-rest // batches.world_size) if policy == "partial" else last
    served = (steps - 1) * size + last * batches.world_size - padded if steps else 0
    blank = sum(max(batches.world_size - rows, 0) for rows in rows_of_last_steps(most, size)) if padded else 0
    more, fewer = max(served - first, 0), max(first - served, 0)
    return BucketPlan(bucket=bucket, number=number, samples=first, steps=steps, last=last, repeated=more,
                      dropped=fewer, padded=padded, blank=blank)  # fmt: skip


def rows_of_last_steps(count: int, size: int) -> tuple[int, ...]:
    """Real rows in the last one or two steps of a bucket that needs padding; the steps before them are full.

    Two steps share what is left evenly, so with batches of two rows or more no rank gets padding only. That depends
    on the size of the step alone, not on how ranks divide it.
    """
    steps, rest = divmod(count, size)
    return ((size + rest + 1) // 2, (size + rest) // 2) if steps else (rest,)
