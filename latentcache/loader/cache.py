"""``open_cache``: a finished cache, pinned to the generation that was current when it was opened."""

from __future__ import annotations

import os
import shlex
import warnings
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from latentcache.errors import CacheIncompleteError, UsageError
from latentcache.geometry.sizes import Size
from latentcache.loader.formats import FormatName
from latentcache.loader.loader import CacheLoader
from latentcache.loader.picture_report import picture_report
from latentcache.loader.posterior import Draw
from latentcache.loader.substitute import OnBad
from latentcache.loader.willneed import warm
from latentcache.plan.batches import BatchPlan, PlanReport, SmallBuckets, require_steps
from latentcache.plan.given_numbers import whole
from latentcache.plan.split import in_validation
from latentcache.plan.weights import MAX_SAMPLES, Mixture
from latentcache.recipe import Recipe
from latentcache.store.entry_arrivals import follow as follow_build
from latentcache.store.generation import Generation
from latentcache.store.layout import CacheLayout
from latentcache.store.pins import open_pinned
from latentcache.store.reader import EntryReader
from latentcache.store.variants import folded
from latentcache.store.views import folder_repeats, select


@dataclass(frozen=True, slots=True)
class Cache:
    """A finished cache. Builds that end later do not change what it serves.

    It holds its generation until it is forgotten, so that nothing collects it. Its loaders hold the shards open
    until they are closed or forgotten; ``with`` closes them all.
    """

    layout: CacheLayout
    generation: Generation
    mixture: Mixture | None = None
    """How often each data set is served, where ``combine_caches`` was given weights."""
    _loaders: weakref.WeakSet[CacheLoader] = field(default_factory=weakref.WeakSet, repr=False, compare=False)

    def __len__(self) -> int:
        """Number of entries; a picture and its mirror image count as one."""
        return len(self.generation.rows.shard)

    @property
    def recipe(self) -> Recipe:
        """What the entries were made by."""
        return self.generation.recipe

    @property
    def buckets(self) -> dict[Size, int]:
        """Entries per bucket, sizes in pixels, without mirror images."""
        counts = np.bincount(self.generation.rows.bucket, minlength=len(self.generation.buckets))
        return dict(zip(self.generation.buckets, counts.tolist(), strict=True))

    def split(self, validation: float) -> tuple[Cache, Cache]:
        """Training and validation part. A sample's content decides, so none ever crosses when data is added.

        Args:
            validation: Part of the samples for validation, from 0 to 1.

        Raises:
            UsageError: ``validation`` is not between 0 and 1, or the cache has weights.
        """
        self.refuse_weights("split")
        samples, rows = self.generation.samples, self.generation.rows
        chosen = in_validation(samples.content, validation)[rows.sample]
        return self._with(select(self.generation, ~chosen)), self._with(select(self.generation, chosen))

    def repeated(self, times: int | None = None) -> Cache:
        """Every entry ``times`` an epoch; by default as its folder says (``10_cats/`` counts ten times).

        Raises:
            UsageError: ``times`` is below 1, or the cache has weights.
        """
        self.refuse_weights("repeated")
        if times is not None:
            most = MAX_SAMPLES // max(len(self), 1)
            times = whole("times", times, 1, most, why="repeated entries count: each is served at least once")
        repeats = folder_repeats(self.generation) if times is None else np.full(len(self), times)
        return self._with(select(self.generation, np.repeat(np.arange(len(self)), repeats)))

    def warm(self) -> int:
        """Read all shards once in the order of the disk, before training; for a cache that fits into memory.

        Without it the first epoch waits for the disk, entry by entry, and leaves the page cache in small pieces,
        which makes later epochs slower as well. Nothing is kept by this process.

        Returns:
            Bytes read.

        Raises:
            MissingEntryError: A shard is gone.
            CacheDamagedError: A shard cannot be read.
        """
        used = np.unique(self.generation.rows.shard).tolist()
        reader = EntryReader(self.layout, self.generation)
        try:
            return warm(reader, used)
        finally:
            reader.close()

    def plan(
        self, *, batch_size: int, world_size: int = 1, small_buckets: SmallBuckets = "repeat", seed: int = 0
    ) -> PlanReport:
        """What an epoch would do, before training starts, with the samples that are repeated or left out by name.

        Args:
            batch_size: Samples per rank and step.
            world_size: Number of ranks.
            small_buckets: What becomes of samples that fill no batch.
            seed: Of the order that the names are from; they are those of its first epoch.

        Raises:
            UsageError: A number or policy that cannot be.
            PlanError: The policy ``error`` met a bucket that does not divide.
        """
        batches = BatchPlan(batch_size=batch_size, world_size=world_size, small_buckets=small_buckets)
        return picture_report(self.generation, batches, self.mixture, seed=seed)

    def loader(
        self,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        small_buckets: SmallBuckets = "repeat",
        scaled: bool = True,
        latents: Draw | None = None,
        flip: bool | None = None,
        dtype: torch.dtype | None = None,
        format: FormatName | None = None,
        prefetch: int = 2,
        mapped: bool = False,
        on_bad: OnBad = "error",
        max_substitutes: int | None = None,
        device: str | torch.device = "cpu",
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
            latents: Of stored moments: ``sample`` (default) draws again in every epoch, seeded by (seed, epoch,
                key); ``mode`` gives the mean, for validation. What holds no moments is given as it is stored.
            flip: Whether mirrored pictures take turns with those as they are, by (seed, epoch, picture), where they
                are stored; by default they do. False for validation.
            dtype: Type of the latents; by default the type they are stored in.
            format: What a batch calls things: ``diffusers-sd``, ``diffusers-sdxl`` (with ``time_ids``),
                ``diffusers-flux`` (with ``img_ids``), or ``plain``, the names of this package (default).
            prefetch: Batches that threads read ahead while you train; 0 reads each when it is asked for.
            mapped: Copy from maps of the shards, which is quicker. For caches on a disk of this machine that
                nobody writes to: a shard that is cut short during a copy ends the process (SIGBUS).
            on_bad: ``error`` (default): an entry that is damaged or missing is an exception. ``substitute``: another
                entry of its bucket takes its place, with a warning, and is counted in ``loader.substituted``.
            max_substitutes: How many different samples may be bad before it is an error after all; by default 1 % of
                the samples, and at least one.
            device: Where tensors are delivered. For a CUDA device the copy runs beside your computation.

        Raises:
            UsageError: A number, type, policy, format or device that cannot be.
            DeviceError: The device is not there.
            EmptyPlanError: An epoch would have no step.
            PlanError: The policy ``error`` met a bucket that does not divide.
        """
        batches = BatchPlan(batch_size=batch_size, world_size=world_size, small_buckets=small_buckets)
        report = require_steps(picture_report(self.generation, batches, self.mixture, seed=seed))
        loader = CacheLoader(
            EntryReader(self.layout, self.generation),
            report,
            seed=seed,
            rank=rank,
            scaled=scaled,
            latents=latents,
            flip=flip,
            dtype=dtype,
            format=format,
            prefetch=prefetch,
            mapped=mapped,
            on_bad=on_bad,
            max_substitutes=max_substitutes,
            device=device,
        )
        self._loaders.add(loader)
        return loader

    def close(self) -> None:
        """Close every loader made from this cache, its parts among them. Twice is once; all of it stays usable."""
        for loader in list(self._loaders):
            loader.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Cache], tuple[CacheLayout, Generation, Mixture | None]]:
        return Cache, (self.layout, self.generation, self.mixture)

    def refuse_weights(self, what: str) -> None:
        """Refuse what would be another mixture, or another cache than the build under way makes.

        Raises:
            UsageError: The cache has weights, or its build is under way.
        """
        if self.generation.arrivals is not None:
            raise UsageError(f"{what} of a cache whose build is under way", fix="wait for its end")
        if self.mixture is not None:
            raise UsageError(
                f"{what} of a cache with weights",
                why="the weights hold for the entries that were combined",
                fix=f"call {what} on each cache, then combine_caches with the weights",
            )

    def _with(self, generation: Generation) -> Cache:
        return replace(self, generation=generation)


def open_cache(
    path: str | os.PathLike[str], *, allow_partial: bool = False, follow: bool = False, timeout_s: float = 600.0
) -> Cache:
    """Open the current generation of a cache, and hold it: nothing collects it before the last reader is gone.

    Args:
        path: The cache folder.
        allow_partial: Serve what is there of a cache that a repair took entries out of.
        follow: Where a build with ``--stream`` is under way, open what it will hold: lengths are exact at once, a
            batch waits for its entries. Where none is, the current generation as usual.
        timeout_s: How long a batch waits, seconds.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: Its manifest or a column is damaged.
        CacheIncompleteError: A repair removed entries, and no build has made them again.
    """
    root = Path(path)
    coming = follow_build(CacheLayout(root), timeout_s=timeout_s) if follow else None
    generation = coming or folded(open_pinned(root))
    if not (generation.complete or allow_partial):
        raise _incomplete(root, generation)
    if generation.demo:
        what = f"{root} was made with the demo encoder: it is for trying the tool, not for training"
        warnings.warn(what, stacklevel=2)
    return Cache(CacheLayout(root), generation)


def _incomplete(root: Path, generation: Generation) -> CacheIncompleteError:
    build = f"latentcache build {shlex.quote(generation.source_root)} --out {shlex.quote(str(root))}"
    why = f"a repair removed damaged entries (generation {generation.number}), and no build has made them again"
    fix = f"{build} (or open_cache(..., allow_partial=True) to train on what is there)"
    return CacheIncompleteError(f"entries are missing from {root}", where=str(root), why=why, fix=fix)
