"""The loader: an iterable of batches with an exact length, one shape per batch, every entry checked.

Guarantee: what a batch holds was decided by the plan before the first read; shape and checksum of every entry
are checked against its header and its bucket; tensors own their memory. ``len`` is the whole epoch.
``loader[step]`` is one batch, so a ``DataLoader(loader, batch_size=None, num_workers=N)`` serves the same epoch in
the same order. Batches are read ahead by threads, straight into memory that is used again once nobody
refers to it. Cost: one positional read and one xxh3 pass per entry.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.geometry.sizes import latent_size
from latentcache.loader.asked_rows import checked_rows, require_one_bucket
from latentcache.loader.described import described
from latentcache.loader.epochs import Epochs, checked_epoch, checked_seed
from latentcache.loader.flips import checked_flip, turned
from latentcache.loader.formats import checked_format, formatted
from latentcache.loader.gather import BatchGather, Rows
from latentcache.loader.normalise import normalise_into
from latentcache.loader.picture_entries import Pictures, ReplaceablePictures
from latentcache.loader.position import Position
from latentcache.loader.posterior import checked_draw, draw, mean_of
from latentcache.loader.prefetch import THREADS
from latentcache.loader.substitute import Substitutes
from latentcache.loader.transfer import Sent
from latentcache.loader.willneed import WillNeed
from latentcache.plan.batches import PlanReport
from latentcache.recipe import Normalisation
from latentcache.store.reader import EntryReader
from latentcache.store.variants import doubled

Batch = dict[str, Any]
"""``latents`` (B, C, h, w); ``original_size``, ``crop_top_left``, ``target_size`` (B, 2) int64, height or top
first, pixels; ``keys``, ``names``, ``captions`` lists of B strings."""

Turn = tuple[int, int]
"""Seed and epoch: what decides draws and mirror images."""

_TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class CacheLoader(Epochs):
    """Batches of one epoch. Iterating again repeats the epoch; ``set_epoch`` changes it. Picklable.

    With ``with`` its files are closed at the end; without, when it is forgotten.

    Args:
        reader: Entries of one generation.
        report: The steps of an epoch.
        seed: Changes the order of all epochs.
        rank: Which share of each step is served.
        scaled: Normalise, or give latents as they are stored.
        latents: ``sample`` or ``mode``, where moments are stored.
        flip: Serve mirrored pictures in turn, where they are stored.
        dtype: Type of the latents; the stored one where it is not given.
        format: Names of a trainer for what a batch holds.
        prefetch: Batches that threads read ahead; 0 reads each when it is asked for.
        mapped: Copy from maps of the shards instead of reading them.
        on_bad: What becomes of an entry that is damaged or missing.
        max_substitutes: Samples that may be bad before it is an error after all.
        device: Where tensors are delivered.

    Raises:
        UsageError: No such seed, rank, type, format, policy, device or number of batches to read ahead, or
            a draw or mirrored pictures from what holds none.
        DeviceError: The device is not there.
    """

    def __init__(
        self,
        reader: EntryReader,
        report: PlanReport,
        *,
        seed: int = 0,
        rank: int = 0,
        scaled: bool = True,
        latents: str | None = None,
        flip: bool | None = None,
        dtype: torch.dtype | None = None,
        format: str | None = None,
        prefetch: int = 2,
        mapped: bool = False,
        on_bad: str = "error",
        max_substitutes: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self._begin(report.batches, rank=rank, prefetch=prefetch, device=device)
        self.report = report
        pictures, seed, prefetch = Pictures(reader.generation), checked_seed(seed), self._prefetch
        self._pictures = len(pictures.bucket)
        self._position = Position(pictures, report, seed=seed, generation=reader.generation.number)
        # Of pictures, not mirror images; this copy of the reader opens no file, so closing need not reach it.
        self._substitutes = Substitutes(
            ReplaceablePictures(copy.copy(reader)), on_bad=on_bad, limit=max_substitutes, mixture=report.mixture
        )
        self._flips = checked_flip(flip, reader.generation.rows)
        if self._flips:
            reader = EntryReader(reader.layout, doubled(reader.generation))
        self._reader, self._scaled, self._format = reader, scaled, checked_format(format)
        # an entry that is found bad is counted once and said once, so by one thread
        self._threads = 1 if on_bad == "substitute" else THREADS
        self._gather = BatchGather(reader, slots=prefetch + 2, mapped=mapped)
        spec = reader.generation.recipe.encoder
        cells = [latent_size(size, spec.factor) for size in reader.generation.buckets]
        self._shapes = [(spec.stored_channels, size.height, size.width) for size in cells]
        self._draw = checked_draw(latents, spec.posterior)
        self._fetched = False  # once from the disk, by a whole pass
        self._stored = _TORCH[spec.storage_dtype]
        self._dtype = _checked_dtype(dtype) or self._stored

    @property
    def seed(self) -> int:
        """Of the order, the draws and the mirrored pictures; that of the checkpoint after ``load_state_dict``."""
        return self._position.seed

    @property
    def substituted(self) -> Mapping[str, int]:
        """Sample -> how often another took its place, with ``on_bad="substitute"``.

        Counted in this process as batches are read, also those read ahead; a worker of a ``DataLoader`` counts its
        own.
        """
        return self._substitutes.counts

    def close(self) -> None:
        """Stop reading ahead and let go of files, maps and memory. Twice is once; iterating again opens them again.

        Tensors that were handed out stay as they are. A loader that is forgotten needs no closing.
        """
        self._stop()
        # forgotten and not closed: a thread that is still reading a batch could meet another file under its number
        self._reader = copy.copy(self._reader)
        self._gather = self._gather.over(self._reader)

    def __iter__(self) -> Iterator[Batch]:
        """Serve the epoch, or what is left of it after ``load_state_dict``.

        Raises:
            CorruptEntryError: An entry fails its check; it is named with its shard and the fix.
            MissingEntryError: A shard is gone.
            EmptyPlanError: What is left of a loaded epoch fills no batch.
            UsageError: The loader was closed in the middle.
            CacheDamagedError: More samples are bad than may be replaced.
        """
        plan = self._position.begin()
        turn = self.seed, self.epoch  # what is set in the middle of a pass changes none of its batches

        def variants(step: int) -> Rows:
            return self._variants(plan.batch(step, self.rank), turn)

        num_bytes = self._stored.itemsize

        def payload_bytes(row: int) -> int:
            return num_bytes * math.prod(self._shape(row))

        coming = WillNeed(self._reader, variants, payload_bytes, len(plan), blind=not self._fetched)

        def send(step: int) -> Sent:
            coming.before(step)
            return self._send(plan.batch(step, self.rank), turn)

        yield from self._serve(plan, send)
        self._fetched = True

    def __getitem__(self, step: int) -> Batch:
        """One batch of the epoch by its step, for samplers and for workers of a ``DataLoader``.

        Workers that stay (``persistent_workers=True``) hear of ``set_epoch`` as a pass begins, where steps come in
        their order; with a sampler that has an order of its own another epoch is an error.

        Raises:
            IndexError: No such step.
            UsageError: A worker cannot tell which epoch this pass is of.
            CorruptEntryError: An entry fails its check.
            MissingEntryError: A shard is gone.
        """
        return self._transfer.receive(self._send(self._entries_of(step), (self.seed, self.epoch)))

    def batch(self, rows: Rows, epoch: int | None = None) -> Batch:
        """One batch of the given entries, which share a bucket, as this epoch or a given one serves them.

        Args:
            rows: B numbers of entries, from 0.
            epoch: Decides draws and mirrored pictures; by default that of the next pass.

        Raises:
            UsageError: They are no such numbers or of several buckets, or the epoch is no whole number from 0.
            CorruptEntryError: An entry fails its check.
            MissingEntryError: A shard is gone.
        """
        columns = self._reader.generation.rows
        pictures = checked_rows(rows, self._pictures)
        require_one_bucket(pictures, columns.bucket[pictures], self._reader.generation.buckets)
        turn = self.seed, self.epoch if epoch is None else checked_epoch(epoch)
        return self._transfer.receive(self._send(pictures, turn))

    def batch_of_plan(self, entries: NDArray[np.integer], epoch: int, step: int) -> Batch:
        """See :class:`Epochs`."""
        del step
        return self._transfer.receive(self._send(entries, (self.seed, epoch)))

    def _send(self, rows: Rows, turn: Turn) -> Sent:
        """A batch on its way to the device."""
        seed, epoch = turn

        def read(pictures: Rows) -> tuple[Rows, torch.Tensor]:
            self._reader.ready(pictures)
            variants = self._variants(pictures, turn)
            return variants, self._latents(variants, turn)

        _, (variants, latents) = self._substitutes.read(rows, read, seed=seed, epoch=epoch)
        batch = {"latents": latents, **described(self._reader.generation, variants)}
        return self._transfer.send(formatted(batch, self._format))

    def _variants(self, rows: Rows, turn: Turn) -> Rows:
        """For each picture its own row, or that of its mirror image where this epoch serves that."""
        seed, epoch = turn
        return turned(rows, self._reader.generation.rows.key, seed=seed, epoch=epoch) if self._flips else rows

    def _latents(self, rows: Rows, turn: Turn) -> torch.Tensor:
        """(B, C, h, w) in memory of its own."""
        spec = self._reader.generation.recipe.encoder
        latents = torch.from_numpy(self._gather.gather(rows, self._shape(rows[0]), spec.storage_dtype))
        if spec.storage_dtype == "bfloat16":
            latents = latents.view(torch.bfloat16)
        if self._draw == "sample":
            seed, epoch = turn
            latents = draw(latents, self._reader.generation.rows.key[rows], seed=seed, epoch=epoch)
        elif self._draw == "mode":
            latents = mean_of(latents)
        return self._finished(latents, spec.normalisation if self._scaled else Normalisation())

    def _shape(self, row: int) -> tuple[int, int, int]:
        """(C, h, w) of an entry as it is stored."""
        return self._shapes[int(self._reader.generation.rows.bucket[row])]

    def _finished(self, latents: torch.Tensor, facts: Normalisation) -> torch.Tensor:
        """Normalised and of the type asked for, in place where the type stays."""
        if latents.dtype == self._dtype:
            return latents if facts.kind == "none" else normalise_into(latents, facts, latents)
        memory = torch.from_numpy(self._gather.memory(latents.numel() * self._dtype.itemsize))
        return normalise_into(latents, facts, memory.view(self._dtype).view(latents.shape))


def _checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise UsageError(
        f"dtype={dtype!r}", why="latents are given in a floating type of torch", fix="dtype=torch.float32, or none"
    )
