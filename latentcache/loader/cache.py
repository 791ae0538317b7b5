"""``open_cache``: a finished cache, pinned to the generation that was current when it was opened."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from latentcache.errors import CacheIncompleteError, UsageError
from latentcache.geometry.sizes import Size
from latentcache.loader.formats import FormatName
from latentcache.loader.loader import CacheLoader
from latentcache.plan.batches import BatchPlan, PlanReport, SmallBuckets, plan_report, require_steps
from latentcache.plan.split import in_validation
from latentcache.recipe import Recipe
from latentcache.store.generation import Generation
from latentcache.store.layout import CacheLayout
from latentcache.store.pins import open_pinned
from latentcache.store.reader import EntryReader
from latentcache.store.views import combine, folder_repeats, select


@dataclass(frozen=True, slots=True)
class Cache:
    """A finished cache. Builds that end later do not change what it serves."""

    layout: CacheLayout
    generation: Generation

    def __len__(self) -> int:
        """Number of entries."""
        return len(self.generation.rows.shard)

    @property
    def recipe(self) -> Recipe:
        """What the entries were made by."""
        return self.generation.recipe

    @property
    def buckets(self) -> dict[Size, int]:
        """Entries per bucket, sizes in pixels."""
        counts = np.bincount(self.generation.rows.bucket, minlength=len(self.generation.buckets))
        return dict(zip(self.generation.buckets, counts.tolist(), strict=True))

    def split(self, validation: float) -> tuple[Cache, Cache]:
        """Training and validation part. A sample's content decides, so none ever crosses when data is added.

        Args:
            validation: Part of the samples for validation, from 0 to 1.

        Raises:
            UsageError: ``validation`` is not between 0 and 1.
        """
        samples, rows = self.generation.samples, self.generation.rows
        chosen = in_validation(samples.content, validation)[rows.sample]
        return self._with(select(self.generation, ~chosen)), self._with(select(self.generation, chosen))

    def repeated(self, times: int | None = None) -> Cache:
        """Every entry ``times`` an epoch; by default as its folder says (``10_cats/`` counts ten times).

        Raises:
            UsageError: ``times`` is below 1.
        """
        if times is not None and times < 1:
            raise UsageError(
                f"repeated({times})", why="an entry that counts is served at least once", fix="1 or more"
            )
        repeats = folder_repeats(self.generation) if times is None else np.full(len(self), times)
        return self._with(select(self.generation, np.repeat(np.arange(len(self)), repeats)))

    def plan(self, *, batch_size: int, world_size: int = 1, small_buckets: SmallBuckets = "repeat") -> PlanReport:
        """What an epoch would do, before training starts.

        Raises:
            PlanError: The policy ``error`` met a bucket that does not divide.
        """
        batches = BatchPlan(batch_size=batch_size, world_size=world_size, small_buckets=small_buckets)
        return plan_report(self.generation.rows.bucket, self.generation.buckets, batches)

    def loader(
        self,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        small_buckets: SmallBuckets = "repeat",
        scaled: bool = True,
        dtype: torch.dtype | None = None,
        format: FormatName | None = None,
        prefetch: int = 2,
        mapped: bool = False,
    ) -> CacheLoader:
        """Batches of one shape, in an order that depends on nothing but the seed and the epoch.

        Args:
            batch_size: Samples per rank and step.
            seed: Changes the order of all epochs.
            rank: Which share of each step this process gets.
            world_size: Number of ranks; all of them see the same steps.
            small_buckets: What becomes of samples that fill no batch: ``repeat`` (default), ``drop``,
                ``partial`` or ``error``.
            scaled: Latents as the model trains on them; False gives them as they are stored.
            dtype: Type of the latents; by default the type they are stored in.
            format: What a batch calls things: ``diffusers-sd``, ``diffusers-sdxl`` (with ``time_ids``),
                ``diffusers-flux`` (with ``img_ids``), or ``plain``, the names of this package (default).
            prefetch: Batches that a thread reads ahead while you train; 0 reads each when it is asked for.
            mapped: Copy from maps of the shards, which is quicker. For caches on a disk of this machine that
                nobody writes to: a shard that is cut short during a copy ends the process (SIGBUS).

        Raises:
            UsageError: A number, policy or format that cannot be.
            EmptyPlanError: An epoch would have no step.
            PlanError: The policy ``error`` met a bucket that does not divide.
        """
        report = require_steps(self.plan(batch_size=batch_size, world_size=world_size, small_buckets=small_buckets))
        return CacheLoader(
            EntryReader(self.layout, self.generation),
            report,
            seed=seed,
            rank=rank,
            scaled=scaled,
            dtype=dtype,
            format=format,
            prefetch=prefetch,
            mapped=mapped,
        )

    def _with(self, generation: Generation) -> Cache:
        return replace(self, generation=generation)


def combine_caches(caches: Sequence[Cache]) -> Cache:
    """Several caches as one: a batch may hold samples of any of them, as long as it is of one size.

    Raises:
        UsageError: No cache, or latents that cannot stand in one batch; the fields that differ are named.
    """
    combined = combine([(cache.layout, cache.generation) for cache in caches])
    return Cache(caches[0].layout, combined)


def open_cache(path: str | os.PathLike[str], *, allow_partial: bool = False) -> Cache:
    """Open the current generation of a cache, and hold it: nothing collects it before the last reader is gone.

    Args:
        path: The cache folder.
        allow_partial: Serve what is there of a cache that a repair took entries out of.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: Its manifest or a column is damaged.
        CacheIncompleteError: A repair removed entries, and no build has made them again.
    """
    root = Path(path)
    generation = open_pinned(root)
    if not (generation.complete or allow_partial):
        raise _incomplete(root, generation)
    if generation.demo:
        warnings.warn(
            f"{root} was made with the demo encoder: it is for trying the tool, not for training", stacklevel=2
        )
    return Cache(CacheLayout(root), generation)


def _incomplete(root: Path, generation: Generation) -> CacheIncompleteError:
    build = f"latentcache build {shlex.quote(generation.source_root)} --out {shlex.quote(str(root))}"
    return CacheIncompleteError(
        f"entries are missing from {root}",
        where=str(root),
        why=f"a repair removed damaged entries (generation {generation.number}), and no build has made them again",
        fix=f"{build} (or open_cache(..., allow_partial=True) to train on what is there)",
    )
