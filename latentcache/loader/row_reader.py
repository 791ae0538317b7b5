"""Rows of one plan, read from documents into memory that is used again.

Guarantee: every place of a row is written, and nothing else; a label follows from loss spans, never from an id, so
padding with the id that ends a text is safe. Cost: ids are read into their places at the width they are stored with,
the padding beside them, and widened to 64 bits for all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.loader.documents import Documents
from latentcache.loader.formats import IGNORED, Batch
from latentcache.plan.documents import RowPlan, begins, spread
from latentcache.plan.loss_spans import LossSpans, loss_spans
from latentcache.plan.rows import Overflow, padded_rows
from latentcache.store.reader import Gathering, Located, Place

if TYPE_CHECKING:
    from latentcache.loader.rows import Rows

Ints = NDArray[np.int64]


class RowReader:
    """The rows of one plan. Picklable.

    Args:
        documents: The documents.
        plan: The rows.
    """

    def __init__(self, documents: Documents, plan: RowPlan) -> None:
        self.documents, self.plan = documents, plan
        corpus = documents.corpus
        self.lengths = plan.row_lengths()
        self.begins = begins(plan.ends)
        self.columns = _piece_columns(plan)
        self.spans: LossSpans | None = None if corpus.all_learned else loss_spans(corpus, plan)

    def __len__(self) -> int:
        return len(self.plan)

    def where(self, row: int) -> str:
        """File and line of the first document in a row."""
        return self.documents.where(int(self.plan.document[self.plan.pieces(row).start]))

    def pieces(self, documents: Documents, rows: NDArray[np.integer], placed: Placed) -> Pieces:
        """Where rows are.

        Args:
            documents: Those of this reader, with files to read from.
            rows: (n,) numbers of rows.
            placed: Where they belong.

        Raises:
            MissingEntryError: A shard is gone.
        """
        plan, first, lengths = self.plan, self.begins[rows], self.lengths[rows]
        counts = plan.ends[rows] - first
        some = spread(first, counts)
        fronts = placed.front + (placed.width - lengths if placed.left else 0)
        starts, room = np.repeat(fronts, counts) + self.columns[some], np.repeat(placed.room, counts)
        located = documents.located(plan.document[some], plan.start[some], plan.length[some], starts, room)
        ends = np.concatenate(([0], np.cumsum(counts)))
        return Pieces(self, rows, placed, lengths, fronts, ends, starts, located, documents.dtype)


class PendingRowReader:
    """Rows of documents that a streaming build still makes: one per document, waited for batch by batch.

    Args:
        documents: The documents.
        length: Tokens in a row.
        overflow: What happens to longer documents; a policy that gives each document one row.
    """

    def __init__(self, documents: Documents, length: int, overflow: Overflow) -> None:
        self.documents, self._length, self._overflow = documents, length, overflow
        self.lengths = np.zeros(len(documents), dtype=np.int64)  # not known yet
        none = np.empty(0, dtype=np.int64)
        self.plan = RowPlan(length_of_row=length, ends=none, document=none.astype(np.int32),
                            start=none.astype(np.uint32), length=none.astype(np.uint32))  # fmt: skip

    def __len__(self) -> int:
        return len(self.documents)

    def where(self, row: int) -> str:
        """File and line of the document in a row."""
        return self.documents.where(row)

    def pieces(self, documents: Documents, rows: NDArray[np.integer], placed: Placed) -> Pieces:
        """See :meth:`RowReader.pieces`.

        Raises:
            MissingEntryError: A document was rejected.
            NotYetEncodedError: A document did not come in time.
            PlanError: A document is too long, or has no token to learn; file and line are named.
        """
        arrived = documents.arrived(rows)
        plan = padded_rows(arrived.corpus, self._length, overflow=self._overflow, no_loss="error")
        return RowReader(arrived, plan).pieces(arrived, np.arange(len(rows)), placed)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where n rows of several batches belong; each batch has memory of its own."""

    number: NDArray[np.integer]
    """(n,) the number of each among all rows that are read, rising."""
    row: Ints
    """(n,) its row of its batch."""
    width: Ints
    """(n,) tokens in a row of its batch."""
    room: Ints
    """(n,) tokens in its batch."""
    left: bool
    """True if padding is on the left."""

    @property
    def front(self) -> Ints:
        """(n,) where each row begins."""
        return self.row * self.width


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """n rows of one plan, of several batches, and where the P pieces of their documents are."""

    reader: RowReader
    rows: NDArray[np.integer]
    placed: Placed
    lengths: Ints
    """(n,) tokens of each."""
    fronts: Ints
    """(n,) where the tokens of each begin in the memory of its batch."""
    ends: Ints
    """(n + 1,) pieces before each row."""
    starts: Ints
    """(P,) where each piece begins in the memory of its batch."""
    located: Located
    dtype: np.dtype[Any]


