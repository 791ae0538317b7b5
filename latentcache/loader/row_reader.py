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

    def places(self) -> list[Place]:
        """See ``prefetch.Work``."""
        return [place for part, _, pieces in self._parts for place in part.located.places(pieces.start, pieces.stop)]

    def begin(self) -> None:
        """Nothing: what is made of ids is ten times their size, and memory that is held early leaves the cache."""

    def finish(self) -> Batch:
        """The batch, (B, L) tensors.

        Raises:
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        settings, (count, width) = self._view.settings, self._shape
        places, isolated = count * width, settings.isolated
        memory = self._view.pool.take(places * (36 if isolated else 24))
        ids, mask, labels = memory[: places * 24].view(np.int64).reshape(3, *self._shape)
        batch: dict[str, NDArray[Any]] = {settings.field: ids, "attention_mask": mask, "labels": labels}
        if isolated:
            batch["position_ids"] = memory[places * 24 : places * 32].view(np.int64).reshape(self._shape)
            batch["seq_idx"] = memory[places * 32 :].view(np.int32).reshape(self._shape)
        for part, some, pieces in self._parts:
            narrow = self._view.scratch.take(places * part.dtype.itemsize).view(part.dtype)
            is_narrow = 0 <= settings.pad_id <= np.iinfo(part.dtype).max
            narrow[:] = settings.pad_id if is_narrow else 0
            Gathering(part.located, pieces.start, pieces.stop, narrow.view(np.uint8)).finish()
            at, fronts, starts = part.placed.row[some], part.fronts[some], part.starts[pieces]
            whole, lengths = len(at) == count, part.lengths[some]
            own, found = slice(None) if whole else at, narrow.reshape(self._shape)
            ids[own] = found if whole else found[at]
            mask[own] = 1
            gaps = [
                (row, slice(0, width - length) if settings.padding_side == "left" else slice(length, width))
                for row, length in zip(at.tolist(), lengths.tolist(), strict=True)
                if length < width
            ]
            for gap in () if is_narrow else gaps:
                ids[gap] = settings.pad_id
            spans = part.reader.spans
            if spans is None:
                labels[own] = ids[own]
                labels.reshape(-1)[fronts if part.reader.plan.cross_document else starts] = IGNORED
            else:
                labels[own] = IGNORED
                _learn_spans(ids, labels, spans, part.rows[some], fronts)
            if isolated:
                ends = np.append(starts[1:], 0)
                counts = np.diff(part.ends[some.start : some.stop + 1])
                last = np.cumsum(counts) - 1
                ends[last] = fronts + lengths
                numbers = np.arange(1, len(starts) + 1) - np.repeat(last - counts + 1, counts)
                positions, documents = batch["position_ids"].reshape(-1), batch["seq_idx"].reshape(-1)
                for begin, end, number in zip(starts.tolist(), ends.tolist(), numbers.tolist(), strict=True):
                    positions[begin:end] = self._view.counting[: end - begin]  # from 0 in each document
                    documents[begin:end] = number  # from 1; the padding is 0
            for gap in gaps:
                mask[gap], labels[gap] = 0, IGNORED
                if isolated:
                    batch["position_ids"][gap] = self._view.counting[: gap[1].stop - gap[1].start]
                    batch["seq_idx"][gap] = 0
        made: Batch = {name: torch.from_numpy(array) for name, array in batch.items()}
        return made if self._named is None else made | {"names": list(map(self._view.where, self._named.tolist()))}


def _learn_spans(
    ids: NDArray[np.int64], labels: NDArray[np.int64], spans: LossSpans, rows: NDArray[np.integer], fronts: Ints
) -> None:
    """Labels of rows of which only spans are learned."""
    first = begins(spans.ends)[rows]
    number = spans.ends[rows] - first
    which, shift = spread(first, number), np.repeat(fronts, number)
    ids, labels = ids.reshape(-1), labels.reshape(-1)
    for begin, end in zip((spans.first[which] + shift).tolist(), (spans.last[which] + shift).tolist(), strict=True):
        labels[begin:end] = ids[begin:end]


def _piece_columns(plan: RowPlan) -> Ints:
    """(P,) where each piece begins in its row."""
    places = begins(np.cumsum(plan.length, dtype=np.int64))
    fronts = begins(plan.ends)
    return places - np.repeat(places[fronts], plan.ends - fronts) if len(fronts) else places
