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
from heapq import nlargest
from itertools import product
from typing import Any

from latentcache.geometry.like.trainer import Trainer
from latentcache.geometry.planned import PlannedTable
from latentcache.geometry.sizes import Size, cropped, unusable
from latentcache.plan.batching import BatchPlan, Bucket, Remainder, bucket_plan
from latentcache.value import Value

#: Images that a comparison names.
_NAMED = 3
#: Length and size of a clip; an image has one frame.
Clip = tuple[int, Size]


class TrainerBucket(Value):
    """One bucket of the trainer, in one epoch."""

    size: Size
    frames: int = 1
    samples: int
    """Images, as often as they are repeated."""
    batches: int = 0
    short: int = 0
    """Samples that the last batch lacks."""
    dropped: int = 0
    """Samples that are in no batch."""

    def as_json(self) -> dict[str, int]:
        """For the JSON output."""
        counts = {name: getattr(self, name) for name in ("samples", "batches", "short", "dropped")}
        frames = {"frames": self.frames} if self.frames > 1 else {}
        return {**frames, "height": self.size.height, "width": self.size.width, **counts}


class TrainerPlan(Value):
    """An epoch of the trainer."""

    buckets: tuple[TrainerBucket, ...]
    batches: int = 0
    steps: int = 0
    """Optimizer steps."""
    short: int = 0
    """Places of batches that no sample fills, or a sample a second time if the trainer repeats."""
    dropped: int = 0
    """Samples that are in no batch of this epoch."""
    too_small: int = 0
    """Buckets at which the trainer stops at its start."""
    unused: int
    """Images that have no bucket, such as those smaller than each."""
    cropped: float
    """Mean part of an image that its bucket cuts off."""
    worst: tuple[tuple[Clip, float], ...] = ()
    """Images that lose most, and the part that is cut off."""

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


class OurLoader(Trainer):
    """The loader of this library, as one of the trainers."""

    name = "latentcache"

    def __init__(self, remainder: Remainder, min_pixels: int = 0) -> None:
        self.remainder, self.min_pixels = remainder, min_pixels
        self.repeats = remainder in ("repeat", "partial")

    def fits(self, image: Size, bucket: Size) -> bool:
        """See ``Trainer``: a build rejects others."""
        return image.area >= self.min_pixels and not unusable(image, bucket)

    def batches(self, samples: int, batch: int, ranks: int) -> tuple[int, int, int]:
        """See ``Trainer``: as the remainder says."""
        batches = BatchPlan(batch_size=batch, world_size=ranks, remainder=self.remainder)
        plan = bucket_plan(Bucket(label=""), 0, (samples, samples, samples), batch * ranks, batches)
        return plan.steps * ranks, plan.repeated + plan.padded, plan.dropped


