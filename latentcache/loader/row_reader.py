"""Rows of tokens as a loader reads them: documents, straight into their places in memory that is used again.

Guarantee: every place of a row is written, and nothing else; a label follows from loss spans, never from an id, so
padding with the id that ends a text is safe. Cost: ids are read into their places at the width they are stored with,
the padding beside them, and widened to 64 bits for all rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.identity.content import content_hash, json_hash
from latentcache.loader.buffers import BufferPool
from latentcache.loader.documents import Documents
from latentcache.loader.formats import IGNORED, Batch, check_row_format, row_format
from latentcache.loader.samples import split
from latentcache.plan.batching import Bucket
from latentcache.plan.documents import Ints, begins, loss_spans, spread
from latentcache.plan.mixing import Mixture
from latentcache.plan.rows import plan_rows
from latentcache.plan.samples import BatchIndex, SampleIndex
from latentcache.store.reader import Gathering, Located, Place
from latentcache.value import Value


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


class RowPart:
    """The rows of the documents of one cache. Picklable.

    Args:
        documents: The documents. Of a streaming build each is one row, and waited for batch by batch.
        options: What the rows follow from: arguments of ``plan_rows``, as JSON values.
        name: Of the cache.
    """

    def __init__(self, documents: Documents, options: Mapping[str, Any], name: str = "") -> None:
        self.documents, self._options, self.name = documents, options, name
        corpus = documents.corpus
        self.plan = plan = plan_rows(corpus, **options)
        self.lengths = np.zeros(len(documents), dtype=np.int64) if documents.pending else plan.row_lengths()
        self._begins, places = begins(plan.ends), begins(np.cumsum(plan.length, dtype=np.int64))
        self._columns = places - np.repeat(places[self._begins], plan.ends - self._begins)
        """(P,) where each piece begins in its row."""
        self.spans = None if corpus.all_learned else loss_spans(corpus, plan)

    def identity(self) -> bytes:
        """16 bytes that name these rows."""
        return json_hash({**self._options, "documents": self.documents.identity.hex()})

    def where(self, row: int) -> str:
        """File and line of the first document in a row."""
        pending = self.documents.pending
        return self.documents.where(row if pending else int(self.plan.document[self._begins[row]]))

    def fresh(self) -> RowPart:
        """The same rows with files of its own."""
        other = copy(self)
        other.documents = self.documents.fresh()
        return other

    def ready(self, rows: Ints) -> tuple[RowPart, Ints]:
        """A part that can be read, and the numbers of these rows in it.

        Raises:
            MissingEntryError: A document of a streaming build was rejected.
            NotYetEncodedError: A document did not come in time.
            PlanError: A document is too long, or has no token to learn; file and line are named.
        """
        if not self.documents.pending:
            return self, rows
        return RowPart(self.documents.arrived(rows), self._options), np.arange(len(rows))

    def pieces(self, rows: Ints, at: Ints, fronts: Ints, room: Ints) -> Pieces:
        """Where the documents of (n,) rows are; the rest is (n,) too.

        Args:
            rows: Their numbers.
            at: Their numbers among all rows that are read, rising.
            fronts: Where the tokens of each begin in the memory of its batch.
            room: Tokens in that memory.
        """
        plan, first = self.plan, self._begins[rows]
        counts = plan.ends[rows] - first
        some = spread(first, counts)
        starts = np.repeat(fronts, counts) + self._columns[some]
        located = self.documents.located(
            plan.document[some], plan.start[some], plan.length[some], starts, np.repeat(room, counts)
        )
        return Pieces(self, rows, at, np.concatenate(([0], np.cumsum(counts))), starts, located)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """n rows of one part, of several batches, and the P pieces of their documents."""

    part: RowPart
    rows: Ints
    at: Ints
    """(n,) the number of each row among all rows that are read."""
    ends: Ints
    """(n + 1,) pieces before each row."""
    starts: Ints
    """(P,) where each piece begins in the memory of its batch."""
    located: Located


class RowReader:
    """Rows of several parts, as a loader reads them. Picklable; opens files on first use in each process.

    ``named``: batches have the names of their rows.
    """

    excluded, has_labels = 0, True

    def __init__(
        self, parts: Sequence[RowPart], settings: RowSettings, mixture: Mixture | None = None, named: bool = False
    ) -> None:
        self.parts, self.settings, self.mixture, self.named = tuple(parts), settings, mixture, named
        self._starts = np.cumsum([0, *(len(part.lengths) for part in self.parts)])
        self.lengths: NDArray[np.int64] = np.concatenate([part.lengths for part in self.parts])
        self.plans = not any(part.documents.pending for part in self.parts)
        """True if batches can be planned before they are wanted."""
        self.index = SampleIndex(
            bucket=np.searchsorted(settings.lengths, self.lengths).astype(np.int32),
            buckets=tuple(Bucket(label=f"{one} tokens", dims={"length": one}) for one in settings.lengths),
            identify=self._identify,
            mixture=mixture,
            names_of=lambda rows: [f"row {row} ({self.where(row)})" for row in rows.tolist()],
            lengths=self.lengths if len(settings.lengths) > 1 else None,
            snapshot=self.parts[0].documents.snapshot.number,
        )
        self._open(4, "cpu")

    def _open(self, slots: int, device: str) -> None:
        self.pool, self.scratch = BufferPool(slots, pinned=device == "cuda"), BufferPool(slots)
        self.counting = np.arange(self.settings.lengths[-1], dtype=np.int64)

    def __reduce__(self) -> Any:
        return RowReader, (self.parts, self.settings, self.mixture, self.named)

    def fresh(self, *, slots: int, device: str) -> RowReader:
        """The same rows with files and memory of its own."""
        other = copy(self)
        other.parts = tuple(part.fresh() for part in self.parts)
        other._open(slots, device)
        return other

    def _identify(self) -> str:
        """Hex digits that name the rows and how they are served."""
        whole = b"".join(part.identity() for part in self.parts) + repr(self.settings).encode()
        return content_hash(whole).hex()

    def where(self, row: int) -> str:
        """File and line of the first document in a row."""
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.parts[part].where(row - int(self._starts[part]))

    def works(self, batches: Sequence[BatchIndex]) -> list[RowBatch]:
        """Batches of one epoch; rows of tokens are the same in every epoch."""
        return self.planned([one.rows for one in batches], [self.settings.lengths[one.bucket] for one in batches])

    def planned(self, rows: Sequence[Ints], widths: Sequence[int]) -> list[RowBatch]:
        """Batches of these rows and widths, which are planned together."""
        sizes, every = np.array(list(map(len, rows))), np.concatenate(rows)
        ends, wide = np.cumsum([0, *sizes]), np.repeat(widths, sizes)
        ready = [(at, *self.parts[number].ready(local)) for number, at, local in split(self._starts, every)]
        lengths = np.empty(len(every), dtype=np.int64)
        for at, part, local in ready:
            lengths[at] = part.lengths[local]
        fronts = (np.arange(len(every)) - np.repeat(ends[:-1], sizes)) * wide
        if self.settings.padding_side == "left":
            fronts += wide - lengths
        room = np.repeat(sizes, sizes) * wide
        found = [part.pieces(local, at, fronts[at], room[at]) for at, part, local in ready]
        return [
            RowBatch(self, some, slice(first, first + len(some)), width, lengths, fronts, found)
            for first, some, width in zip(ends.tolist(), rows, widths, strict=False)
        ]

    def check_format(self, name: str | None) -> str | None:
        """See ``formats.check_row_format``."""
        return check_row_format(name, isolated=self.settings.isolated)

    def complete(
        self, batch: Batch, is_pad: NDArray[np.bool_] | None, numbers: dict[str, Any] | None, name: str | None
    ) -> Batch:
        """The batch in a format; if wanted with marks of padding rows, and with numbers, which do not count these.

        Padding rows have no labels; they keep ids and attention: some kernels give nan for a row without.
        """
        if is_pad is not None:
            marks = torch.from_numpy(is_pad)
            batch["labels"][marks] = IGNORED
            batch["is_pad_row"] = marks
        if numbers is not None:
            mask = batch["attention_mask"].numpy()
            tokens = int((mask if is_pad is None else mask[~is_pad]).sum())
            learned = int(np.count_nonzero(batch["labels"].numpy() != IGNORED))
            batch["meta"] = numbers | {"tokens": tokens, "trainable_tokens": learned}
        return row_format(batch, name or "plain", self.settings.field)

    def finish(self, batch: Batch) -> Batch:
        """Nothing is scaled."""
        return batch


class RowBatch:
    """One of several batches that were planned together: ``own`` are its rows among those of all batches."""

    def __init__(
        self, reader: RowReader, rows: Ints, own: slice, width: int, lengths: Ints, fronts: Ints, parts: list[Pieces]
    ) -> None:
        self._reader, self._rows, self._first, self._shape = reader, rows, own.start, (len(rows), width)
        self._lengths, self._fronts = lengths[own], fronts[own]
        self._parts: list[tuple[Pieces, slice, slice]] = []
        for part in parts:
            begin, end = np.searchsorted(part.at, (own.start, own.stop)).tolist()
            if begin < end:
                self._parts.append((part, slice(begin, end), slice(int(part.ends[begin]), int(part.ends[end]))))

    def places(self) -> list[Place]:
        """See ``prefetch.Work``."""
        return [place for part, _, pieces in self._parts for place in part.located.places(pieces.start, pieces.stop)]

    def begin(self) -> None:
        """Nothing: what is made of ids is ten times their size, and memory that is held early leaves the cache."""

    def finish(self) -> Batch:
        """The batch, (B, L) tensors."""
        reader, settings, (count, width) = self._reader, self._reader.settings, self._shape
        places, isolated = count * width, settings.isolated
        memory = reader.pool.take(places * (36 if isolated else 24))
        ids, mask, labels = memory[: places * 24].view(np.int64).reshape(3, *self._shape)
        batch: dict[str, NDArray[Any]] = {settings.field: ids, "attention_mask": mask, "labels": labels}
        if isolated:
            batch["position_ids"] = memory[places * 24 : places * 32].view(np.int64).reshape(self._shape)
            batch["seq_idx"] = memory[places * 32 :].view(np.int32).reshape(self._shape)
        dtype = reader.parts[0].documents.dtype
        narrow = reader.scratch.take(places * dtype.itemsize).view(dtype).reshape(self._shape)
        is_narrow = 0 <= settings.pad_id <= np.iinfo(dtype).max
        narrow[:] = settings.pad_id if is_narrow else 0
        for part, _, pieces in self._parts:
            Gathering(part.located, pieces.start, pieces.stop, narrow.reshape(-1).view(np.uint8)).finish()
        ids[:], mask[:] = narrow, 1
        for part, some, pieces in self._parts:
            self._learn(part, some, part.starts[pieces], ids, labels)
            if isolated:
                self._number(part, some, part.starts[pieces], batch)
        for row, length in enumerate(self._lengths.tolist()):
            if length < width:
                gap = (row, slice(0, width - length) if settings.padding_side == "left" else slice(length, width))
                mask[gap], labels[gap] = 0, IGNORED
                if not is_narrow:
                    ids[gap] = settings.pad_id
                if isolated:
                    batch["position_ids"][gap] = reader.counting[: width - length]
                    batch["seq_idx"][gap] = 0
        made: Batch = {name: torch.from_numpy(array) for name, array in batch.items()}
        return made | {"names": list(map(reader.where, self._rows.tolist()))} if reader.named else made

    def _learn(
        self, pieces: Pieces, some: slice, starts: Ints, ids: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> None:
        """Labels of the rows of one part."""
        at, part = pieces.at[some] - self._first, pieces.part
        own = slice(None) if len(at) == len(ids) else at
        spans, fronts = part.spans, self._fronts[at]
        if spans is None:
            labels[own] = ids[own]
            labels.reshape(-1)[fronts if part.plan.cross_document else starts] = IGNORED
            return
        labels[own] = IGNORED
        rows = pieces.rows[some]
        first = begins(spans.ends)[rows]
        number = spans.ends[rows] - first
        which, shift = spread(first, number), np.repeat(fronts, number)
        ids, labels = ids.reshape(-1), labels.reshape(-1)
        for begin, end in zip(
            (spans.first[which] + shift).tolist(), (spans.last[which] + shift).tolist(), strict=True
        ):
            labels[begin:end] = ids[begin:end]

    def _number(self, pieces: Pieces, some: slice, starts: Ints, batch: Mapping[str, NDArray[Any]]) -> None:
        """Positions in each document, from 0, and numbers of documents in each row, from 1."""
        at, counts = pieces.at[some] - self._first, np.diff(pieces.ends[some.start : some.stop + 1])
        last = np.cumsum(counts) - 1
        ends = np.append(starts[1:], 0)
        ends[last] = self._fronts[at] + self._lengths[at]
        numbers = np.arange(1, len(starts) + 1) - np.repeat(last - counts + 1, counts)
        positions, documents = batch["position_ids"].reshape(-1), batch["seq_idx"].reshape(-1)
        for begin, end, number in zip(starts.tolist(), ends.tolist(), numbers.tolist(), strict=True):
            positions[begin:end] = self._reader.counting[: end - begin]
            documents[begin:end] = number
