"""Rows of tokens as a loader reads them: documents, straight into memory that is used again.

Guarantee: every column of a row is written, and nothing else. A label follows from loss spans, never from an id, so
padding with the id that ends a text is safe. Cost: ids are read into their columns at the width they are stored with,
and widened to 64 bits for all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.identity.content import json_hash
from latentcache.loader.buffers import BufferPool
from latentcache.loader.documents import Documents
from latentcache.loader.formats import IGNORED, Batch, check_row_format, row_format
from latentcache.loader.prefetch import ShardUse, read_soon
from latentcache.loader.samples import split
from latentcache.plan.batching import Bucket
from latentcache.plan.documents import Ints, begins, joined, loss_spans, spread
from latentcache.plan.mixing import Mixture
from latentcache.plan.rows import LastChunk, Overflow, plan_rows
from latentcache.plan.samples import BatchIndex, SampleIndex
from latentcache.store.snapshot import Snapshot
from latentcache.value import Value

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

    def where(self, row: int) -> str:
        """File and line of the first document in a row."""
        return self.documents.where(int(self.plan.document[self.plan.pieces(row).start]))


class RowReader:
    """Rows of several parts, as a loader reads them; if ``named``, with their names. Picklable."""

    excluded, has_labels = 0, True
    buffers = 2
    """Buffers of a batch: its tensors, and ids as they are stored."""

    def __init__(
        self, parts: Sequence[RowPart], settings: RowSettings, mixture: Mixture | None = None, named: bool = False
    ) -> None:
        self.parts, self.settings, self.mixture, self.named = tuple(parts), settings, mixture, named
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

    @property
    def snapshots(self) -> list[Snapshot]:
        """The snapshot of each part."""
        return [part.documents.snapshot for part in self.parts]

    def uses(self, rows: Ints) -> Iterator[ShardUse]:
        """The shards of the documents in rows."""
        counts = self.plan.ends[rows] - self.begins[rows]
        owner, pieces = np.repeat(np.arange(len(rows)), counts), spread(self.begins[rows], counts)
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
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.parts[part].where(row - int(self._starts[part]))

    def read(self, batch: BatchIndex, pool: BufferPool, *, on_device: bool) -> Batch:
        """The batch of an index; rows of tokens are the same in every epoch and on every device."""
        return self.batch(batch.rows, pool)

    def batch(self, rows: Ints, pool: BufferPool) -> Batch:
        """A batch of these B rows, (B, L) tensors."""
        width, count, isolated = self.settings.length, len(rows), self.settings.isolated
        counts = self.plan.ends[rows] - self.begins[rows]
        pieces, fronts = spread(self.begins[rows], counts), np.arange(count) * width
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
        dtype, width = self.parts[0].documents.dtype, self.settings.length
        start, length = self.plan.start[pieces], self.plan.length[pieces]
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
        which, shift = spread(first, number), np.repeat(fronts, number)
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

    def notes(self, title: str) -> list[str]:
        """Nothing: every row is served."""
        return []

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

    def finish(self, batch: Batch, form: str | None, *, on_device: bool) -> Batch:
        """Nothing is scaled."""
        return batch
