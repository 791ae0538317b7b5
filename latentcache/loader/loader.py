"""The loader: an iterable of batches with an exact length, one shape per batch, every entry proven.

Guarantee: what a batch holds was decided by the plan before the first read. ``len`` is the whole epoch, also after a
resume. Batches count when they are delivered, not when they are read ahead. Batches are read ahead by threads,
straight into memory that is used again once nothing refers to it.

Trainers are given ``loader`` itself, unprepared, or ``DataLoader(loader, batch_size=None)``. For worker processes,
``loader.sampler`` yields a :class:`BatchIndex` per step in the training process, and ``loader.dataset`` makes batches
of them in workers.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data import Sampler as TorchSampler

from latentcache.errors import CacheNotFoundError, PlanError, UsageError
from latentcache.fields.registry import load
from latentcache.loader.formats import Batch, check_carried
from latentcache.loader.memory import BufferPool, InFlight, Transfer
from latentcache.loader.prefetch import Reader, ShardFeed, blocks_of, read_ahead
from latentcache.loader.ranks import check_double_sharding, check_ranks, find_ranks
from latentcache.loader.substitute import Substitutes
from latentcache.plan.batching import MAX_STEP, BatchPlan, PlanReport
from latentcache.plan.documents import Ints
from latentcache.plan.numbers import is_whole, real, whole
from latentcache.plan.samples import BatchIndex, EpochPlan, Epochs, Position, SampleIndex
from latentcache.store.gather import reader_kind

_SHOWN = 3


class Loader(IterableDataset[Batch]):
    """Batches of one epoch. Iterating again repeats the epoch; ``set_epoch`` changes it. Picklable.

    Made by ``cache.loader(...)`` and ``rows.loader(...)``, which say what the options mean; ``batches`` are those of
    ``BatchPlan``. With ``with`` its files are closed at the end; without, when it is forgotten.
    """

    def __init__(
        self,
        reader: Reader,
        fields: Sequence[str],
        batches: Mapping[str, Any],
        *,
        title: str,
        of_snapshot: Callable[[int], Reader | None],
        seed: int | None,
        rank: int | None,
        world_size: int | None,
        format: str | None,
        prefetch: int,
        device: str | torch.device,
        on_error: str,
        shuffle_block: int | None,
    ) -> None:
        self.rank, self.world_size, self._ranks_from = find_ranks(rank, world_size)
        plan = BatchPlan(**batches, world_size=self.world_size)
        seed = None if seed is None else whole("seed", seed, -(2**63))
        self._prefetch = whole("prefetch", prefetch, 0, MAX_STEP)
        self._transfer = Transfer(device)
        self._title = title
        self._meta = "meta" in fields
        self.format = reader.check_format(format)
        if plan.remainder == "pad" and not reader.has_labels and self.format is not None:
            raise UsageError(
                f"remainder='pad': not with format={self.format!r}",
                why="a model would learn from the padding: these batches have no labels",
                fix="remainder='repeat', 'drop' or 'partial', or format='plain', which has is_pad",
            )
        self._reader, self._pool = reader, self._buffers(reader, pinned=self._transfer.device.type == "cuda")
        self._shuffle_block = None if shuffle_block is None else whole("shuffle_block", shuffle_block, 1)
        self._epochs = Epochs(self._planned(reader), plan)
        self._position = Position(seed)
        self._substitutes = Substitutes(on_error)
        self._of_snapshot = of_snapshot
        self._passes: weakref.WeakSet[Generator[InFlight]] = weakref.WeakSet()
        self._sampled = False
        """True if a DataLoader serves this epoch."""
        self._named = False
        """True if the next epoch was chosen with ``set_epoch``."""
        self._warn()
        check_carried(self.format, fields)

    def __len__(self) -> int:
        """Batches of an epoch on this rank (the same on every rank)."""
        return self.report.steps

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(load("latentcache.report.page:html_of")(self))

    def __repr__(self) -> str:
        report = self.report
        excluded = f", {self.excluded} excluded" if self.excluded else ""
        reader = reader_kind()
        slow = "" if reader.kind == "compiled" else f"\n  slow reader: {reader.why}; fix: {reader.fix}"
        return (
            f"Loader({len(self)} batches of {report.batches.words}, rank {self.rank} of {self.world_size}"
            f" ({self._ranks_from}), epoch {self.epoch}, seed {self.seed}\n"
            f"  {report.samples_used} samples of {self._title}{excluded};"
            f" remainder={report.batches.remainder!r}{report.beside}{slow})"
        )

    @property
    def report(self) -> PlanReport:
        """Steps and samples of an epoch, bucket by bucket."""
        return self._epochs.report

    @property
    def seed(self) -> int | None:
        """Seed of the order, draws and flips; after ``load_state_dict`` the seed of the checkpoint."""
        return self._position.seed

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next iteration serves; after a checkpoint at an epoch's end, the next one."""
        return self._position.epoch

    @property
    def excluded(self) -> int:
        """Samples that lack a requested field."""
        return self._reader.excluded

    @property
    def substituted(self) -> Mapping[str, int]:
        """Sample -> how often another took its place, with ``on_error="substitute"``.

        Counted in this process as batches are read, also those read ahead; a worker of a ``DataLoader`` counts its
        own.
        """
        return dict(self._substitutes.counts)

    @property
    def sampler(self) -> Sampler:
        """Yields a :class:`BatchIndex` per step, for a ``DataLoader`` with worker processes over :attr:`dataset`."""
        return Sampler(self)

    @property
    def dataset(self) -> BatchDataset:
        """Makes batches in worker processes.

        ``DataLoader(loader.dataset, sampler=loader.sampler, batch_size=None, num_workers=N)``.
        """
        return BatchDataset(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration serves; a resumed epoch that is named again goes on.

        Raises:
            UsageError: It is not a whole number from 0, or accelerate would deal the batches of this rank out again.
        """
        check_double_sharding(self.world_size)
        self._named = True
        if whole("epoch", epoch, 0) != self.epoch:
            self._position = Position(self.seed, int(epoch))
            self._sampled = False

    def remaining(self) -> int:
        """Batches of this rank that are left of the epoch."""
        return self._epochs.remaining(self._position)

    def steps(self, epochs: float, grad_accum: int = 1) -> int:
        """Optimizer steps of a number of epochs; the rest at the end of an epoch is a step too.

        Counted as the Trainer of transformers counts (``set_initial_training_values``).

        Args:
            epochs: Epochs, also a fraction.
            grad_accum: Batches of this rank per optimizer step.

        Raises:
            UsageError: A number is not allowed.
        """
        per_epoch = math.ceil(len(self) / whole("grad_accum", grad_accum, 1))
        return math.ceil(real("epochs", epochs, 0, fix="steps(2)") * per_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training as plain values: batches delivered, not read ahead. Equal on all ranks.

        Raises:
            UsageError: A ``DataLoader`` served batches of this epoch, which this object does not see.
        """
        if self._sampled:
            raise UsageError(
                "the loader does not see which batches a DataLoader delivered",
                why=f"its position would say that nothing was served of epoch {self.epoch}",
                fix="save the state_dict() of a torchdata StatefulDataLoader, or iterate over the loader itself",
                slug="served-by-workers",
            )
        return self._epochs.state(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was made, also with another batch size or number of ranks.

        The next iteration serves the rest of that epoch, or the next epoch if it was complete: :attr:`epoch` says
        which. ``len`` stays the whole epoch. If the cache has another snapshot by now, the one of the checkpoint is
        opened again.

        Raises:
            PlanError: The checkpoint belongs to other samples or settings, is of a newer version, or is broken; or
                its snapshot is gone.
        """
        self._open_snapshot(state)
        self._load(state)

    def _open_snapshot(self, state: Mapping[str, Any]) -> None:
        """Read the snapshot of a checkpoint, if this one has other samples."""
        number: Any = state.get("snapshot")
        index = self._reader.index
        is_same = number == index.snapshot or state.get("plan_id") == index.identity
        if self._of_snapshot is None or is_same or not is_whole(number, 1):
            return
        try:
            reader = self._of_snapshot(number)
        except CacheNotFoundError as error:
            raise PlanError(
                f"this checkpoint belongs to snapshot {number}, which is gone, or to another cache",
                where=error.where,
                why=error.why,
                fix="start the epoch again with set_epoch",
                slug="resume-mismatch",
            ) from error
        if reader is not None and reader.index.identity == state.get("plan_id"):
            self.close()
            self._reader = reader
            self._epochs = Epochs(self._planned(reader), self.report.batches)

    def _load(self, state: Mapping[str, Any]) -> None:
        named = self.epoch if self._named else None
        self._position, self._sampled, self._named = self._epochs.load(state), False, False
        if named not in (None, self.epoch) and self.epoch != state["epoch"]:
            warnings.warn(
                f"the checkpoint was made at the end of epoch {state['epoch']}: epoch {self.epoch} is served, not"
                f" {named} as set_epoch said before it was loaded",
                stacklevel=3,
            )

    def __iter__(self) -> Iterator[Batch]:
        """Serve the epoch, or the rest of it after ``load_state_dict``.

        Raises:
            CorruptEntryError: An entry fails its check; it is named with its shard and the fix.
            MissingEntryError: A shard is gone.
            EmptyPlanError: The rest of a loaded epoch fills no batch.
            UsageError: The loader was closed in the middle, its rank is not that of torch.distributed, it is in a
                worker of a ``DataLoader``, or accelerate would deal the batches of this rank out again.
            CacheDamagedError: More samples are bad than may be replaced.
        """
        check_ranks(self.rank, self.world_size, self._ranks_from)
        check_double_sharding(self.world_size)
        worker = get_worker_info()
        if worker is not None and worker.dataset is self:
            raise UsageError(
                "a loader in a worker of a DataLoader",
                why="the loader reads ahead in threads; every worker would serve the whole epoch",
                fix="num_workers=0 (dataloader_num_workers=0 of a Trainer), or"
                " DataLoader(loader.dataset, sampler=loader.sampler, batch_size=None, num_workers=N)",
            )
        position, plan = self._epochs.begin(self._position)
        self._position, self._sampled, self._named, served = position, False, False, 0
        feed = ShardFeed(self._reader, plan)
        works = (partial(self._step, plan, feed, step) for step in range(len(plan)))
        # A bad sample is said and counted once.
        batches = read_ahead(works, self._prefetch, in_order=self._substitutes.active)
        self._passes.add(batches)
        for batch in batches:
            position.delivered += 1  # before it is handed out: a checkpoint made then has this batch
            served += 1
            yield self._transfer.receive(batch)
        if served < len(plan):
            raise UsageError(
                f"the loader was closed after {served} of {len(plan)} batches",
                why="an iteration that ends early would look like a whole epoch",
                fix="close it after the epoch, or iterate again",
            )

    def batch(self, rows: Any, epoch: int | None = None) -> Batch:
        """One batch of these samples, which share a bucket, as an epoch serves them.

        Args:
            rows: B numbers of samples, from 0.
            epoch: Decides draws and flips; by default that of the next iteration.

        Raises:
            UsageError: They are not such numbers, or of several buckets.
            CorruptEntryError: An entry fails its check.
            MissingEntryError: A shard is gone.
        """
        index = self._reader.index
        chosen = checked_rows(rows, len(index.bucket))
        epoch = self.epoch if epoch is None else whole("epoch", epoch, 0)
        buckets = index.bucket[chosen]
        bucket = int(buckets.max())
        if int(buckets.min()) != bucket:
            row_of = dict(zip(buckets.tolist(), chosen.tolist(), strict=True))
            raise UsageError(
                f"rows: samples of {len(row_of)} buckets",
                where=", ".join(f"{row}: {index.buckets[number]}" for number, row in sorted(row_of.items())[:8]),
                why="all samples of a batch have one shape",
                fix="ask for the samples of one bucket at a time",
            )
        return self._make(BatchIndex(epoch, -1, chosen, bucket, None, self.seed or 0))

    def _make(self, index: BatchIndex) -> Batch:
        return self._transfer.receive(self._in_flight(index))

    def _planned(self, reader: Reader) -> SampleIndex:
        """The samples of a reader as epochs are planned of them."""
        index = reader.index
        size = self._shuffle_block
        return index if size is None else replace(index, blocks=blocks_of(reader, len(index.bucket), size))

    def _step(self, plan: EpochPlan, feed: ShardFeed, step: int) -> InFlight:
        with feed.reading(step):
            return self._in_flight(plan.batch(step, self.rank))

    def _in_flight(self, index: BatchIndex) -> InFlight:
        """A batch on its way to the device."""
        reader = self._reader
        is_pad = index.is_pad
        on_device = self._transfer.device.type != "cpu"

        def read(rows: Ints) -> Batch:
            again = index.again if len(rows) == len(index.rows) else None  # else a sample of its own
            return reader.read(replace(index, rows=rows, again=again), self._pool, on_device=on_device)

        batch = self._substitutes.read(reader.index, index, read)
        if is_pad is None and self.report.batches.remainder == "pad":
            is_pad = np.zeros(len(index.rows), dtype=np.bool_)
        if is_pad is not None:
            batch["is_pad"] = torch.from_numpy(is_pad)
        if self._meta:
            batch["meta"] = {"epoch": index.epoch, "step_in_epoch": index.step if index.step >= 0 else None}
        finish = partial(reader.finish, form=self.format, on_device=on_device)
        return self._transfer.send(reader.complete(batch, self.format), finish)

    def close(self) -> None:
        """Stop reading ahead and let go of files and memory. Twice is once; iterating again opens them again.

        Batches that were handed out stay as they are. A loader that is forgotten needs no closing.
        """
        for batches in list(self._passes):
            with contextlib.suppress(ValueError):  # another thread is in it; it goes on
                batches.close()
        self._reader.close()
        self._pool = self._buffers(self._reader, pinned=self._transfer.device.type == "cuda")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """A few KiB: another process reads the columns by itself."""
        return {**vars(self), "_epochs": self.report.batches, "_passes": None, "_of_snapshot": None, "_pool": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _passes=weakref.WeakSet())
        self._epochs = Epochs(self._planned(self._reader), state["_epochs"])
        self._pool = self._buffers(self._reader, pinned=False)  # CUDA may not work in this process

    def _buffers(self, reader: Reader, *, pinned: bool) -> BufferPool:
        """Memory for batches of this loader."""
        return BufferPool((self._prefetch + 2) * reader.buffers, pinned=pinned)

    def _warn(self) -> None:
        """Say what a user would not expect: excluded samples, batches of padding, buckets that are mostly repeats."""
        blank, overfilled, lines = self.report.blank_batches, self.report.overfilled, self._reader.notes(self._title)
        if blank:
            lines.append(
                f"{blank} batches of all ranks hold padding only: a mean over their labels is nan; divide the sum of"
                " losses by the labels of all ranks, as the Trainer of transformers does, or take a batch_size of 2"
                " or more, fewer ranks, or remainder='repeat' or 'drop'"
            )
        if overfilled:
            more = f"; {len(overfilled) - _SHOWN} more buckets too" if len(overfilled) > _SHOWN else ""
            lines.append(
                f"{'; '.join(overfilled[:_SHOWN])}{more}: use remainder='partial' or 'drop', a smaller"
                " batch_size, or fewer buckets"
            )
        for line in lines:
            warnings.warn(line, stacklevel=5)


class Sampler(TorchSampler[BatchIndex]):
    """Yields a :class:`BatchIndex` per step of this rank, in the training process; iterators have a state_dict."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __repr__(self) -> str:
        return f"Sampler(of {self._loader})"

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration serves; see ``Loader.set_epoch``."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> SamplerIterator:
        return SamplerIterator(self._loader)


class SamplerIterator:
    """One iteration over a sampler; torchdata's ``StatefulDataLoader`` saves and loads its state."""

    def __init__(self, loader: Loader) -> None:
        check_ranks(loader.rank, loader.world_size, loader._ranks_from)
        loader._sampled = True
        self._loader = loader
        self._position = replace(loader._position)
        self._next: Iterator[BatchIndex] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchIndex:
        if self._next is None:
            self._position, plan = self._loader._epochs.begin(self._position)
            self._loader._position.is_loaded = False  # the next iteration serves a whole epoch
            self._loader._named = False
            self._next = self._batches(plan, ShardFeed(self._loader._reader, plan))
        index = next(self._next)
        self._position.delivered += 1
        return index

    def _batches(self, plan: EpochPlan, feed: ShardFeed) -> Iterator[BatchIndex]:
        for step in range(len(plan)):
            feed.reach(step)  # here, where the order is known: workers only read
            yield plan.batch(step, self._loader.rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this iteration."""
        return self._loader._epochs.state(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved. Raises PlanError as ``Loader.load_state_dict``."""
        loader = self._loader
        loader._load(state)  # workers may have this snapshot already
        self._position = loader._position
        self._next = None
        loader._position = Position(loader.seed, loader.epoch)
        loader._sampled = True


class BatchDataset(Dataset[Batch]):
    """Makes batches of what :class:`Sampler` yields. Picklable: workers of a ``DataLoader`` have a copy each."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __repr__(self) -> str:
        return f"BatchDataset(of {self._loader})"

    def __len__(self) -> int:
        """Samples that an epoch uses; trainers report it."""
        return self._loader.report.samples_used

    def set_epoch(self, epoch: int) -> None:
        """For accelerate, which names the epoch before it starts workers; see ``Loader.set_epoch``."""
        self._loader.set_epoch(epoch)

    def __getitem__(self, index: Any) -> Batch:
        """The batch of a :class:`BatchIndex`. Raises UsageError if it is something else, and as ``Loader.batch``."""
        if not isinstance(index, BatchIndex):
            raise UsageError(
                f"a batch of latentcache was asked for by index {index!r}",
                why="accelerate or a DataLoader put its own sampler in place of the loader's: buckets, order and"
                " ranks would be lost",
                fix="iterate over the loader itself and keep it out of accelerator.prepare, or use"
                " DataLoader(loader.dataset, sampler=loader.sampler, batch_size=None)",
                slug="foreign-sampler",
            )
        buckets = self._loader._reader.index.bucket
        if int(index.rows.max()) >= len(buckets) or (buckets[index.rows] != index.bucket).any():
            raise UsageError(
                "a batch was asked for by the sampler of other samples",
                why="it holds samples that this data set does not have, or has in another bucket",
                fix="give a DataLoader the dataset and the sampler of one loader",
                slug="foreign-sampler",
            )
        return self._loader._make(index)


def checked_rows(rows: Any, count: int) -> NDArray[np.int64]:
    """(B,) numbers of samples below ``count``, as a caller gives them."""
    try:
        numbers = np.asarray(rows)
    except (TypeError, ValueError, RuntimeError):  # lists of several lengths, a tensor that numpy cannot take
        numbers = np.empty(0)
    is_list = numbers.ndim == 1 and numbers.dtype.kind in "iu" and numbers.size
    if not is_list or numbers.min() < 0 or numbers.max() >= count:
        problem = f"rows={reprlib.repr(rows)}: must be whole numbers from 0 to {count - 1}"
        raise NoSuchRowError(problem, fix="batch([0])")
    return numbers.astype(np.int64, copy=False)


class NoSuchRowError(UsageError, IndexError):
    """A row or sample that does not exist."""
