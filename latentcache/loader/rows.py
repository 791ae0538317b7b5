"""Documents as rows of one length: a map-style data set, and what loaders are made of.

Guarantee: ``len`` is exact and known at once. A batch is as wide as the view, never as its longest row. Every column
of a row is written, and nothing else. A label follows from loss spans, never from an id, so padding with the id that
ends a text is safe. Cost: ids are read into memory that is used again, at the width they are stored with, and widened
to 64 bits for all rows at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from latentcache.errors import PlanError, UsageError
from latentcache.identity.content import json_hash
from latentcache.loader.documents import Documents
from latentcache.loader.formats import IGNORED, Batch, check_row_format, collated, row_format
from latentcache.loader.loader import NoSuchRowError, checked_rows
from latentcache.loader.memory import BufferPool
from latentcache.loader.prefetch import Reader, ShardUse, read_soon
from latentcache.loader.samples import split
from latentcache.loader.view import View
from latentcache.plan.batching import Bucket
from latentcache.plan.documents import Ints, LastChunk, Overflow, begins, joined, loss_spans, plan_rows, spread
from latentcache.plan.mixing import Mixture
from latentcache.plan.numbers import is_whole
from latentcache.plan.samples import BatchIndex, SampleIndex
from latentcache.store.snapshot import open_leased
from latentcache.value import Value

#: Columns of a batch beside its tensors that can be asked for, and its tensors.
_EXTRA = ("names", "meta")
_TENSORS = ("attention_mask", "labels", "position_ids", "seq_idx")
#: Bytes of a token in a batch: its id, its label, and its position or mask.
_TOKEN_BYTES = 3 * 8


class RowSettings(Value):
    """Settings for rows of tokens. Rows of equal settings can be in one batch."""

    kind: str
    """``pack``, ``pad`` or ``chunk``."""
    field: str
    recipe_id: bytes
    length: int
    """Tokens in a row, padding included."""
    pad_id: int
    overflow: Overflow
    last_chunk: LastChunk
    cross_document: bool

    @property
    def isolated(self) -> bool:
        """True if documents of a row are kept apart: batches have ``position_ids`` and ``seq_idx``, and no mask."""
        return self.kind == "pack" or not self.cross_document


class RowPart:
    """The rows of the documents of one cache. Picklable."""

    def __init__(self, documents: Documents, settings: RowSettings, name: str = "") -> None:
        self.documents, self.name = documents, name
        self.plan = plan_rows(
            documents.corpus,
            settings.kind,
            settings.length,
            overflow=settings.overflow,
            last_chunk=settings.last_chunk,
            cross_document=settings.cross_document,
        )
        self.lengths = self.plan.row_lengths()


class RowReader(Reader):
    """Rows of several parts, as a loader reads them; if ``named``, with their names. Picklable."""

    has_labels = True
    buffers = 2
    """Buffers of a batch: its tensors, and ids as they are stored."""

    def __init__(
        self, parts: Sequence[RowPart], settings: RowSettings, mixture: Mixture | None = None, named: bool = False
    ) -> None:
        self.parts, self.settings, self.mixture, self.named = tuple(parts), settings, mixture, named
        self.snapshots = [part.documents.snapshot for part in self.parts]
        self._starts = np.cumsum([0, *(len(part.lengths) for part in self.parts)])
        self.lengths: NDArray[np.int64] = np.concatenate([part.lengths for part in self.parts])
        length = settings.length
        self.index = SampleIndex(
            bucket=np.zeros(len(self.lengths), dtype=np.int32),
            buckets=(Bucket(label=f"{length} tokens", length=length, tokens=length, bytes=length * _TOKEN_BYTES),),
            parts=tuple((part.name, len(part.lengths)) for part in self.parts),
            identify=self._identify,
            mixture=mixture,
            names_of=lambda rows: [f"row {row} ({self.where(row)})" for row in rows.tolist()],
            snapshot=self.parts[0].documents.snapshot.number,
        )
        self._documents = np.cumsum([0, *(len(part.documents.lengths) for part in self.parts)])
        plans = [
            replace(part.plan, document=part.plan.document + before) if before else part.plan
            for part, before in zip(self.parts, self._documents.tolist(), strict=False)
        ]
        self.plan = plan = joined(plans, ("document", "start", "length"))
        self.begins, first = begins(plan.ends), begins(np.cumsum(plan.length, dtype=np.int64))
        self._columns = first - np.repeat(first[self.begins], plan.ends - self.begins)
        """(P,) where each piece begins in its row."""
        learned = all(part.documents.corpus.all_learned for part in self.parts)
        spans = [loss_spans(part.documents.corpus, part.plan) for part in self.parts if not learned]
        self.spans = None if learned else joined(spans, ("first", "last"))
        self.counting = np.arange(settings.length, dtype=np.int64)

    def __reduce__(self) -> Any:
        return RowReader, (self.parts, self.settings, self.mixture, self.named)

    def uses(self, rows: Ints) -> Iterator[ShardUse]:
        """The shards of the documents in rows."""
        counts = self.plan.ends[rows] - self.begins[rows]
        owner = np.repeat(np.arange(len(rows)), counts)
        pieces = spread(self.begins[rows], counts)
        for number, at, document in split(self._documents, self.plan.document[pieces]):
            documents = self.parts[number].documents
            yield ShardUse(number, documents.snapshot, owner[at], *documents.shards(document))

    def close(self) -> None:
        """Close the files; they are opened again when more is read."""
        for part in self.parts:
            part.documents.close()

    def _identify(self) -> str:
        """Hex digits that name the rows and how they are served."""
        documents = [part.documents.identity.hex() for part in self.parts]
        return json_hash([*documents, repr(self.settings)]).hex()

    def where(self, row: int) -> str:
        """File and line of the first document in a row."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        part = self.parts[number]
        pieces = self.parts[number].plan.pieces(row - int(self._starts[number]))
        return part.documents.where(int(part.plan.document[pieces.start]))

    def read(self, batch: BatchIndex, pool: BufferPool, *, on_device: bool) -> Batch:
        """The batch of an index; rows of tokens are the same in every epoch and on every device."""
        return self.batch(batch.rows, pool)

    def batch(self, rows: Ints, pool: BufferPool) -> Batch:
        """A batch of these B rows, (B, L) tensors."""
        width, count, isolated = self.settings.length, len(rows), self.settings.isolated
        counts = self.plan.ends[rows] - self.begins[rows]
        pieces = spread(self.begins[rows], counts)
        fronts = np.arange(count) * width
        starts = np.repeat(fronts, counts) + self._columns[pieces]
        memory = pool.take(count * width * (28 if isolated else 24))
        ids, labels, third = memory[: count * width * 24].view(np.int64).reshape(3, count, width)
        ids[:] = self._ids(pieces, starts, count, pool)
        self._learn(ids.reshape(-1), labels.reshape(-1), rows, fronts, starts)
        batch: dict[str, NDArray[Any]] = {self.settings.field: ids, "labels": labels}
        lengths = self.lengths[rows]
        if isolated:  # an attention mask would have models of transformers ignore where documents begin
            numbers = memory[count * width * 24 :].view(np.int32).reshape(count, width)
            batch |= {"position_ids": third, "seq_idx": numbers}
            last = np.cumsum(counts) - 1
            ends = np.append(starts[1:], 0)
            ends[last] = fronts + lengths
            self._number(third.reshape(-1), numbers.reshape(-1), starts, ends, np.repeat(last - counts + 1, counts))
        else:
            batch["attention_mask"] = third
            third[:] = 1
        for row, length in enumerate(lengths.tolist()):
            if length < width:
                gap = row, slice(length, width)
                ids[gap], labels[gap] = self.settings.pad_id, IGNORED
                third[gap] = self.counting[: width - length] if isolated else 0
                if isolated:
                    numbers[gap] = 0
        tensors: Batch = {name: torch.from_numpy(array) for name, array in batch.items()}
        return tensors | {"names": list(map(self.where, rows.tolist()))} if self.named else tensors

    def _ids(self, pieces: Ints, starts: Ints, count: int, pool: BufferPool) -> NDArray[Any]:
        """(B, L) ids as they are stored, of pieces of documents that begin at ``starts``."""
        dtype = self.parts[0].documents.dtype
        width = self.settings.length
        start = self.plan.start[pieces]
        length = self.plan.length[pieces]
        located = [
            self.parts[number].documents.located(document, start[at], length[at], starts[at], count * width)
            for number, at, document in split(self._documents, self.plan.document[pieces])
        ]
        read_soon([piece for part in located for piece in part.byte_ranges()])
        memory = pool.take(count * width * dtype.itemsize)
        for part in located:
            part.read(memory)
        return memory.view(dtype).reshape(count, width)

    def _learn(
        self, ids: NDArray[np.int64], labels: NDArray[np.int64], rows: Ints, fronts: Ints, starts: Ints
    ) -> None:
        """Labels of all ids; rows begin at ``fronts`` and their pieces at ``starts``."""
        if self.spans is None:
            labels[:] = ids
            labels[fronts if self.plan.cross_document else starts] = IGNORED
            return
        labels[:] = IGNORED
        first = begins(self.spans.ends)[rows]
        number = self.spans.ends[rows] - first
        which = spread(first, number)
        shift = np.repeat(fronts, number)
        bounds = (self.spans.first[which] + shift).tolist(), (self.spans.last[which] + shift).tolist()
        for begin, end in zip(*bounds, strict=True):
            labels[begin:end] = ids[begin:end]

    def _number(
        self, positions: NDArray[np.int64], documents: NDArray[np.int32], starts: Ints, ends: Ints, before: Ints
    ) -> None:
        """Positions in each document, from 0, and numbers of documents in each row, from 1.

        ``before`` (P,): pieces before the row of each piece.
        """
        numbers = np.arange(1, len(starts) + 1) - before
        for begin, end, number in zip(starts.tolist(), ends.tolist(), numbers.tolist(), strict=True):
            positions[begin:end] = self.counting[: end - begin]
            documents[begin:end] = number

    def check_format(self, name: str | None) -> str | None:
        """See ``formats.check_row_format``."""
        return check_row_format(name, isolated=self.settings.isolated)

    def complete(self, batch: Batch, form: str | None) -> Batch:
        """The batch in a format. Padding rows have no labels, and ``meta`` does not count them.

        They keep ids and attention: some kernels give nan for a row without.
        """
        marks: Any = batch.pop("is_pad", None)
        if marks is not None:
            batch["labels"][marks] = IGNORED
            batch["is_pad_row"] = marks
        if "meta" in batch:
            held = batch["seq_idx" if self.settings.isolated else "attention_mask"].numpy() > 0
            tokens = int((held if marks is None else held[~marks.numpy()]).sum())
            learned = int(np.count_nonzero(batch["labels"].numpy() != IGNORED))
            batch["meta"] |= {"tokens": tokens, "trainable_tokens": learned}
        return row_format(batch, form or "plain", self.settings.field)


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
        return len(self._reader.lengths)

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
    def length(self) -> int:
        """Tokens in a row, padding included."""
        return self.settings.length

    @property
    def pad_id(self) -> int:
        """Id that rows are padded with."""
        return self.settings.pad_id

    @property
    def tokens(self) -> int:
        """Tokens of documents in all rows."""
        return int(self._reader.lengths.sum())

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
        plans = [part.plan for part in self.parts]
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
