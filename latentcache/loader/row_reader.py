"""Rows of one plan, read from documents into arrays that the caller brings.

Guarantee: every place of a row is written, and nothing else; a label follows from loss spans, never from an id, so
padding with the id that ends a text is safe. Cost: ids are read into their places at the width they are stored with,
the padding beside them, and widened to 64 bits for all rows at once; then one copy per row for its mask and two for
its labels, each a call of 0.2 us.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from latentcache.loader.buffers import BufferPool
from latentcache.loader.documents import Arrived, Documents
from latentcache.loader.formats import IGNORED
from latentcache.plan.documents import RowPlan, begins, spread
from latentcache.plan.loss_spans import LossSpans, loss_spans
from latentcache.plan.rows import Overflow, padded_rows

Ids = NDArray[np.int64]
#: Bytes of an id in a row.
_WIDE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RowArrays:
    """Memory of one batch: (B, L) each, C-contiguous."""

    ids: Ids
    attention_mask: Ids
    labels: Ids
    position_ids: Ids | None = None
    seq_idx: NDArray[np.int32] | None = None


def arrays_in(pool: BufferPool, shape: tuple[int, int], *, isolated: bool) -> RowArrays:
    """Memory of one batch, (B, L), in one piece; ``isolated``: with columns that keep documents of a row apart."""
    places = math.prod(shape)
    memory = pool.take(places * (36 if isolated else 24))
    ids, mask, labels = memory[: places * 24].view(np.int64).reshape(3, *shape)
    if not isolated:
        return RowArrays(ids=ids, attention_mask=mask, labels=labels)
    positions = memory[places * 24 : places * 32].view(np.int64).reshape(shape)
    documents = memory[places * 32 :].view(np.int32).reshape(shape)
    return RowArrays(ids=ids, attention_mask=mask, labels=labels, position_ids=positions, seq_idx=documents)


class RowReader:
    """Fills arrays with rows. Picklable.

    Args:
        documents: The documents.
        plan: The rows.
    """

    def __init__(self, documents: Documents | Arrived, plan: RowPlan) -> None:
        self.documents, self.plan = cast("Documents", documents), plan
        corpus = documents.corpus
        self.lengths = plan.row_lengths()
        self._begins = begins(plan.ends)
        self._single = len(plan.document) == len(plan)
        self._columns = _piece_columns(plan)
        self._spans: LossSpans | None = None if corpus.all_learned else loss_spans(corpus, plan)
        self._span_begins = None if self._spans is None else begins(self._spans.ends)
        self._largest = np.iinfo(documents.dtype).max
        self._counting = np.arange(plan.length_of_row, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.plan)

    def where(self, row: int) -> str:
        """File and line of the first document in a row."""
        return self.documents.where(int(self.plan.document[self.plan.pieces(row).start]))

    def fill(
        self,
        documents: Documents | Arrived,
        rows: NDArray[np.integer],
        out: RowArrays,
        at: NDArray[np.int64],
        narrow: NDArray[Any],
        *,
        pad_id: int,
        left: bool,
    ) -> None:
        """Read rows and put them into their places.

        Args:
            documents: Those of this reader, with files to read from.
            rows: (n,) numbers of rows, none longer than ``out`` is wide.
            out: The batch.
            at: (n,) the row of the batch that each becomes.
            narrow: (B, L) memory for ids as they are stored; rows ``at`` of it are written.
            pad_id: The id of the padding.
            left: True if padding is on the left.

        Raises:
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        width, lengths = out.ids.shape[1], self.lengths[rows]
        fronts = at * width + (width - lengths if left else 0)
        pieces, starts = rows, fronts
        if not self._single:
            first = self._begins[rows]
            counts = self.plan.ends[rows] - first
            pieces = spread(first, counts)
            starts = np.repeat(fronts, counts) + self._columns[pieces]
        tokens, places = lengths.tolist(), at.tolist()
        whole = len(places) == len(narrow)  # all rows of the batch: no copies by number
        fits = 0 <= pad_id <= self._largest
        narrow[... if whole else at] = pad_id if fits else 0
        plan = self.plan
        documents.gather(plan.document[pieces], plan.start[pieces], plan.length[pieces], narrow.reshape(-1), starts)
        out.ids[... if whole else at] = narrow if whole else narrow[at]
        if not fits:
            _fill_up(out.ids, places, tokens, pad_id, left=left)
        _put(out, places, tokens, learned=self._spans is None, left=left)
        if self._spans is None:
            out.labels.reshape(-1)[fronts if self.plan.cross_document else starts] = IGNORED
        else:
            self._learn_spans(self._spans, rows, fronts, out)
        if out.position_ids is not None and out.seq_idx is not None:
            self._number(rows, tokens, out.position_ids, out.seq_idx, places)

    def _learn_spans(
        self, spans: LossSpans, rows: NDArray[np.integer], fronts: NDArray[np.int64], out: RowArrays
    ) -> None:
        """Labels of rows of which only spans are learned."""
        assert self._span_begins is not None
        first = self._span_begins[rows]
        number = spans.ends[rows] - first
        which, shift = spread(first, number), np.repeat(fronts, number)
        ids, labels = _as_bytes(out.ids), _as_bytes(out.labels)
        begin, end = (spans.first[which] + shift) * _WIDE, (spans.last[which] + shift) * _WIDE
        for first_byte, last_byte in zip(begin.tolist(), end.tolist(), strict=True):
            labels[first_byte:last_byte] = ids[first_byte:last_byte]

    def _number(
        self,
        rows: NDArray[np.integer],
        tokens: list[int],
        positions: Ids,
        documents: NDArray[np.int32],
        at: list[int],
    ) -> None:
        """Positions from 0 in each document and in the padding; documents from 1, the padding 0."""
        counting, width = self._counting, positions.shape[1]
        for row, number, length in zip(at, rows.tolist(), tokens, strict=True):
            pieces = self.plan.pieces(number)
            columns = [*self._columns[pieces.start : pieces.stop].tolist(), length]
            for index in range(len(columns) - 1):
                begin, end = columns[index], columns[index + 1]
                positions[row, begin:end] = counting[: end - begin]
                documents[row, begin:end] = index + 1
            if length < width:
                positions[row, length:] = counting[: width - length]
                documents[row, length:] = 0


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

    def fill(
        self,
        documents: Documents,
        rows: NDArray[np.integer],
        out: RowArrays,
        at: NDArray[np.int64],
        narrow: NDArray[Any],
        *,
        pad_id: int,
        left: bool,
    ) -> None:
        """See :meth:`RowReader.fill`.

        Raises:
            MissingEntryError: A document was rejected.
            NotYetEncodedError: A document did not come in time.
            PlanError: A document is too long, or has no token to learn; file and line are named.
        """
        arrived = documents.arrived(rows)
        plan = padded_rows(arrived.corpus, self._length, overflow=self._overflow, no_loss="error")
        RowReader(arrived, plan).fill(arrived, np.arange(len(rows)), out, at, narrow, pad_id=pad_id, left=left)