class TrainerRun(Value):
    """A training with another trainer."""

    trainer: Trainer
    tables: Sequence[Any]
    """Each has ``nearest`` and ``within``, as ``Table``."""
    upscale: bool
    batch: int
    """Images of a batch on each rank."""
    ranks: int = 1
    accum: int = 1
    max_crop: int = 100
    """Percent that planned buckets were to cut off at most."""

    def plan(self, sets: Sequence[Mapping[Clip, int]]) -> TrainerPlan:
        """Buckets and steps for images and clips, each as often as it is repeated.

        ``sets``: those that fill batches together.
        """
        buckets = list[TrainerBucket]()
        unused = 0
        total = 0.0
        lost = dict[Clip, float]()
        for table, clips in product(self.tables, sets):
            counts = Counter[Clip]()
            for (frames, size), count in clips.items():
                if isinstance(table, PlannedTable) and table.frames != frames:
                    continue
                bucket = table.nearest(size) if self.upscale else table.within(size)
                if bucket is None or not self.trainer.fits(size, bucket):
                    unused += count
                    continue
                counts[frames, bucket] += count
                part = cropped(size, bucket) / 100
                total += count * part
                lost[frames, size] = max(lost.get((frames, size), 0.0), part)
            buckets += [
                TrainerBucket(size=bucket, frames=frames, samples=count)
                for (frames, bucket), count in counts.most_common()
            ]
        worst = nlargest(_NAMED, lost, key=lambda clip: lost[clip])
        plan = TrainerPlan(
            buckets=tuple(buckets),
            unused=unused,
            cropped=total / max(sum(bucket.samples for bucket in buckets), 1),
            worst=tuple((clip, lost[clip]) for clip in worst if lost[clip]),
        )
        return self.counted(plan)

    def counted(self, plan: TrainerPlan) -> TrainerPlan:
        """The same buckets with the batches and steps of this run."""
        buckets = list[TrainerBucket]()
        for bucket in plan.buckets:
            batches, short, dropped = self.trainer.batches(bucket.samples, self.batch, self.ranks)
            buckets.append(replace(bucket, batches=batches, short=short, dropped=dropped))
        batches = sum(bucket.batches for bucket in buckets)
        least = self.trainer.least(self.batch, self.ranks, self.accum)
        return replace(
            plan,
            buckets=tuple(buckets),
            batches=batches,
            steps=self.trainer.steps(batches, self.ranks, self.accum),
            short=sum(bucket.short for bucket in buckets),
            dropped=sum(bucket.dropped for bucket in buckets),
            too_small=sum(bucket.samples < least for bucket in buckets),
        )

    def compared(self, plan: TrainerPlan, epochs: int) -> dict[str, Any]:
        """The row of a plan of this run in a comparison, as JSON."""
        samples = sum(bucket.samples for bucket in plan.buckets)
        repeats = self.trainer.repeats
        batches = plan.batches * epochs if self.trainer.carries_accumulation else plan.batches
        steps = self.trainer.steps(batches, self.ranks, self.accum)
        return {
            "used": samples - plan.dropped,
            "dropped": plan.dropped,
            "unused": plan.unused,
            "repeated": plan.short if repeats else 0,
            "unfilled": 0 if repeats else plan.short,
            "lost": round((plan.dropped + plan.short) / samples, 4) if samples else 0.0,
            "cropped": round(plan.cropped, 4),
            "cropped_most": round(plan.worst[0][1], 4) if plan.worst else 0.0,
            "max_crop": self.max_crop / 100,
            "shapes": len({(bucket.frames, bucket.size) for bucket in plan.buckets if bucket.batches}),
            "steps_per_epoch": plan.steps,
            "steps": steps if self.trainer.carries_accumulation else steps * epochs,
            "buckets_too_small": plan.too_small,
        }

    def suggestion(self, sets: Sequence[Mapping[Clip, int]]) -> tuple[str, TrainerPlan] | None:
        """The one change of a setting that loses least, and its plan; None: no change loses less.

        Lost are rows of batches that no sample fills, samples that are dropped, and what buckets cut off.
        """
        now = self.plan(sets)
        best = None
        least = _lost(now, self)
        sizes = range(max(self.batch // 2, 2) if self.trainer.keeps_batch else 1, self.batch * 3 // 2 + 1)
        batches = [(f"{self.trainer.batch_setting} = {size}", self.tables, size) for size in sizes]
        changes = [(words, tables, self.batch) for words, tables in self.trainer.changes(self.tables)]
        for change, tables, batch in [*batches, *changes]:
            run = replace(self, tables=tables, batch=batch)
            plan = run.counted(now) if tables is self.tables else run.plan(sets)
            if _lost(plan, run) < least and plan.unused <= now.unused:
                least = _lost(plan, run)
                best = (change, plan)
        return best


def _lost(plan: TrainerPlan, run: TrainerRun) -> tuple[int, float]:
    """Buckets that stop the trainer; then the share of rows without a sample, of samples dropped, of images cut."""
    samples = sum(bucket.samples for bucket in plan.buckets)
    unfilled = plan.short / max(plan.batches * run.batch, 1)
    return plan.too_small, unfilled + plan.dropped / max(samples, 1) + plan.cropped
