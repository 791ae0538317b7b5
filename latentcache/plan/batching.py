"""The steps of an epoch: how many, of which bucket, and what happens to samples that do not fill a batch.

Decides the length of an epoch before anything is read. Guarantee: a step holds one bucket, the same on every rank,
and the same number of samples on every rank. With a budget of pixels or tokens that number follows the bucket. Every
sample is counted as used, repeated, padded or dropped, so reports R1 (OneTrainer: 0 steps, nothing trains) and R2
(unknown length) cannot happen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptyPlanError, PlanError, UsageError, count_of
from latentcache.fields.dtypes import numpy_dtype
from latentcache.fields.protocol import FieldSpec, Group
from latentcache.fields.registry import load
from latentcache.plan.mixing import Mixture, bucket_counts
from latentcache.plan.numbers import choice, whole
from latentcache.value import Value

#: Samples in one step of all ranks. A typing error beyond it would fill the memory with repeats.
MAX_STEP = 1 << 24

#: An epoch that serves a sample more often than this to fill a batch is said.
MAX_COPIES = 4

_SIZES = ("batch_size", "batch_pixels", "batch_tokens")

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
    tokens: int = field(default=0, repr=False, compare=False)
    """Tokens of one sample in a batch, padding included: of its text, or of a row."""
    bytes: int = field(default=0, repr=False, compare=False)
    """Bytes of one sample in a batch, in the types that are stored."""
    source: int = field(default=0, repr=False, compare=False)
    """Its source, if every source has batches of its own."""

    @property
    def pixels(self) -> int:
        """Frames x height x width; 0 of what has no size."""
        pixels = math.prod(self.size)
        return pixels if pixels > 1 else 0

    @property
    def cells(self) -> int:
        """Cells of its largest latents: frames x height x width after the encoder; 0 without latents."""
        return max((math.prod(shape[1:]) for _, shape in self.shapes if len(shape) > 2), default=0)

    @property
    def dims(self) -> dict[str, int]:
        """Its numbers, as ``plan --json`` gives them: ``height``, ``width`` (clips: ``frames``), or ``length``."""
        frames, height, width = self.size
        if height * width > 1:
            return ({"frames": frames} if frames > 1 else {}) | {"height": height, "width": width}
        return {"length": self.length} if self.length else {}

    def __str__(self) -> str:
        return self.label


def bucket_of(groups: Mapping[str, Group], specs: Mapping[str, FieldSpec], lengths: Mapping[str, int]) -> Bucket:
    """The bucket of samples whose fields have these groups; ``lengths``: elements that ragged items are padded to."""
    labels = [group.label for group in groups.values() if group.label]
    stacked = {name: group for name, group in groups.items() if not specs[name].ragged}
    num_bytes = tokens = 0
    for name, group in groups.items():
        spec = specs[name]
        shape = (lengths[name], *group.shape[1:]) if spec.ragged else group.shape
        num_bytes += math.prod(shape) * numpy_dtype(spec.dtype).itemsize
        if "tokens" in spec.dims:
            tokens = max(tokens, shape[spec.dims.index("tokens")])
    return Bucket(
        label=labels[0] if labels else "all",
        size=max((group.dims for group in stacked.values()), key=math.prod, default=(1, 1, 1)),
        shapes=tuple((name, group.shape) for name, group in stacked.items()),
        tokens=tokens,
        bytes=num_bytes,
    )


def size_rank(size: tuple[int, int, int]) -> tuple[int, int, int]:
    """Sort key of buckets (frames, height, width): largest first. The order of an epoch depends on it."""
    frames, height, width = size
    return -frames * height * width, height, width


class BatchPlan(Value):
    """Sizes of batches: one of ``batch_size``, ``batch_pixels`` and ``batch_tokens``, and the number of ranks."""

    batch_size: int | tuple[int, ...] | None = None
    """Samples per rank and step. Several numbers: one for each source, and a batch has samples of one source."""
    batch_pixels: int | None = None
    """Most pixels of all ranks in one step: frames x height x width of each sample."""
    batch_tokens: int | None = None
    """Most tokens of all ranks in one step, padding included."""
    multiple_of: int | None = None
    """With a budget, the samples of all ranks in a step are a multiple of it; by default of the number of ranks."""
    world_size: int = 1
    remainder: Remainder = "repeat"

    def __post_init__(self) -> None:
        sizes = [name for name in _SIZES if getattr(self, name) is not None]
        if len(sizes) != 1:
            many = f"{' and '.join(sizes)} exclude each other" if sizes else "the size of a batch is missing"
            raise UsageError(many, fix="--batch-size=4, or a budget of pixels or tokens")
        for name in (sizes[0], "world_size"):
            value = getattr(self, name)
            several = name == "batch_size" and isinstance(value, list | tuple) and len(value)
            checked = tuple(whole(name, size, 1) for size in value) if several else whole(name, value, 1)
            object.__setattr__(self, name, checked)
        choice("remainder", self.remainder, get_args(Remainder))
        if self.multiple_of is not None:
            self._check_multiple(self.multiple_of)
        if self.batch_size is not None:
            self._check_step("batch_size", self.batch_size, max(self._of_sources) * self.world_size)

    def _check_multiple(self, multiple: Any) -> None:
        if self.batch_size is not None:
            raise UsageError("only with a budget", argument="multiple_of", value=multiple, fix="leave it out")
        if whole("multiple_of", multiple, 1) % self.world_size:
            raise UsageError(
                f"does not divide among {self.world_size} ranks",
                argument="multiple_of",
                value=multiple,
                why="every rank has the same number of samples in a step",
                fix=f"--multiple-of={self.world_size}, or a multiple of it",
            )

    def _check_step(self, name: str, value: object, size: int) -> None:
        if size > MAX_STEP:
            raise UsageError(
                f"{size:,} samples in one step of all ranks",
                argument=name,
                value=value,
                why=f"a step has at most {MAX_STEP:,} samples of all ranks together",
                fix="use a smaller number or fewer ranks",
            )

    @property
    def _of_sources(self) -> tuple[int, ...]:
        """Samples per rank and step of each source, or of all."""
        sizes = self.batch_size or ()
        return sizes if isinstance(sizes, tuple) else (sizes,)

    @property
    def budget(self) -> tuple[str, int]:
        """What a step of all ranks holds at most: ``pixels`` or ``tokens``, and how many."""
        return ("pixels", self.batch_pixels) if self.batch_pixels else ("tokens", self.batch_tokens or 0)

    @property
    def multiple(self) -> int:
        """The samples of all ranks in a step are a multiple of it."""
        return self.multiple_of or self.world_size

    @property
    def words(self) -> str:
        """The size of a batch, for messages: ``4``, ``4 and 1``, ``up to 4,194,304 pixels of all ranks``."""
        unit, budget = self.budget
        return " and ".join(map(str, self._of_sources)) or f"up to {budget:,} {unit} of all ranks"

    def sizes(self, buckets: Sequence[Bucket]) -> list[int]:
        """Samples of all ranks in one full step of each bucket.

        Raises:
            UsageError: A bucket has no pixels or tokens to count, or the budget is too small for one of its batches.
        """
        if self.batch_size is not None:
            numbers = self._of_sources
            return [numbers[bucket.source if len(numbers) > 1 else 0] * self.world_size for bucket in buckets]
        unit, budget = self.budget
        largest = max(buckets, key=lambda bucket: int(getattr(bucket, unit)), default=None)
        costs = [int(getattr(bucket, unit)) for bucket in buckets]
        if not all(costs):
            raise UsageError(
                f"the samples have no {unit}",
                argument=f"batch_{unit}",
                value=budget,
                fix="--batch-size=4",
            )
        if largest is not None and (least := max(costs) * self.multiple) > budget:
            raise UsageError(
                f"too small for a batch of bucket {largest}",
                argument=f"batch_{unit}",
                value=budget,
                why=f"{count_of(self.multiple, 'samples')} of it, at least one on each rank, have {least:,} {unit}",
                fix=f"--batch-{unit}={least}, or smaller samples",
            )
        sizes = [budget // cost // self.multiple * self.multiple for cost in costs]
        self._check_step(f"batch_{unit}", budget, max(sizes, default=0))
        return sizes

    @property
    def layout(self) -> tuple[object, ...]:
        """Two plans of one epoch with equal layouts have the same steps; ranks only divide them differently."""
        if self.batch_size is None:
            return (*self.budget, self.multiple)
        sizes = tuple(size * self.world_size for size in self._of_sources)
        return (*sizes, "ranks", self.world_size) if self.remainder == "partial" else sizes


class BucketPlan(Value):
    """Steps and samples of one bucket in one epoch."""

    bucket: Bucket
    number: int = 0
    """Its position among all buckets."""
    samples: int
    """Its samples; with weights the occurrences in the first epoch (later epochs have one
    more or less per source; the number of steps stays)."""
    size: int
    """Samples of all ranks in one full step."""
    steps: int
    """Steps of this bucket in an epoch; each rank gets one batch per step."""
    repeated: int = 0
    dropped: int = 0
    last: int
    """Samples of all ranks in the last step: :attr:`size`, or less under ``partial``."""
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
    sources: Mixture = ()
    """Counts of each source in an epoch; empty without weights."""
    overfilled: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """One sentence for each bucket whose samples fill batches more than ``MAX_COPIES`` times in an epoch."""

    @cached_property
    def steps(self) -> int:
        """Loader steps of an epoch, the same on every rank."""
        return sum(bucket.steps for bucket in self.buckets)

    @property
    def samples_used(self) -> int:
        """Samples that an epoch serves; one that is due twice counts twice."""
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
    def samples_per_batch(self) -> float:
        """Samples of one rank in a step, on average and without padding; a mean loss over all samples needs it."""
        served = sum(bucket.served for bucket in self.buckets)
        return served / (self.steps * self.batches.world_size) if self.steps else 0.0

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

    def as_json(self, grad_accum: int = 1) -> dict[str, Any]:
        """The keys of ``plan --json``; ``grad_accum``: batches of an optimizer step."""
        batches = self.batches
        buckets = list[dict[str, Any]]()
        largest = dict.fromkeys(("samples", "pixels", "cells", "tokens", "bytes"), 0)
        for plan in self.buckets:
            bucket = plan.bucket
            size = plan.size // batches.world_size
            for name in largest:
                largest[name] = max(largest[name], size * (1 if name == "samples" else getattr(bucket, name)))
            buckets.append({
                **(bucket.dims or {"label": bucket.label}),
                "samples": plan.samples,
                "batch_size": size,
                "batch_bytes": size * bucket.bytes,
                "batches": plan.steps,
                "repeated": plan.repeated,
                "copies": plan.copies,
                "dropped": plan.dropped,
                "efficiency": round(plan.efficiency, 4),
            })  # fmt: skip
        return {
            "batch_size": batches.batch_size,
            "batch_pixels": batches.batch_pixels,
            "batch_tokens": batches.batch_tokens,
            "multiple_of": batches.multiple,
            "world_size": batches.world_size,
            "grad_accum": grad_accum,
            "remainder": batches.remainder,
            "buckets": buckets,
            "largest_batch": largest,
            "samples_per_batch": round(self.samples_per_batch, 4),
            "batches_per_epoch": self.steps,
            "steps_per_epoch": -(-self.steps // grad_accum),
            "samples_used": self.samples_used,
            "samples_dropped": self.samples_dropped,
            "samples_repeated": self.samples_repeated,
            "overfilled": list(self.overfilled),
        }

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(load("latentcache.report.page:html_of")(self))

    def __repr__(self) -> str:
        largest = ", ".join(f"{plan.bucket}: {plan.samples}" for plan in self.buckets[:4])
        rest = f", {len(self.buckets) - 4} more" if len(self.buckets) > 4 else ""
        return (
            f"PlanReport({self.steps} steps of {self.batches.words} x {self.batches.world_size} ranks,"
            f" remainder={self.batches.remainder!r}\n"
            f"  {self.samples_used} samples used{self.beside}\n  buckets: {largest}{rest})"
        )


def count_steps(
    bucket: NDArray[np.integer], buckets: Sequence[Bucket], batches: BatchPlan, mixture: Mixture | None = None
) -> PlanReport:
    """Count the steps of an epoch; ``bucket`` (N,) is the position of each sample's bucket in ``buckets``."""
    if mixture is None:
        first = least = most = np.bincount(bucket, minlength=len(buckets))
    else:
        first, least, most = bucket_counts(bucket, mixture, len(buckets))
    sizes = batches.sizes(buckets)
    plans = list[BucketPlan]()
    for number in np.flatnonzero(most).tolist():
        counts = int(first[number]), int(least[number]), int(most[number])
        plans.append(bucket_plan(buckets[number], number, counts, sizes[number], batches))
    return PlanReport(batches=batches, buckets=tuple(plans), sources=mixture or ())