def _piece_columns(plan: RowPlan) -> NDArray[np.int64]:
    """(P,) where each piece begins in its row."""
    places = begins(np.cumsum(plan.length, dtype=np.int64))
    fronts = begins(plan.ends)
    return places - np.repeat(places[fronts], plan.ends - fronts) if len(fronts) else places


@functools.lru_cache(maxsize=16)
def _patterns(width: int) -> tuple[memoryview, memoryview]:
    """Bytes that rows are copied from, quicker than filling a slice: ones, zeros, ones; and labels not learned."""
    marks = np.repeat(np.array([1, 0, 1], dtype=np.int64), width)
    return memoryview(marks.tobytes()), memoryview(np.full(width, IGNORED, dtype=np.int64).tobytes())


def _as_bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _put(out: RowArrays, at: list[int], lengths: list[int], *, learned: bool, left: bool) -> None:
    """Masks; labels as if everything were learned but the padding, or nothing."""
    ids, masks, labels = _as_bytes(out.ids), _as_bytes(out.attention_mask), _as_bytes(out.labels)
    row_bytes = out.labels.shape[1] * _WIDE
    marks, ignored = _patterns(out.labels.shape[1])
    for row, length in zip(at, lengths, strict=True):
        begin, filled = row * row_bytes, length * _WIDE
        end = begin + row_bytes
        if left:
            masks[begin:end] = marks[row_bytes + filled : row_bytes + row_bytes + filled]
            first, last, rest, rest_end = end - filled, end, begin, end - filled
        else:
            masks[begin:end] = marks[row_bytes - filled : row_bytes + row_bytes - filled]
            first, last, rest, rest_end = begin, begin + filled, begin + filled, end
        if learned:
            labels[first:last] = ids[first:last]
            labels[rest:rest_end] = ignored[filled:]
        else:
            labels[begin:end] = ignored


def _fill_up(ids: Ids, at: list[int], lengths: list[int], pad_id: int, *, left: bool) -> None:
    """The padding, if its id does not fit into the type of the store."""
    width = ids.shape[1]
    for row, length in zip(at, lengths, strict=True):
        ids[row, slice(0, width - length) if left else slice(length, width)] = pad_id
