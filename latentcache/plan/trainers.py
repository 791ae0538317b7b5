"""What another trainer makes of images: its buckets and its steps, computed as it computes them.

sd-scripts (48d368f, ``library/train_util.py`` and ``train_network.py``): an image stands in its bucket as often as it
is repeated; a bucket has ``ceil(images / batch size)`` batches, the last one smaller; an epoch has ``ceil(batches /
processes / accumulation)`` steps. Nothing is dropped, and small batches weigh as much as full ones.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from latentcache.errors import RecipeError
from latentcache.geometry.buckets import kept
from latentcache.geometry.like.kohya import KohyaTable
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


class TrainerPlan(Value):
    """An epoch of the trainer."""

    buckets: tuple[TrainerBucket, ...]
    batches: int
    steps: int
    """Optimizer steps."""
    short: int
    """Places of batches that no sample fills."""
    unused: int
    """Images smaller than a bucket."""
    cropped: float
    """Mean part of an image that its bucket cuts off."""


class KohyaRun(Value):
    """A training of sd-scripts."""

    tables: tuple[KohyaTable, ...]
    upscale: bool
    batch: int
    """Images of a batch on each rank."""
    ranks: int = 1
    accum: int = 1

    def plan(self, sizes: Mapping[Size, int]) -> TrainerPlan:
        """Buckets and steps for images of these sizes, each as often as it is repeated."""
        buckets, unused, cropped = list[TrainerBucket](), 0, 0.0
        for table in self.tables:
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
                batches = -(-count // self.batch)
                short = batches * self.batch - count
                buckets.append(TrainerBucket(size=bucket, samples=count, batches=batches, short=short))
        batches = sum(bucket.batches for bucket in buckets)
        return TrainerPlan(
            buckets=tuple(buckets),
            batches=batches,
            steps=-(-batches // (self.ranks * self.accum)),
            short=sum(bucket.short for bucket in buckets),
            unused=unused,
            cropped=cropped / max(sum(bucket.samples for bucket in buckets), 1),
        )

    def suggestion(self, sizes: Mapping[Size, int]) -> tuple[str, TrainerPlan] | None:
        """The one change of a setting that loses least, and its plan; None: no change loses less.

        Lost are places of batches that no sample fills, and the parts of images that buckets cut off.
        """
        now, best = self.plan(sizes), None
        least = _lost(now, self)
        for change, run in self._changes():
            plan = run.plan(sizes)
            if _lost(plan, run) < least and plan.unused <= now.unused:
                least, best = _lost(plan, run), (change, plan)
        return best

    def _changes(self) -> Iterator[tuple[str, KohyaRun]]:
        """One setting changed: a batch of nearly the same size, a coarser step, narrower limits."""
        for size in range(max(self.batch // 2, 2), self.batch * 3 // 2 + 1):
            yield f"train_batch_size = {size}", replace(self, batch=size)
        tables = [table for table in self.tables if table.buckets]
        if not tables:
            return
        first, sides = (
            tables[0],
            [side for table in tables for side in (table.resolution.height, table.resolution.width)],
        )
        changes = [("bucket_reso_steps", "step", side) for side in (first.step * 2, first.step * 4)]
        changes += [("min_bucket_reso", "min_side", side) for side in range(first.min_side, min(sides), first.step)]
        changes += [("max_bucket_reso", "max_side", side) for side in range(max(sides), first.max_side, first.step)]
        for name, attribute, side in changes:
            changed: dict[str, Any] = {attribute: side}
            with contextlib.suppress(RecipeError):  # limits that the trainer does not take
                yield f"{name} = {side}", replace(self, tables=tuple(replace(table, **changed) for table in tables))


def _lost(plan: TrainerPlan, run: KohyaRun) -> float:
    """Share of the places in batches that no sample fills, and of the images that is cut off."""
    return plan.short / max(plan.batches * run.batch, 1) + plan.cropped
