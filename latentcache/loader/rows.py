"""Documents as rows of one length: a map-style data set, and what loaders are made of.

Decides nothing about rows: their plan does. Guarantee: ``len`` is exact and known at once; a batch is as wide as the
view, never as its longest row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from latentcache.errors import PlanError, UsageError
from latentcache.loader.buffers import BufferPool
from latentcache.loader.documents import Documents
from latentcache.loader.formats import Batch, check_row_format, collated
from latentcache.loader.loader import NoSuchRowError, checked_rows
from latentcache.loader.row_reader import RowPart, RowReader, RowSettings
from latentcache.loader.view import View
from latentcache.plan.documents import RowPlan
from latentcache.plan.mixing import Mixture
from latentcache.plan.numbers import is_whole
from latentcache.plan.samples import SampleIndex
from latentcache.store.snapshot import open_leased

#: Columns of a batch beside its tensors that can be asked for, and its tensors.
_EXTRA = ("names", "meta")
_TENSORS = ("attention_mask", "labels", "position_ids", "seq_idx")


class Rows(View, Dataset[Batch]):
    """Rows of tokens. ``rows[i]`` is one; ``rows.loader(...)`` serves epochs of them. Picklable.

    Batches hold the ids by the name of their field (``input_ids``), ``labels`` and ``attention_mask``, (B, L) int64:
    padded with ``pad_id``, -100 and 0. The first token of a document has the label -100. If documents are kept apart,
    there is no ``attention_mask``: ``position_ids`` begin at 0 in each document and in the padding, ``seq_idx``
    (int32) is 1 for the first document of a row and 0 for padding, and ``use_cache`` is False. So ``model(**batch)``
    keeps documents apart in models of transformers.
    """

    def __init__(self, parts: Sequence[RowPart], settings: RowSettings, mixture: Mixture | None = None) -> None:
        self.parts, self.settings, self.mixture = tuple(parts), settings, mixture
        self._reader = RowReader(self.parts, settings, mixture)
        self._pool = BufferPool(4 * self._reader.buffers)

    def __reduce__(self) -> Any:
        return Rows, (self.parts, self.settings, self.mixture)

    def __len__(self) -> int:
        """Rows."""
        return len(self.row_lengths)

    def __repr__(self) -> str:
        dropped = sum(self.tokens_dropped.values())
        return (
            f"Rows({self.settings.kind}={self.length}: {len(self)} rows of {self.name}\n  {self.tokens} tokens,"
            f" {self.packing_efficiency:.1%} full{f', {dropped} tokens dropped' if dropped else ''})"
        )

    @property
    def name(self) -> str:
        """Names of the caches, and of what was chosen of them."""
        return " + ".join(dict.fromkeys(part.name for part in self.parts))

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """(R,) tokens of documents in each row."""
        return self._reader.lengths

    @property
    def length(self) -> int:
        """Tokens in a row, padding included."""
        return self.settings.length

    @property
    def pad_id(self) -> int:
        """Id that rows are padded with."""
        return self.settings.pad_id

    @property
    def row_plans(self) -> tuple[RowPlan, ...]:
        """The plan of each combined part, which puts pieces of documents into rows."""
        return tuple(part.plan for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of documents in all rows."""
        return int(self.row_lengths.sum())

    @property
    def packing_efficiency(self) -> float:
        """Fraction of all columns that hold a token of a document."""
        return self.tokens / (len(self) * self.length) if len(self) else 0.0

    @property
    def dropped(self) -> list[tuple[str, str, int]]:
        """Documents that are not whole in the rows: (reason, file and line, tokens of the document).

        Reasons: ``too_long``, ``truncated`` (a part of it), ``no_loss`` (nothing would be learned of it, or of a
        part), ``last_chunk``. :attr:`tokens_dropped` has the exact number of tokens.
        """
        return [
            (reason, part.documents.where(number), int(part.documents.lengths[number]))
            for part in self.parts
            for reason, dropped in part.plan.dropped.items()
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
        if not is_whole(row, -len(self)) or int(row) >= len(self):
            raise NoSuchRowError(f"row {row!r} of {len(self)} rows", why="rows count from 0", fix="rows[0]")
        return {key: value[0] for key, value in self.batch([int(row) % len(self)]).items()}

    def __getitems__(self, rows: Sequence[int]) -> list[Batch]:
        """Several rows, each a view of one batch; errors as for one row."""
        batch = self.batch(rows)
        return [{key: value[number] for key, value in batch.items()} for number in range(len(rows))]

    def transform(self, examples: Mapping[str, Sequence[int]]) -> Batch:
        """Serve ``datasets.Dataset.from_dict({"row": range(len(rows))}).with_transform(rows.transform)``."""
        return self.batch(examples["row"])

    def batch(self, rows: Any) -> Batch:
        """One batch of these rows, by their numbers from 0.

        Raises:
            NoSuchRowError: There is no such row.
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        return self._reader.batch(checked_rows(rows, len(self)), self._pool)

    def where(self, row: int) -> str:
        """File and line of the first document in a row."""
        return self._reader.where(row)

    def collator(self, format: str | None = None) -> Callable[[Sequence[Batch]], Batch]:
        """Makes a batch of rows, for a ``DataLoader`` (``collate_fn=``) or a trainer (``data_collator=``).

        Raises:
            UsageError: There is no such format for these rows.
        """
        form = check_row_format(format, isolated=self.settings.isolated)
        return partial(collated, form=form, ids=self.settings.field)

    def _warn(self) -> None:
        """Say which documents are left out because nothing would be learned of them; PlanError without a row."""
        dropped = self.tokens_dropped
        if not len(self):
            documents = sum(len(part.documents) for part in self.parts)
            raise PlanError(
                f"{self.name} makes no row of tokens",
                where=f"{documents} documents, {sum(dropped.values())} tokens left out",
                why=", ".join(f"{reason}: {tokens}" for reason, tokens in dropped.items() if tokens),
                fix="longer rows, another overflow, or more data",
            )
        silent = [document for document in self.dropped if document[0] == "no_loss"]
        if silent:
            warnings.warn(
                f"{dropped['no_loss']} tokens of {len(silent)} documents are left out: nothing would be learned of"
                f" them; the first is {silent[0][1]} (rows.dropped lists them)",
                stacklevel=3,
            )

    def _index_of(self, fields: Sequence[str] | None) -> SampleIndex:
        return self._reader.index

    def _combined(self, parts: Sequence[RowPart], mix: Mixture | None) -> Rows:
        return Rows(parts, self.settings, mix)

    def _check_alike(self, other: Rows) -> None:
        if other.settings != self.settings:
            raise UsageError(
                "combine: these rows cannot be in one batch",
                why=f"{self.settings} and {other.settings}",
                fix="make them of caches of one tokenizer, with the same options",
            )

    def _of_snapshot(self, number: int) -> Rows | None:
        """All rows of another snapshot, made likewise; None if documents were chosen or combined."""
        part = self.parts[0]
        documents = part.documents
        if len(self.parts) > 1 or len(documents) != len(documents.snapshot.fields[documents.field]):
            return None
        snapshot = open_leased(documents.snapshot.paths.root, number, documents.snapshot.disk_cache)
        again = Documents(snapshot, documents.field, checksum=documents.checksum)
        return self._combined([RowPart(again, self.settings, part.name)], None)

    def _reader_of(self, fields: Sequence[str] | None) -> RowReader:
        unknown = [name for name in fields or () if name not in (*_EXTRA, self.settings.field, *_TENSORS)]
        if unknown:
            raise UsageError(f"fields: {unknown[0]!r} is unknown", fix=f"use some of {', '.join(_EXTRA)}")
        reader = copy(self._reader)
        reader.named = "names" in (fields or ())
        return reader
