"""Documents as rows of one length: a map-style data set, and what loaders are made of.

Decides nothing about rows: their plan does. Guarantee: ``len`` is exact and known at once; a batch is as wide as the
view, or as one of its allowed lengths, never as its longest row; a batch is one piece of memory, and its rows are
views of it, so a collator that is given all of them gives it back without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from latentcache.errors import PlanError, UsageError
from latentcache.fields.protocol import FieldRecipe
from latentcache.identity.content import content_hash, json_hash
from latentcache.loader.buffers import BufferPool
from latentcache.loader.documents import Documents
from latentcache.loader.formats import IGNORED, Batch, RowCollator, check_row_format, row_format, segments
from latentcache.loader.loader import BatchIndex, Loader, NoSuchRowError, checked_index, checked_rows
from latentcache.loader.row_reader import PendingRowReader, Placed, RowBatch, RowReader
from latentcache.loader.samples import split
from latentcache.loader.substitute import OnError
from latentcache.plan.batching import BatchPlan, Bucket, PlanReport, Remainder, trainer_steps
from latentcache.plan.documents import RowPlan
from latentcache.plan.length_buckets import fitting
from latentcache.plan.mixing import Mixture
from latentcache.plan.samples import Ints, SampleIndex, plan_report
from latentcache.value import Value

#: Columns of a batch beside its tensors that can be asked for.
_EXTRA = ("names", "meta")
_TENSORS = ("attention_mask", "labels", "position_ids", "seq_idx")


class RowSettings(Value):
    """How rows are served. Rows of equal settings can be in one batch."""

    kind: str
    """``pack``, ``pad`` or ``chunk``."""
    field: str
    recipe_id: bytes
    lengths: tuple[int, ...]
    """Allowed lengths, rising."""
    pad_id: int
    padding_side: str = "right"
    isolated: bool = False
    """True if documents of a row are kept apart: batches have ``position_ids`` and ``seq_idx``."""


@dataclass(frozen=True, slots=True, eq=False)
class RowPart:
    """Rows of the documents of one cache."""

    reader: RowReader | PendingRowReader
    facts: Mapping[str, Any]
    """What the rows follow from, as JSON values."""
    name: str

    def identity(self) -> bytes:
        """16 bytes that name these rows."""
        return json_hash({**self.facts, "documents": self.reader.documents.identity.hex()})


class Rows(Dataset[Batch]):
    """Rows of tokens. ``rows[i]`` is one; ``rows.loader(...)`` serves epochs of them. Picklable.

    Batches hold the ids by the name of their field (``input_ids``), ``attention_mask`` and ``labels``, (B, L) int64:
    padded with ``pad_id``, 0 and -100. The first token of a document has the label -100. If documents are kept apart,
    also ``position_ids``, which begin at 0 in each document and in the padding, and ``seq_idx``, int32: 1 for the
    first document of a row, 0 for the padding.
    """

    excluded = 0

    def __init__(self, parts: Sequence[RowPart], settings: RowSettings, *, mixture: Mixture | None = None) -> None:
        self.parts, self.settings, self.mixture = tuple(parts), settings, mixture
        counts = [len(part.reader) for part in self.parts]
        self._starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self.row_lengths: NDArray[np.int64] = np.concatenate([part.reader.lengths for part in self.parts])
        """(R,) tokens of documents in each row."""
        several = len(settings.lengths) > 1
        self.index = SampleIndex(
            bucket=fitting(self.row_lengths, settings.lengths) if several else np.zeros(len(self), dtype=np.int32),
            buckets=tuple(Bucket(label=f"{one} tokens", dims={"length": one}) for one in settings.lengths),
            identify=self._identify,
            mixture=mixture,
            names_of=self.names_of,
            lengths=self.row_lengths if several else None,
            snapshot=self.parts[0].reader.documents.snapshot.number,
        )
        self._open(4, "cpu")

    def __len__(self) -> int:
        """Rows."""
        return int(self._starts[-1])

    def __repr__(self) -> str:
        names = ", ".join(part.name for part in self.parts[:3]) + (", ..." if len(self.parts) > 3 else "")
        dropped = sum(self.tokens_dropped.values())
        return (
            f"Rows({self.settings.kind}={self.length}: {len(self)} rows of {names}\n  {self.tokens} tokens,"
            f" {self.packing_efficiency:.1%} full{f', {dropped} tokens dropped' if dropped else ''})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self.settings == other.settings and self._identify() == other._identify()

    def __hash__(self) -> int:
        return hash((self.settings, len(self), int(self.row_lengths.sum())))

    @property
    def kind(self) -> str:
        """``pack``, ``pad`` or ``chunk``."""
        return self.settings.kind

    @property
    def length(self) -> int:
        """Tokens in a row, padding included: the longest allowed length."""
        return self.settings.lengths[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Allowed lengths of a batch, rising."""
        return self.settings.lengths

    @property
    def isolated(self) -> bool:
        """True if documents of a row do not attend to each other."""
        return self.settings.isolated

    @property
    def pad_id(self) -> int:
        """Id that rows are padded with."""
        return self.settings.pad_id

    @property
    def padding_side(self) -> str:
        """``right`` or ``left``."""
        return self.settings.padding_side

    @property
    def recipe(self) -> FieldRecipe | None:
        """What the documents were made by."""
        return self.parts[0].reader.documents.recipe

    @property
    def row_plans(self) -> tuple[RowPlan, ...]:
        """The plan of each combined part: which pieces of which documents are in each row."""
        return tuple(part.reader.plan for part in self.parts)

    @property
    def documents(self) -> tuple[Documents, ...]:
        """The documents of each combined part."""
        return tuple(part.reader.documents for part in self.parts)

    @property
    def name(self) -> str:
        """Name of the cache, and of the sources that were chosen of it."""
        return self.parts[0].name

    @property
    def tokens(self) -> Any:
        """Tokens of documents in all rows."""
        return int(self.row_lengths.sum())

    @property
    def packing_efficiency(self) -> float:
        """Fraction of all places that hold a token of a document."""
        return self.tokens / (len(self) * self.length) if len(self) else 0.0

    @property
    def dropped(self) -> list[tuple[str, str, int]]:
        """What is in no row: (reason, file and line, tokens of that document), document by document.

        Reasons: ``too_long``, ``truncated`` (a part of it), ``no_loss`` (nothing would be learned of it, or of a
        part), ``last_chunk``. :attr:`tokens_dropped` has the exact number of tokens.
        """
        return [
            (reason, part.reader.documents.where(number), int(part.reader.documents.lengths[number]))
            for part in self.parts
            for reason, dropped in part.reader.plan.dropped.items()
            for number in dropped.documents.tolist()
        ]

    @property
    def tokens_dropped(self) -> dict[str, int]:
        """Tokens that are in no row, by reason."""
        plans = self.row_plans
        return {reason: sum(plan.dropped[reason].tokens for plan in plans) for reason in plans[0].dropped}

    def __getitem__(self, row: int) -> Batch:
        """One row, (L,) tensors of :attr:`length` tokens; a negative number counts from the end.

        Raises:
            NoSuchRowError: There is no such row (an IndexError).
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        return {
            key: value[0]
            for key, value in self._batch(np.array([checked_index(row, len(self))]), self.length).items()
        }

    def __getitems__(self, rows: Sequence[int]) -> list[Batch]:
        """Several rows, each a view of one batch; errors as for one row."""
        batch = self.batch(rows)
        return [{key: value[place] for key, value in batch.items()} for place in range(len(rows))]

    def transform(self, examples: Mapping[str, Sequence[int]]) -> Batch:
        """For ``datasets.Dataset.from_dict({"row": range(len(rows))}).with_transform(rows.transform)``."""
        return self.batch(examples["row"])

    def batch(self, rows: Any, *, width: int | None = None) -> Batch:
        """One batch of these rows.

        Args:
            rows: Their numbers, from 0.
            width: Tokens in a row; by default the smallest allowed length that holds all of them.

        Raises:
            NoSuchRowError: There is no such row.
            UsageError: A row is longer than ``width``.
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        asked = checked_rows(rows, len(self))
        longest = int(self.row_lengths[asked].max())
        if width is None:
            width = next(one for one in self.lengths if one >= longest)
        elif width < longest:
            long = int(asked[int(np.argmax(self.row_lengths[asked]))])
            raise UsageError(
                f"width={width}: row {long} has {longest} tokens", where=self.where(long), fix=f"width={self.length}"
            )
        return self._batch(asked, width)

    def where(self, row: int) -> str:
        """File and line of the first document in a row."""
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.parts[part].reader.where(row - int(self._starts[part]))

    def names_of(self, rows: Ints) -> list[str]:
        """``row N (file:line)`` of rows."""
        return [f"row {row} ({self.where(row)})" for row in rows.tolist()]

    def segments(self, batch: Batch) -> dict[str, Any]:
        """``cu_seqlens``, (n + 1,) int32, and ``max_seqlen`` of a batch as one row; padding counts."""
        ends, longest = segments(batch["position_ids"])
        return {"cu_seqlens": ends, "max_seqlen": longest}

    def collator(self, format: str | None = None) -> RowCollator:
        """Makes a batch of rows, for a ``DataLoader`` (``collate_fn=``) or a trainer (``data_collator=``).

        Raises:
            UsageError: There is no such format for these rows.
        """
        return RowCollator(format, isolated=self.isolated, ids=self.settings.field)

    def plan(self, *, batch_size: int, world_size: int = 1, remainder: Remainder = "repeat") -> PlanReport:
        """What an epoch would do, before training starts; a bucket is an allowed length.

        Raises:
            UsageError: A number or policy is not allowed.
            PlanError: The policy ``error`` met rows that do not divide.
        """
        batches = BatchPlan(batch_size=batch_size, world_size=world_size, remainder=remainder)
        return plan_report(self.index, batches)

    def steps(
        self, epochs: float, *, batch_size: int, world_size: int = 1, grad_accum: int = 1, drop_last: bool = False
    ) -> int:
        """Optimizer steps of a trainer that shuffles these rows itself; see ``plan.batching.trainer_steps``."""
        sizes = {"batch_size": batch_size, "world_size": world_size, "grad_accum": grad_accum}
        return trainer_steps(len(self), epochs, **sizes, drop_last=drop_last)

    def loader(
        self,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        remainder: Remainder = "repeat",
        fields: Sequence[str] = (),
        format: str | None = None,
        prefetch: int = 2,
        device: str | torch.device = "cpu",
        on_error: OnError = "error",
    ) -> Loader:
        """Batches of one length, in an order that depends on nothing but the seed and the epoch.

        Args:
            batch_size: Rows per rank and step.
            seed: As ``Cache.loader``, as are the next two.
            rank: Part of each step that this process gets.
            world_size: Number of ranks.
            remainder: As ``Cache.loader``; with ``pad`` the last batch is filled with rows whose labels are all -100,
                and a ``plain`` batch says which, as ``is_pad_row``, (B,) bool.
            fields: Columns beside the tensors: ``names`` (file and line of the first document of each row), ``meta``
                (numbers of the batch: ``epoch``, ``step_in_epoch``, ``tokens``, ``trainable_tokens``).
            format: What a batch calls things: ``plain``, ``transformers``, ``flat`` (one long row, as TRL's
                padding-free collator) or ``torchtitan``.
            prefetch: Batches that are made ahead.
            device: Where tensors are delivered.
            on_error: ``error`` (default), or ``substitute``: another row of its length takes the place of one that
                cannot be read, with a warning, and is counted in ``loader.substituted``.

        Raises:
            UsageError: A number, policy, format or device is not allowed.
            DeviceError: The device is not available.
            EmptyPlanError: An epoch would have no step.
            PlanError: The policy ``error`` met rows that do not divide.
        """
        asked = [fields] if isinstance(fields, str) else list(fields)
        unknown = [one for one in asked if one not in (*_EXTRA, self.settings.field, *_TENSORS)]
        if unknown:
            raise UsageError(f"fields: {unknown[0]!r} is unknown", fix=f"use some of {', '.join(_EXTRA)}")
        return Loader(
            RowsReader(self, names="names" in asked),
            batch_size=batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            remainder=remainder,
            format=format,
            prefetch=prefetch,
            device=device,
            on_error=on_error,
            meta="meta" in asked,
            title=f"{self.kind}={self.length} rows of {self.name}",
        )

    def fresh(self, *, slots: int, device: str) -> Rows:
        """The same rows with files and memory of its own."""
        other = Rows.__new__(Rows)
        vars(other).update(vars(self))
        other._open(slots, device)
        return other

    def planned(
        self, rows: Sequence[NDArray[np.integer]], widths: Sequence[int], *, names: bool = False
    ) -> list[RowBatch]:
        """Batches of these rows and widths, which are planned together."""
        sizes = np.array([len(some) for some in rows])
        ends, wide = np.cumsum([0, *sizes]), np.repeat(widths, sizes)
        row, room = np.arange(ends[-1]) - np.repeat(ends[:-1], sizes), np.repeat(sizes, sizes) * wide
        left = self.settings.padding_side == "left"
        parts = [
            self.parts[number].reader.pieces(
                self._documents[number], local, Placed(at, row[at], wide[at], room[at], left)
            )
            for number, at, local in split(self._starts, np.concatenate(rows))
        ]
        return [
            RowBatch(self, first, first + len(some), width, parts, some if names else None)
            for first, some, width in zip(ends.tolist(), rows, widths, strict=False)
        ]

    def _batch(self, rows: NDArray[np.int64], width: int) -> Batch:
        return self.planned([rows], [width])[0].finish()

    def _identify(self) -> str:
        whole = b"".join(part.identity() for part in self.parts) + repr(self.settings).encode()
        return content_hash(whole).hex()

    def _open(self, slots: int, device: str) -> None:
        self._documents = [part.reader.documents.fresh() for part in self.parts]
        self.pool, self.scratch = BufferPool(slots, pinned=device == "cuda"), BufferPool(slots)
        self.counting = np.arange(self.length, dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("pool", "scratch", "counting", "_documents")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open(4, "cpu")


class RowsReader:
    """Rows as a loader reads them: see ``loader.Reader``.

    Args:
        rows: The view.
        names: True if batches have the names of their rows.
    """

    excluded = 0

    def __init__(self, rows: Rows, *, names: bool = False) -> None:
        self._rows, self._names = rows, names
        self.index = rows.index
        pending = any(one.pending for one in rows.documents)
        self.tokens: NDArray[np.int64] | None = None if pending else rows.row_lengths

    @property
    def plans(self) -> bool:
        """True unless a build still makes documents."""
        return self.tokens is not None

    def plan(self, batches: Sequence[BatchIndex]) -> list[RowBatch]:
        """See ``loader.Reader``."""
        widths = [self._rows.lengths[batch.bucket] for batch in batches]
        return self._rows.planned([batch.rows for batch in batches], widths, names=self._names)

    def padded(self, batch: Batch, is_pad: NDArray[np.bool_]) -> Batch:
        """No labels in padding rows; they keep ids and attention: some kernels give nan for a row without."""
        marks = torch.from_numpy(is_pad)
        if is_pad.any():
            batch["labels"][marks] = IGNORED
        return batch | {"is_pad_row": marks}

    def meta(self, batch: Batch, is_pad: NDArray[np.bool_] | None) -> dict[str, Any]:
        """Tokens of documents in this batch, and those that are learned; padding rows do not count."""
        mask = batch["attention_mask"].numpy()
        trainable = int(np.count_nonzero(batch["labels"].numpy() != IGNORED))
        return {"tokens": int((mask if is_pad is None else mask[~is_pad]).sum()), "trainable_tokens": trainable}

    def check_format(self, name: str | None) -> str | None:
        """See ``formats.check_row_format``."""
        return check_row_format(name, isolated=self._rows.isolated)

    def formatted(self, batch: Batch, name: str | None) -> Batch:
        """See ``formats.row_format``."""
        return row_format(batch, name or "plain", self._rows.settings.field)

    def finish(self, batch: Batch) -> Batch:
        """Nothing is scaled."""
        return batch

    def names_of(self, rows: Ints) -> list[str]:
        """See ``Rows.names_of``."""
        return self._rows.names_of(rows)

    def fresh(self, *, slots: int, device: str) -> RowsReader:
        """The same rows with files and memory of its own."""
        return RowsReader(self._rows.fresh(slots=slots, device=device), names=self._names)


def no_rows(documents: Documents, plan: RowPlan, name: str) -> PlanError:
    """The error of a view without a row."""
    return PlanError(
        f"{name} makes no row of tokens",
        where=f"{len(documents)} documents, {plan.tokens_dropped} tokens left out",
        why=", ".join(f"{reason}: {part.tokens}" for reason, part in plan.dropped.items() if part.tokens),
        fix="longer rows, another overflow=, or more data",
    )


__all__ = ["NoSuchRowError", "RowPart", "RowSettings", "Rows", "RowsReader", "no_rows"]
