"""The loader of tokens: epochs of a view, with an exact length, the same steps on every rank, and resume in O(1).

Decides nothing of its own: the order of an epoch, its cursor and its checkpoint are those of the loader of pictures,
with rows as entries and allowed lengths as buckets. Guarantee: what fills no batch of its length goes with longer
rows, none is skipped; a checkpoint goes on with another batch size or number of ranks, by the lengths it began with.
Batches are read ahead by one thread.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.errors import EmptyPlanError
from latentcache.loader.batch_facts import meta, without_labels
from latentcache.loader.epochs import Epochs, checked_epoch, checked_seed
from latentcache.loader.position import Position
from latentcache.loader.row_entries import ReplaceableRows, RowEntries
from latentcache.loader.substitute import Substitutes
from latentcache.loader.token_formats import Batch, checked_token_format, token_formatted
from latentcache.loader.transfer import Sent
from latentcache.plan.batches import BatchPlan, PlanReport
from latentcache.plan.fill import entries_of, only_fills


class Rows(Protocol):
    """What is served: a view. Its attributes are those of ``TokenView``."""

    generation: int

    @property
    def known_lengths(self) -> NDArray[np.integer] | None:
        """(R,) tokens of each row, where they are known."""

    def entries(self, batch: int) -> RowEntries:
        """The rows as a position counts them, where a step has so many on all ranks."""

    def batch(self, rows: Sequence[int] | NDArray[np.integer], *, width: int | None = None) -> Batch:
        """One batch of the given rows."""

    def where(self, row: int) -> str:
        """File and line of what stands first in a row."""


class TokenLoader(Epochs):
    """Batches of one epoch. Iterating again repeats the epoch; ``set_epoch`` changes it. Picklable.

    ``loader[step]`` is one batch, so a ``DataLoader(loader, batch_size=None, num_workers=N)`` serves the same epoch.

    Args:
        view: The rows.
        batches: Batch size, ranks and policy.
        seed: Changes the order of all epochs.
        rank: Which share of each step is served.
        format: What a batch calls things.
        meta: Whether a batch has plain numbers beside its tensors.
        prefetch: Batches that a thread reads ahead; 0 reads each when it is asked for.
        on_bad: ``error``, or ``substitute``: another row takes the place of one that cannot be read.
        max_substitutes: How many different rows may be bad.
        device: Where tensors are delivered.

    Raises:
        UsageError: No such seed, rank, form, policy, device or number of batches to read ahead.
        DeviceError: The device is not there.
        EmptyPlanError: An epoch would have no step.
        PlanError: The policy ``error`` met rows that do not divide.
    """

    def __init__(
        self,
        view: Rows,
        batches: BatchPlan,
        *,
        isolated: bool,
        seed: int = 0,
        rank: int = 0,
        format: str = "plain",
        meta: bool = False,
        prefetch: int = 2,
        on_bad: str = "error",
        max_substitutes: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self._begin(batches, rank=rank, prefetch=prefetch, device=device)
        self.view, self.meta = view, meta
        self.format = checked_token_format(format, isolated=isolated)
        seed, self._entries = checked_seed(seed), view.entries(batches.global_batch_size)
        self.report = _some_steps(self._entries.report(batches, seed=seed))
        self._position = Position(self._entries, self.report, seed=seed, generation=view.generation)
        rows = ReplaceableRows(entries=self._entries, where=view.where)
        self._substitutes = Substitutes(rows, on_bad=on_bad, limit=max_substitutes, mixture=self.report.mixture)

    @property
    def seed(self) -> int:
        """Of the order; that of the checkpoint after ``load_state_dict``."""
        return self._position.seed

    @property
    def substituted(self) -> Mapping[str, int]:
        """Row -> how often another took its place, with ``on_bad="substitute"``.

        Counted in this process as batches are read, also those read ahead; a worker of a ``DataLoader`` counts its
        own.
        """
        return self._substitutes.counts

    def close(self) -> None:
        """Stop reading ahead. Twice is once; iterating again starts again. Batches that were handed out stay."""
        self._stop()
        self.view = copy.copy(self.view)  # a thread that is still reading has its own memory

    def __iter__(self) -> Iterator[Batch]:
        """Serve the epoch, or what is left of it after ``load_state_dict``.

        Raises:
            CorruptEntryError: A document fails its check; it is named with its file and line.
            MissingEntryError: A shard is gone.
            EmptyPlanError: What is left of a loaded epoch fills no batch.
            UsageError: The loader was closed in the middle.
            CacheDamagedError: More rows are bad than may be replaced.
        """
        plan = self._position.begin()
        before = self._position.steps
        turn = self.seed, self.epoch  # what is set in the middle of a pass changes none of its batches

        def send(step: int) -> Sent:
            return self._send(plan.batch(step, self.rank), turn, before + step)

        yield from self._serve(plan, send)

    def __getitem__(self, step: int) -> Batch:
        """One batch of the epoch by its step, for samplers and for workers of a ``DataLoader``.

        Workers that stay (``persistent_workers=True``) hear of ``set_epoch`` as a pass begins, where steps come in
        their order; with a sampler that has an order of its own another epoch is an error.

        Raises:
            IndexError: No such step.
            UsageError: A worker cannot tell which epoch this pass is of.
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        return self._transfer.receive(self._send(self._entries_of(step), (self.seed, self.epoch), step))

    def batch(self, rows: list[int], epoch: int | None = None) -> Batch:
        """One batch of the given entries of an epoch's plan, which share a length.

        Args:
            rows: B entries of a plan, none of them one that only fills.
            epoch: What ``meta`` says, and what decides about rows in the place of bad ones.

        Raises:
            UsageError: They are no such entries, or of several lengths.
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        turn = self.seed, self.epoch if epoch is None else checked_epoch(epoch)
        return self._transfer.receive(self._send(self._entries.checked(rows), turn, None))

    def batch_of_plan(self, entries: NDArray[np.integer], epoch: int, step: int) -> Batch:
        """See :class:`Epochs`."""
        return self._transfer.receive(self._send(entries, (self.seed, epoch), step))

    def _send(self, entries: NDArray[np.integer], turn: tuple[int, int], step: int | None) -> Sent:
        """A batch on its way to the device; ``turn`` is seed and epoch."""
        (rows, width), (seed, epoch) = self._entries.served(entries), turn
        masks = self.report.batches.small_buckets == "mask"

        def read(some: Sequence[int] | NDArray[np.integer]) -> Batch:
            return self.view.batch(some, width=width)

        _, batch = self._substitutes.read(entries_of(rows) if masks else rows, read, seed=seed, epoch=epoch)
        if masks:
            batch = without_labels(batch, only_fills(rows))
        facts: Batch = {"meta": meta(batch, only_fills(rows), epoch=epoch, step=step)} if self.meta else {}
        if masks and self.format == "plain":
            facts["is_pad_row"] = torch.from_numpy(only_fills(rows))
        return self._transfer.send(token_formatted(batch, self.format) | facts)

    def _tokens_of_entries(self) -> NDArray[np.integer] | None:
        return self.view.known_lengths


def _some_steps(report: PlanReport) -> PlanReport:
    """The report, if it has a step.

    Raises:
        EmptyPlanError: It has none; the message says what would mend it.
    """
    if report.steps:
        return report
    batches, rows = report.batches, sum(bucket.samples for bucket in report.buckets)
    most = max((bucket.least for bucket in report.buckets), default=0) // batches.world_size
    smaller = f", or batch_size={most}" if most else ""
    raise EmptyPlanError(
        f"no full batch can be formed (0 steps per epoch) at batch size {batches.batch_size}"
        f" on {batches.world_size} rank{'s' * (batches.world_size > 1)}",
        where=f"{rows} row{'s' * (rows != 1)} of tokens",
        why=f"a step needs {batches.global_batch_size} rows of one length",
        fix=f"small_buckets='repeat'{smaller}" if rows else "a larger max_length, another overflow=, or more data",
    )
