"""Rows of one plan, read from one store into arrays that the caller brings.

Decides nothing: what stands where is in the plan. Guarantee: every place of a row is written, and nothing else; a
label follows from the runs with loss, never from an id, so filling with the id that ends a text is safe; a document
that fails its check is named with its file and line. Cost: ids are read into their places at the width they are
stored with, the filling beside them, and widened to 64 bits for all rows at once; then one copy a row for its mask
and two for its labels, each a call of 0.2 µs. docs/adr/0028.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CorruptEntryError
from latentcache.loader.ring import BatchRing
from latentcache.plan.rows import Corpus, RowPlan, begins, row_lengths, spread
from latentcache.plan.runs import LabelRuns, label_runs
from latentcache.store.documents import TokenStore

#: What a label is where nothing is learned (``torch.nn.CrossEntropyLoss(ignore_index=)``, also of transformers).
IGNORED = -100
Ids = NDArray[np.int64]
#: Bytes of an id in a row.
_WIDE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RowArrays:
    """Memory of one batch: (B, L) each, C-contiguous."""

    input_ids: Ids
    attention_mask: Ids
    labels: Ids
    position_ids: Ids | None = None
    seq_idx: NDArray[np.int32] | None = None


def arrays_in(ring: BatchRing, shape: tuple[int, int], *, isolated: bool) -> RowArrays:
    """Memory of one batch, (B, L), in one piece; ``isolated`` with what keeps documents of a row apart."""
    places = math.prod(shape)
    if not isolated:
        ids, mask, labels = ring.take(places * 24).view(np.int64).reshape(3, *shape)
        return RowArrays(input_ids=ids, attention_mask=mask, labels=labels)
    memory = ring.take(places * 36)
    ids, mask, labels, positions = memory[: places * 32].view(np.int64).reshape(4, *shape)
    documents = memory[places * 32 :].view(np.int32).reshape(shape)
    return RowArrays(input_ids=ids, attention_mask=mask, labels=labels, position_ids=positions, seq_idx=documents)


class RowReader:
    """Fills arrays with rows. Picklable; copies share nothing but files that may be shared.

    Args:
        store: The documents.
        corpus: Their lengths and runs.
        plan: The rows.
        dtype: Type of the ids in the store.
    """

    def __init__(self, store: TokenStore, corpus: Corpus, plan: RowPlan, *, dtype: str) -> None:
        self.store, self.plan, self.dtype = store, plan, np.dtype(dtype)
        self.lengths = row_lengths(plan)
        self._begins = begins(plan.ends)
        self._single = len(plan.document) == len(plan)
        self._columns = _piece_columns(plan)
        self._runs: LabelRuns | None = None if corpus.whole else label_runs(corpus, plan)
        self._run_begins = None if self._runs is None else begins(self._runs.ends)
        self._largest = np.iinfo(self.dtype).max
        self._counting = np.arange(plan.max_length, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.plan)

    def where(self, row: int) -> str:
        """File and line of what stands first in a row."""
        return self.store.documents.where(int(self.plan.document[self.plan.pieces(row).start]))

    def tokens_of(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """(n,) tokens of some rows."""
        lengths: NDArray[np.int64] = self.lengths[rows]
        return lengths

    def fill(
        self,
        rows: NDArray[np.integer],
        lengths: NDArray[np.int64],
        out: RowArrays,
        at: NDArray[np.int64],
        narrow: NDArray[Any],
        *,
        pad_id: int,
        left: bool,
    ) -> None:
        """Read rows and put them into their places.

        Args:
            rows: (n,) numbers of rows, none longer than ``out`` is wide.
            lengths: (n,) their tokens.
            out: The batch.
            at: (n,) which row of the batch each becomes.
            narrow: (B, L) memory for ids as they are stored; rows ``at`` of it are written.
            pad_id: The id of the filling.
            left: Whether rows end at the right edge.

        Raises:
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        width = out.input_ids.shape[1]
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
        self._gather(pieces, narrow.reshape(-1), starts)
        out.input_ids[... if whole else at] = narrow if whole else narrow[at]
        if not fits:
            _fill_up(out.input_ids, places, tokens, pad_id, left=left)
        _put(out, places, tokens, learned=self._runs is None, left=left)
        if self._runs is None:
            out.labels.reshape(-1)[fronts if self.plan.crossing else starts] = IGNORED
        else:
            self._learn_runs(rows, fronts, out)
        if out.position_ids is not None:
            self._number(rows, tokens, out, places)

    def _gather(self, pieces: NDArray[np.integer], flat: NDArray[Any], at: NDArray[np.int64]) -> None:
        plan = self.plan
        document, start, length = plan.document[pieces], plan.start[pieces], plan.length[pieces]
        try:
            self.store.gather(document, start, length, flat, at)
        except CorruptEntryError as error:
            raise self._named(document, error) from error

    def _named(self, document: NDArray[np.int32], error: CorruptEntryError) -> CorruptEntryError:
        """The error of the first of these documents that fails by itself, by file and line."""
        documents = self.store.documents
        for number in document.tolist():
            try:
                self.store.ids(number)
            except CorruptEntryError as found:
                name = documents.where(number)
                parts = {"where": found.where, "why": found.why or found.what, "fix": found.fix}
                return CorruptEntryError(f"the tokens of {name} are damaged", sample=name, key=found.key, **parts)
        return error

    def _learn_runs(self, rows: NDArray[np.integer], fronts: NDArray[np.int64], out: RowArrays) -> None:
        """Labels of rows of which only runs are learned."""
        runs = self._runs
        assert runs is not None
        first = self._begin_of_runs(rows)
        number = runs.ends[rows] - first
        which = spread(first, number)
        shift = np.repeat(fronts, number)
        ids, labels = _as_bytes(out.input_ids), _as_bytes(out.labels)
        begin, end = (runs.first[which] + shift) * _WIDE, (runs.last[which] + shift) * _WIDE
        for first_byte, last_byte in zip(begin.tolist(), end.tolist(), strict=True):
            labels[first_byte:last_byte] = ids[first_byte:last_byte]

    def _begin_of_runs(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        return self._run_begins[rows] if self._run_begins is not None else np.empty(0, dtype=np.int64)

    def _number(self, rows: NDArray[np.integer], tokens: list[int], out: RowArrays, at: list[int]) -> None:
        """Positions from 0 in each document and in the filling; documents from 1, the filling 0."""
        positions, segments, counting = out.position_ids, out.seq_idx, self._counting
        assert positions is not None
        assert segments is not None
        width = positions.shape[1]
        for row, number, length in zip(at, rows.tolist(), tokens, strict=True):
            pieces = self.plan.pieces(number)
            columns = [*self._columns[pieces.start : pieces.stop].tolist(), length]
            for index in range(len(columns) - 1):
                begin, end = columns[index], columns[index + 1]
                positions[row, begin:end] = counting[: end - begin]
                segments[row, begin:end] = index + 1
            if length < width:
                positions[row, length:] = counting[: width - length]
                segments[row, length:] = 0


def _piece_columns(plan: RowPlan) -> NDArray[np.int64]:
    """(P,) where each piece begins in its row."""
    places = begins(np.cumsum(plan.length, dtype=np.int64))
    fronts = begins(plan.ends)
    return places - np.repeat(places[fronts], plan.ends - fronts) if len(fronts) else places


@dataclass(frozen=True, slots=True)
class _Patterns:
    """Bytes that rows are copied from: a copy from here is quicker than filling a slice."""

    marks: memoryview
    """A row of ones, one of zeros, one of ones: every mask is a stretch of these."""
    ignored: memoryview
    """A row of labels that are not learned."""


@functools.lru_cache(maxsize=16)
def _patterns(width: int) -> _Patterns:
    marks = np.repeat(np.array([1, 0, 1], dtype=np.int64), width)
    return _Patterns(memoryview(marks.tobytes()), memoryview(np.full(width, IGNORED, dtype=np.int64).tobytes()))


def _as_bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _put(out: RowArrays, at: list[int], lengths: list[int], *, learned: bool, left: bool) -> None:
    """Masks; labels as if everything were learned but the filling, or nothing."""
    ids, masks, labels = _as_bytes(out.input_ids), _as_bytes(out.attention_mask), _as_bytes(out.labels)
    patterns, row_bytes = _patterns(out.labels.shape[1]), out.labels.shape[1] * _WIDE
    marks, ignored = patterns.marks, patterns.ignored
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
    """The filling, where its id does not fit into the type of the store."""
    width = ids.shape[1]
    for row, length in zip(at, lengths, strict=True):
        ids[row, slice(0, width - length) if left else slice(length, width)] = pad_id
