"""Rows of tokens: which pieces of which documents stand in each row of a view, decided before anything is read.

A padded, a packed and a block view differ in nothing but their row plan, so one reader serves all three. Guarantee:
the number of rows is known, every piece lies inside its document, no row is longer than the view, and every token of
the documents stands in a row or is counted under what left it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The documents that rows are made of, as columns of a token store. D documents, S runs of tokens with loss."""

    length: NDArray[np.integer]
    """(D,) tokens of each document."""
    span_ends: NDArray[np.integer]
    """(D,) where its runs end in ``spans``."""
    spans: NDArray[np.integer]
    """(S, 2) first token and number of tokens of each run."""
    where: Callable[[int], str]
    """File and line of a document, for messages."""
    chosen: NDArray[np.int32] | None = None
    """Documents to lay out, in this order; all of them where it is not given."""

    @property
    def documents(self) -> NDArray[np.int32]:
        """The documents to lay out, in order."""
        return np.arange(len(self.length), dtype=np.int32) if self.chosen is None else self.chosen

    @property
    def tokens(self) -> int:
        """Tokens of the documents to lay out."""
        return int(self.length[self.documents].sum(dtype=np.int64))

    @property
    def whole(self) -> bool:
        """Whether every token of every document carries loss."""
        count = len(self.length)
        return (
            len(self.spans) == count
            and bool((self.span_ends == np.arange(1, count + 1)).all())
            and not self.spans[:, 0].any()
            and bool((self.spans[:, 1] == self.length).all())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What stands in no row for one reason."""

    documents: NDArray[np.int32] = field(default_factory=_NONE.copy)
    """(n,) the documents it is of, rising."""
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """R rows of P pieces, in the order of their numbers (an epoch shuffles the numbers, not the plan)."""

    max_length: int
    """Tokens in a row, the filling included."""
    ends: NDArray[np.int64]
    """(R,) where the pieces of each row end; they begin where those of the row before end."""
    document: NDArray[np.int32]
    """(P,) which document each piece is of."""
    start: NDArray[np.uint32]
    """(P,) first token of the piece in its document."""
    length: NDArray[np.uint32]
    """(P,) tokens in the piece, at least 1."""
    crossing: bool = False
    """Whether tokens see the documents before theirs in a row: the first token of a piece is then learned too."""
    too_long: Left = field(default_factory=Left)
    """Documents that are longer than a row and were dropped."""
    cut: Left = field(default_factory=Left)
    """Documents whose beginning or end was cut off, and the tokens of that."""
    idle: Left = field(default_factory=Left)
    """Documents, pieces or rows that teach nothing: no token of them carries loss and has one before it."""
    tail: Left = field(default_factory=Left)
    """What was left for the last row of blocks, and dropped."""

    def __len__(self) -> int:
        return len(self.ends)

    def pieces(self, row: int) -> range:
        """The numbers of the pieces of one row."""
        return range(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    @property
    def left(self) -> dict[str, Left]:
        """What stands in no row, by reason: ``too_long``, ``cut``, ``idle``, ``tail``."""
        return {"too_long": self.too_long, "cut": self.cut, "idle": self.idle, "tail": self.tail}

    @property
    def tokens(self) -> int:
        """Tokens of documents that stand in rows."""
        return int(self.length.sum(dtype=np.int64))

    @property
    def tokens_dropped(self) -> int:
        """Tokens of documents that stand in no row, whatever the reason."""
        return sum(left.tokens for left in self.left.values())

    @property
    def fill(self) -> float:
        """Part of all places that hold a token of a document; 0 without a row."""
        places = len(self.ends) * self.max_length
        return self.tokens / places if places else 0.0


def begins(ends: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where parts begin that end there, one after the other from 0."""
    return np.concatenate(([0], ends[:-1])).astype(np.int64) if len(ends) else np.empty(0, dtype=np.int64)


def spread(first: NDArray[np.integer], count: NDArray[np.integer]) -> NDArray[np.int64]:
    """All numbers of several ranges, one range after the other.

    Args:
        first: (n,) where each range begins.
        count: (n,) its numbers.
    """
    ends = np.cumsum(count, dtype=np.int64)
    return np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) + np.repeat(first - (ends - count), count)


def row_lengths(plan: RowPlan) -> NDArray[np.int64]:
    """(R,) tokens of documents in each row."""
    sums = np.concatenate(([0], np.cumsum(plan.length, dtype=np.int64)))
    lengths: NDArray[np.int64] = sums[plan.ends] - sums[begins(plan.ends)]
    return lengths


def rows_of_pieces(plan: RowPlan) -> NDArray[np.int64]:
    """(P,) the row each piece stands in."""
    return np.repeat(np.arange(len(plan)), plan.ends - begins(plan.ends))


def accounted(plan: RowPlan, corpus: Corpus) -> RowPlan:
    """The plan, seen to be whole: every token of the corpus is in a row or counted, and no row is too long.

    Raises:
        AssertionError: It is not; the error is in this package.
    """
    placed, left = plan.tokens, plan.tokens_dropped
    assert placed + left == corpus.tokens, f"{placed} tokens placed and {left} left out of {corpus.tokens}"
    longest = int(row_lengths(plan).max(initial=0))
    assert longest <= plan.max_length, f"a row of {longest} tokens in rows of {plan.max_length}"
    return plan
