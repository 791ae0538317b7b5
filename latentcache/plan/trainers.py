"""What another trainer makes of images: its buckets and its steps, computed as it computes them.

An image stands in its bucket as often as it is repeated.

- sd-scripts (48d368f, ``library/train_util.py`` and ``train_network.py``): a bucket has ``ceil(images / batch size)``
  batches, the last one smaller. An epoch has ``ceil(batches / processes / accumulation)`` steps.
- OneTrainer (mgds 3a6994a, ``AspectBatchSorting``): a bucket has ``floor(images / (batch size * processes))`` batches
  on each process, and drops the other images of this epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from latentcache.geometry.buckets import kept
from latentcache.geometry.like.trainer import Table, Trainer
from latentcache.geometry.sizes import Size
from latentcache.value import Value


class TrainerBucket(Value):
    """One bucket of the trainer, in one epoch."""

    size: Size
    samples: int
    """Images, as often as they are repeated."""
    batches: int
    short: int
    """Samples that the last batch lacks."""
    dropped: int
    """Samples that are in no batch."""

    def as_json(self) -> dict[str, int]:
        """For the JSON output."""
        counts = {name: getattr(self, name) for name in ("samples", "batches", "short", "dropped")}
        return {"height": self.size.height, "width": self.size.width, **counts}


class TrainerPlan(Value):
    """An epoch of the trainer."""

    buckets: tuple[TrainerBucket, ...]
    batches: int
    steps: int
    """Optimizer steps."""
    short: int
    """Places of batches that no sample fills."""
    dropped: int
    """Samples that are in no batch of this epoch."""
    too_small: int
    """Buckets at which the trainer stops at its start."""
    unused: int
    """Images smaller than a bucket."""
    cropped: float
    """Mean part of an image that its bucket cuts off."""

    def as_json(self) -> dict[str, Any]:
        """For the JSON output."""
        return {
            "buckets": [bucket.as_json() for bucket in self.buckets],
            "batches_per_epoch": self.batches,
            "steps_per_epoch": self.steps,
            "samples_short": self.short,
            "samples_dropped": self.dropped,
            "buckets_too_small": self.too_small,
            "unused": self.unused,
            "cropped": round(self.cropped, 4),
        }


class TrainerRun(Value):
    """A training with another trainer."""

    trainer: Trainer
    tables: Sequence[Table]
    upscale: bool
    batch: int
    """Images of a batch on each rank."""
    ranks: int = 1
    accum: int = 1

    def plan(self, sets: Sequence[Mapping[Size, int]]) -> TrainerPlan:
        """Buckets and steps for images of these sizes, each as often as it is repeated.

        ``sets``: images that fill batches together.
        """
        buckets, unused, cropped = list[TrainerBucket](), 0, 0.0
        for table, sizes in product(self.tables, sets):
            counts = Counter[Size]()
            for size, count in sizes.items():
                bucket = table.nearest(size) if self.upscale else table.within(size)
                if bucket is None:
                    unused += count
                else:
                    counts[bucket] += count
                    part, whole = kept(size, bucket)
                    cropped += count * (1 - part / whole)
            for bucket, count in sorted(counts.items(), key=lambda entry: -entry[1]):
                batches, short, dropped = self.trainer.batches(count, self.batch, self.ranks)
                buckets.append(
                    TrainerBucket(size=bucket, samples=count, batches=batches, short=short, dropped=dropped)
                )
        batches = sum(bucket.batches for bucket in buckets)
        least = self.trainer.least(self.batch, self.ranks, self.accum)
        return TrainerPlan(
            buckets=tuple(buckets),
            batches=batches,
            steps=self.trainer.steps(batches, self.ranks, self.accum),
            short=sum(bucket.short for bucket in buckets),
            dropped=sum(bucket.dropped for bucket in buckets),
            too_small=sum(bucket.samples < least for bucket in buckets),
            unused=unused,
            cropped=cropped / max(sum(bucket.samples for bucket in buckets), 1),
        )

    def suggestion(self, sets: Sequence[Mapping[Size, int]]) -> tuple[str, TrainerPlan] | None:
        """The one change of a setting that loses least, and its plan; None: no change loses less.

        Lost are places of batches that no sample fills, samples that are dropped, and what buckets cut off.
        """
        now, best = self.plan(sets), None
        least = _lost(now, self)
        sizes = range(max(self.batch // 2, 2) if self.trainer.keeps_batch else 1, self.batch * 3 // 2 + 1)
        batches = [(f"{self.trainer.batch_setting} = {size}", self.tables, size) for size in sizes]
        changes = [(words, tables, self.batch) for words, tables in self.trainer.changes(self.tables)]
        for change, tables, batch in [*batches, *changes]:
            run = replace(self, tables=tables, batch=batch)
            plan = run.plan(sets)
            if _lost(plan, run) < least and plan.unused <= now.unused:
                least, best = _lost(plan, run), (change, plan)
        return best


def _lost(plan: TrainerPlan, run: TrainerRun) -> tuple[int, float]:
    """Buckets that stop the trainer; then the share of places without a sample, of samples dropped, of images cut."""
    samples = sum(bucket.samples for bucket in plan.buckets)
    unfilled = plan.short / max(plan.batches * run.batch, 1)
    return plan.too_small, unfilled + plan.dropped / max(samples, 1) + plan.cropped