class RowBatch:
    """One of several batches that were planned together.

    Args:
        view: Whose rows they are.
        first, last: Its rows among those of all.
        width: Tokens in a row.
        parts: The rows of all.
        named: Its rows, if the batch has their names.
    """

    def __init__(
        self,
        view: Rows,
        first: int,
        last: int,
        width: int,
        parts: list[Pieces],
        named: NDArray[np.integer] | None = None,
    ) -> None:
        self._view, self._first, self._shape, self._named = view, first, (last - first, width), named
        self._parts: list[tuple[Pieces, slice, slice]] = []
        for part in parts:
            begin, end = np.searchsorted(part.placed.number, (first, last)).tolist()
            if begin < end:
                self._parts.append((part, slice(begin, end), slice(int(part.ends[begin]), int(part.ends[end]))))
        self._begun: list[Gathering] | None = None

    def places(self) -> list[Place]:
        """See ``prefetch.Work``."""
        return [place for part, _, pieces in self._parts for place in part.located.places(pieces.start, pieces.stop)]

    def begin(self) -> None:
        """Take memory, have the compiled library begin if it is there, and write what needs no ids."""
        settings, pool, (count, width) = self._view.settings, self._view.pool, self._shape
        places, left = count * width, settings.padding_side == "left"
        memory = pool.take(places * (36 if settings.isolated else 24))
        self._ids, self._mask, self._labels = memory[: places * 24].view(np.int64).reshape(3, *self._shape)
        self._batch: dict[str, NDArray[Any]] = {
            settings.field: self._ids,
            "attention_mask": self._mask,
            "labels": self._labels,
        }
        if settings.isolated:
            self._batch["position_ids"] = memory[places * 24 : places * 32].view(np.int64).reshape(self._shape)
            self._batch["seq_idx"] = memory[places * 32 :].view(np.int32).reshape(self._shape)
        self._begun, self._narrow, self._gaps = [], [], []
        for part, some, pieces in self._parts:
            lengths, at = part.lengths[some], part.placed.row[some]
            fronts, starts = part.fronts[some], part.starts[pieces]
            narrow = self._view.scratch.take(places * part.dtype.itemsize).view(part.dtype)
            narrow[:] = settings.pad_id if 0 <= settings.pad_id <= np.iinfo(part.dtype).max else 0
            begun = Gathering(part.located, pieces.start, pieces.stop, narrow.view(np.uint8))
            begun.begin()
            self._begun.append(begun)
            self._narrow.append((narrow.reshape(self._shape), at, fronts, starts))
            for row, length in zip(at.tolist(), lengths.tolist(), strict=True):
                gap = (row, slice(0, width - length) if left else slice(length, width))
                self._mask[row], self._mask[gap] = 1, 0
                self._gaps.append(gap)
            if settings.isolated:
                counts = np.diff(part.ends[some.start : some.stop + 1])
                ends = np.append(starts[1:], 0)
                last = np.cumsum(counts) - 1
                ends[last] = fronts + lengths
                numbers = np.arange(1, len(starts) + 1) - np.repeat(last - counts + 1, counts)
                self._number(starts.tolist(), ends.tolist(), numbers.tolist())
        for gap in self._gaps if settings.isolated else ():
            length = gap[1].stop - gap[1].start
            self._batch["position_ids"][gap], self._batch["seq_idx"][gap] = self._view.counting[:length], 0

    def finish(self) -> Batch:
        """The batch, (B, L) tensors.

        Raises:
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        if self._begun is None:
            self.begin()
        settings, ids, labels = self._view.settings, self._ids, self._labels
        for begun in self._begun or ():
            begun.finish()
        for (part, some, _), (narrow, at, fronts, starts) in zip(self._parts, self._narrow, strict=True):
            if len(at) == len(ids):
                ids[...] = narrow
            else:
                ids[at] = narrow[at]
            if not 0 <= settings.pad_id <= np.iinfo(narrow.dtype).max:
                for gap in self._gaps:
                    ids[gap] = settings.pad_id
            spans, plan = part.reader.spans, part.reader.plan
            if spans is not None:
                labels[at] = IGNORED
                self._learn_spans(spans, part.rows[some], fronts)
            else:
                if len(at) == len(ids):
                    labels[...] = ids
                else:
                    labels[at] = ids[at]
                labels.reshape(-1)[fronts if plan.cross_document else starts] = IGNORED
        for gap in self._gaps:
            labels[gap] = IGNORED
        batch: Batch = {name: torch.from_numpy(array) for name, array in self._batch.items()}
        self._begun = None
        del self._ids, self._mask, self._labels, self._batch, self._narrow  # memory that is used again
        return batch if self._named is None else batch | {"names": list(map(self._view.where, self._named.tolist()))}

    def _learn_spans(self, spans: LossSpans, rows: NDArray[np.integer], fronts: Ints) -> None:
        """Labels of rows of which only spans are learned."""
        first = begins(spans.ends)[rows]
        number = spans.ends[rows] - first
        which, shift = spread(first, number), np.repeat(fronts, number)
        ids, labels = self._ids.reshape(-1), self._labels.reshape(-1)
        for begin, end in zip(
            (spans.first[which] + shift).tolist(), (spans.last[which] + shift).tolist(), strict=True
        ):
            labels[begin:end] = ids[begin:end]

    def _number(self, starts: list[int], ends: list[int], numbers: list[int]) -> None:
        """Positions from 0 in each document and in the padding; documents from 1, the padding 0."""
        positions, documents = self._batch["position_ids"].reshape(-1), self._batch["seq_idx"].reshape(-1)
        for begin, end, number in zip(starts, ends, numbers, strict=True):
            positions[begin:end] = self._view.counting[: end - begin]
            documents[begin:end] = number


def _piece_columns(plan: RowPlan) -> Ints:
    """(P,) where each piece begins in its row."""
    places = begins(np.cumsum(plan.length, dtype=np.int64))
    fronts = begins(plan.ends)
    return places - np.repeat(places[fronts], plan.ends - fronts) if len(fronts) else places
