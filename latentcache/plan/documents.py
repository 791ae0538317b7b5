"""Documents, the rows that are made of them, and which tokens of a row are learned: columns of numbers.

Padded, packed and chunked rows differ only in their row plan, so one reader serves all of them. Guarantee: every
piece is inside its document, and no row is longer than the view. Every token is in a row or counted under the reason
that left it out. What is learned follows from loss spans alone. Nothing is inferred from an id, so padding with the
id that ends a text is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from latentcache.value import Value

Ints = NDArray[np.integer]
Rows = TypeVar("Rows", "RowPlan", "LossSpans")
_NONE = np.empty(0, dtype=np.int32)


class Corpus(Value, eq=False):
    """The D documents that rows are made of, with S loss spans."""

    length: Ints
    """(D,) tokens of each document."""
    span_ends: Ints
    """(D,) where its spans end in ``spans``."""
    spans: Ints
    """(S, 2) first token and number of tokens of each span."""
    where: Callable[[int], str]
    """File and line of a document, for messages."""

    @property
    def all_learned(self) -> bool:
        """True if every token of every document is in a loss span."""
        count = len(self.length)
        return (
            len(self.spans) == count
            and bool((self.span_ends == np.arange(1, count + 1)).all())
            and not self.spans[:, 0].any()
            and bool((self.spans[:, 1] == self.length).all())
        )


class Dropped(Value, eq=False):
    """Tokens that are in no row for one reason."""

    documents: NDArray[np.int32] = field(default_factory=_NONE.copy)
    """(n,) the documents they belong to, rising."""
    tokens: int = 0


#: Why tokens are in no row: the document is longer than a row; its beginning or end was cut off; nothing is learned
#: of it, of a piece or of a row; an incomplete last chunk.
REASONS = ("too_long", "truncated", "no_loss", "last_chunk")


class RowPlan(Value, eq=False):
    """R rows of P pieces, in the order of their numbers (an epoch shuffles the numbers, not the plan)."""

    length_of_row: int
    """Tokens in a row, padding included."""
    ends: NDArray[np.int64]
    """(R,) where the pieces of each row end; they begin where those of the row before end."""
    document: NDArray[np.int32]
    """(P,) document of each piece."""
    start: NDArray[np.uint32]
    """(P,) first token of the piece in its document."""
    length: NDArray[np.uint32]
    """(P,) tokens in the piece, at least 1."""
    cross_document: bool = False
    """True if tokens attend to the documents before theirs in a row; the first token of a piece is then learned too.
    """
    dropped: Mapping[str, Dropped] = field(default_factory=lambda: dict.fromkeys(REASONS, Dropped()))
    """Documents and tokens that are in no row, by reason."""

    def __len__(self) -> int:
        return len(self.ends)

    def pieces(self, row: int) -> range:
        """The numbers of the pieces of one row."""
        return range(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    def without(self, reason: str, documents: Ints, tokens: int) -> RowPlan:
        """The plan, with tokens of documents that are left out for a reason."""
        before = self.dropped[reason]
        dropped = Dropped(documents=np.union1d(before.documents, documents), tokens=before.tokens + tokens)
        return replace(self, dropped={**self.dropped, reason: dropped})

    @property
    def tokens(self) -> int:
        """Tokens of documents that are in rows."""
        return int(self.length.sum(dtype=np.int64))

    def row_lengths(self) -> NDArray[np.int64]:
        """(R,) tokens of documents in each row."""
        sums = np.concatenate(([0], np.cumsum(self.length, dtype=np.int64)))
        lengths: NDArray[np.int64] = sums[self.ends] - sums[begins(self.ends)]
        return lengths


def begins(ends: Ints) -> NDArray[np.int64]:
    """Return the start of each part, given the ends of parts that follow one another from 0."""
    return np.concatenate(([0], ends[:-1])).astype(np.int64) if len(ends) else np.empty(0, dtype=np.int64)


def spread(first: Ints, count: Ints) -> NDArray[np.int64]:
    """All numbers of several ranges, one range after the other: (n,) first numbers, (n,) how many."""
    ends = np.cumsum(count, dtype=np.int64)
    numbers: NDArray[np.int64] = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    numbers += np.repeat(first - (ends - count), count)
    return numbers


def rows_of_pieces(plan: RowPlan) -> NDArray[np.int64]:
    """(P,) the row of each piece."""
    return np.repeat(np.arange(len(plan)), plan.ends - begins(plan.ends))


class LossSpans(Value, eq=False):
    """Spans of learned tokens in R rows."""

    ends: NDArray[np.int64]
    """(R,) where the spans of each row end."""
    first: NDArray[np.int32]
    """(n,) first column of each span, counted from the first token of its row."""
    last: NDArray[np.int32]
    """(n,) the column after its last one."""

    def learned(self) -> NDArray[np.int64]:
        """(R,) learned tokens of each row."""
        sums = np.concatenate(([0], np.cumsum(self.last - self.first, dtype=np.int64)))
        return np.asarray(sums[self.ends] - sums[begins(self.ends)])


def joined(tables: Sequence[Rows], columns: Sequence[str]) -> Rows:
    """Plans of several lists of rows, or their spans, as one: these columns, one list after the other."""
    if len(tables) == 1:
        return tables[0]
    counts = np.concatenate([np.diff(table.ends, prepend=0) for table in tables])
    merged: Any = {name: np.concatenate([getattr(table, name) for table in tables]) for name in columns}
    return replace(tables[0], ends=np.cumsum(counts, dtype=np.int64), **merged)


def loss_spans(corpus: Corpus, plan: RowPlan) -> LossSpans:
    """Find the learned tokens of all rows: in a loss span, after a token that they may attend to.

    So not the first token of a document or of a piece of one, and with cross-document attention not the first of the
    row. Cost: some 50 ns per span.
    """
    rows = rows_of_pieces(plan)
    columns = begins(np.cumsum(plan.length, dtype=np.int64))
    fronts = begins(plan.ends)
    columns -= columns[fronts][rows]
    skip = np.full(len(rows), not plan.cross_document, dtype=np.int64)
    skip[fronts] = 1
    counts = (corpus.span_ends - begins(corpus.span_ends))[plan.document]
    piece = np.repeat(np.arange(len(rows)), counts)
    spans = corpus.spans[spread(corpus.span_ends[plan.document] - counts, counts)].astype(np.int64)
    first = spans[:, 0] - plan.start[piece]
    last = np.minimum(first + spans[:, 1], plan.length[piece])
    first = np.maximum(first, skip[piece])
    some = last > first
    piece = piece[some]
    return LossSpans(
        ends=np.cumsum(np.bincount(rows[piece], minlength=len(plan)), dtype=np.int64),
        first=(first[some] + columns[piece]).astype(np.int32),
        last=(last[some] + columns[piece]).astype(np.int32),
    )