def require_steps(report: PlanReport) -> PlanReport:
    """The report, if it has at least one step."""
    if report.steps:
        return report
    batches = report.batches
    short = ", ".join(f"{plan.bucket}: {plan.samples}" for plan in report.buckets[:8])
    needed = min((bucket.size for bucket in report.buckets), default=0)
    raise EmptyPlanError(
        f"0 steps per epoch, no bucket fills a batch on {count_of(batches.world_size, 'ranks')}",
        argument=next(name for name in _SIZES if getattr(batches, name)),
        value=batches.batch_size or batches.budget[1],
        where=f"buckets and samples: {short}" if short else "there are no samples",
        why=f"a step holds one bucket and needs {needed} samples of it" if short else "",
        fix="--remainder=repeat, or more data" if short else "add data, then run `latentcache build` again",
    )


def bucket_plan(
    bucket: Bucket, number: int, counts: tuple[int, int, int], size: int, batches: BatchPlan
) -> BucketPlan:
    """Steps of one bucket, the same in each epoch, though weights change how often its samples are due.

    ``counts``: samples due in the first epoch, in the epoch with fewest, and in the one with most. With
    ``remainder="drop"`` the fewest decide, so that each step is full; else the most, so that none is lost.
    """
    first, least, most = counts
    policy = batches.remainder
    last = size
    padded = 0
    steps, rest = divmod(least if policy == "drop" else most, size)
    if (policy == "error" and rest) or (policy in ("error", "pad") and least != most):
        held = f"{least} to {most} samples, by epoch" if least != most else f"{most} samples"
        raise PlanError(
            f"bucket {bucket} does not divide into full batches",
            where=f"bucket {bucket}: {held}",
            why=f"steps of {size} samples leave {rest} over",
            fix="--remainder=repeat|drop|partial",
        )
    if rest and policy != "drop":
        steps += 1
        padded = size - rest if policy == "pad" else 0
        last = -(-rest // batches.multiple) * batches.multiple if policy == "partial" else last
    served = (steps - 1) * size + last - padded if steps else 0
    blank = sum(max(batches.world_size - rows, 0) for rows in rows_of_last_steps(most, size)) if padded else 0
    more, fewer = max(served - first, 0), max(first - served, 0)
    return BucketPlan(bucket=bucket, number=number, samples=first, size=size, steps=steps, last=last, repeated=more,
                      dropped=fewer, padded=padded, blank=blank)  # fmt: skip


def rows_of_last_steps(count: int, size: int) -> tuple[int, ...]:
    """Real rows in the last one or two steps of a bucket that needs padding; the steps before them are full.

    Two steps share what is left evenly, so with batches of two rows or more no rank gets padding only. That depends
    on the size of the step alone, not on how ranks divide it.
    """
    steps, rest = divmod(count, size)
    return ((size + rest + 1) // 2, (size + rest) // 2) if steps else (rest,)
