"""Rows of tokens: which pieces of which documents stand in each row of a view, decided before anything is read.

A padded, a packed and a block view differ in nothing but their row plan, so one reader serves all three. Guarantee:
the number of rows is known, every piece lies inside its document, no row is longer than the view.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
    dropped: NDArray[np.int32]
    """Documents that stand in no row."""
    tokens_dropped: int = 0
    """Tokens of all documents that stand in no row: those of dropped and the ends of cut ones."""

    def __len__(self) -> int:
        return len(self.ends)

    def pieces(self, row: int) -> range:
        """The numbers of the pieces of one row."""
        return range(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    @property
    def fill(self) -> float:
        """Part of all places that hold a token of a document; 0 without a row."""
        places = len(self.ends) * self.max_length
        return int(self.length.sum()) / places if places else 0.0


def row_lengths(plan: RowPlan) -> NDArray[np.int64]:
    """(R,) tokens of documents in each row."""
    sums = np.concatenate(([0], np.cumsum(plan.length, dtype=np.int64)))
    begins = np.concatenate(([0], plan.ends[:-1])) if len(plan.ends) else plan.ends
    lengths: NDArray[np.int64] = sums[plan.ends] - sums[begins]
    return lengths
