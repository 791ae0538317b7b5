"""Rows of one plan, read from one store into arrays that the caller brings.

Decides nothing: what stands where is in the plan. Guarantee: every place of a row is written, and nothing else; a
label follows from the runs with loss, never from an id, so filling with the id that ends a text is safe; a document
that fails its check is named with its file and line. Cost: one pass over the ids of a batch, which widens them to
64 bits, one over its labels, and about 1 µs a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CorruptEntryError
from latentcache.plan.rows import Corpus, RowPlan, begins, row_lengths, spread
from latentcache.plan.runs import LabelRuns, label_runs
from latentcache.store.documents import TokenStore

#: What a label is where nothing is learned (``torch.nn.CrossEntropyLoss(ignore_index=)``, also of transformers).
IGNORED = -100
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowArrays:
    """Memory of one batch: (B, L) each, C-contiguous."""

    input_ids: Ids
    attention_mask: Ids
    labels: Ids
    position_ids: Ids | None = None
    seq_idx: NDArray[np.int32] | None = None


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
        self._counting = np.arange(plan.max_length, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.plan)

    def tokens_of(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """(n,) tokens of some rows."""
        lengths: NDArray[np.int64] = self.lengths[rows]
        return lengths

    def fill(
        self,
        rows: NDArray[np.integer],
        lengths: NDArray[np.int64],
        out: RowArrays,
        at: Sequence[int],
        flat: NDArray[Any],
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
            flat: (all tokens of these rows,) memory for ids as they are stored.
            pad_id: The id of the filling.
            left: Whether rows end at the right edge.

        Raises:
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        pieces, counts = rows, None
        if not self._single:
            first = self._begins[rows]
            counts = self.plan.ends[rows] - first
            pieces = spread(first, counts)
        self._gather(pieces, flat)
        tokens = lengths.tolist()
        self._put(tokens, out, at, flat, pad_id=pad_id, left=left)
        self._label(rows, pieces, counts, out, at, shift=out.labels.shape[1] - lengths if left else None)
        if out.position_ids is not None:
            self._number(rows, tokens, out, at)

    def _gather(self, pieces: NDArray[np.integer], flat: NDArray[Any]) -> None:
        plan = self.plan
        document, start, length = plan.document[pieces], plan.start[pieces], plan.length[pieces]
        try:
            self.store.gather(document, start, length, flat)
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

    def _put(
        self, lengths: list[int], out: RowArrays, at: Sequence[int], flat: NDArray[Any], *, pad_id: int, left: bool
    ) -> None:
        """Ids and masks; labels as if everything were learned, or nothing."""
        ids, mask, labels = out.input_ids, out.attention_mask, out.labels
        width, whole, place = ids.shape[1], self._runs is None, 0
        for row, count in zip(at, lengths, strict=True):
            first = width - count if left else 0
            last = first + count
            ids[row, first:last] = flat[place : place + count]
            place += count
            mask[row, first:last] = 1
            if whole:
                labels[row, first:last] = ids[row, first:last]
            else:
                labels[row] = IGNORED
            if count < width:
                rest = slice(0, first) if left else slice(last, width)
                ids[row, rest] = pad_id
                mask[row, rest] = 0
                if whole:
                    labels[row, rest] = IGNORED

    def _label(
        self,
        rows: NDArray[np.integer],
        pieces: NDArray[np.integer],
        counts: NDArray[np.int64] | None,
        out: RowArrays,
        at: Sequence[int],
        *,
        shift: NDArray[np.int64] | None,
    ) -> None:
        """What is learned of rows with runs; what is not of rows that are learned but for first tokens."""
        if self._runs is None:
            fronts = np.asarray(at, dtype=np.int64) * out.labels.shape[1]
            fronts = fronts if shift is None else fronts + shift
            if counts is not None and not self.plan.crossing:
                fronts = np.repeat(fronts, counts) + self._columns[pieces]
            out.labels.reshape(-1)[fronts] = IGNORED
            return
        ids, labels, runs = out.input_ids, out.labels, self._runs
        first = self._begin_of_runs(rows)
        number = runs.ends[rows] - first
        which = spread(first, number)
        moved = np.repeat(shift, number) if shift is not None else 0
        places = np.repeat(np.asarray(at, dtype=np.int64), number).tolist()
        edges = zip(places, (runs.first[which] + moved).tolist(), (runs.last[which] + moved).tolist(), strict=True)
        for row, begin, end in edges:
            labels[row, begin:end] = ids[row, begin:end]

    def _begin_of_runs(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        return self._run_begins[rows] if self._run_begins is not None else np.empty(0, dtype=np.int64)

    def _number(self, rows: NDArray[np.integer], tokens: list[int], out: RowArrays, at: Sequence[int]) -> None:
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
