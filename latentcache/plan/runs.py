"""Which tokens of a row are learned: the runs with loss of its documents, where they stand in the row.

Decides what a label is. A token is learned if it carries loss and has a token before it that it may see: so not the
first token of a document or of a piece of one, and in rows whose documents see each other not the first of the row.
Guarantee: computed once for all rows, from runs alone; nothing is ever inferred from an id, so that filling with the
id that ends a text is safe. Cost: some 50 ns per run with loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.rows import Corpus, RowPlan, begins, rows_of_pieces, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRuns:
    """Runs of learned tokens. R rows."""

    ends: NDArray[np.int64]
    """(R,) where the runs of each row end."""
    first: NDArray[np.int32]
    """(n,) first column of each run, counted from the first token of its row."""
    last: NDArray[np.int32]
    """(n,) the column after its last one."""

    def learned(self) -> NDArray[np.int64]:
        """(R,) tokens of each row that are learned."""
        sums = np.concatenate(([0], np.cumsum(self.last - self.first, dtype=np.int64)))
        return np.asarray(sums[self.ends] - sums[begins(self.ends)])


def piece_runs(
    corpus: Corpus,
    document: NDArray[np.integer],
    start: NDArray[np.integer],
    length: NDArray[np.integer],
    skip: NDArray[np.integer],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The runs with loss inside pieces of documents.

    Args:
        corpus: The documents.
        document: (P,) which document each piece is of.
        start: (P,) its first token.
        length: (P,) its tokens.
        skip: (P,) so many tokens at its front are not learned.

    Returns:
        For each run its piece, its first token counted in the piece, and the token after its last; none is empty.
    """
    ends = corpus.span_ends[document]
    counts = ends - begins(corpus.span_ends)[document]
    piece = np.repeat(np.arange(len(document)), counts)
    spans = corpus.spans[spread(ends - counts, counts)].astype(np.int64)
    first = spans[:, 0] - start[piece]
    last = np.minimum(first + spans[:, 1], length[piece])
    first = np.maximum(first, skip[piece])
    some = last > first
    return piece[some], first[some], last[some]


def learned_of_pieces(
    corpus: Corpus, document: NDArray[np.integer], start: NDArray[np.integer], length: NDArray[np.integer]
) -> NDArray[np.int64]:
    """(P,) tokens of each piece that are learned where it stands alone."""
    piece, first, last = piece_runs(corpus, document, start, length, np.ones(len(document), dtype=np.int64))
    return np.bincount(piece, weights=last - first, minlength=len(document)).astype(np.int64)


def label_runs(corpus: Corpus, plan: RowPlan) -> LabelRuns:
    """Where the learned tokens of all rows stand."""
    rows = rows_of_pieces(plan)
    columns = begins(np.cumsum(plan.length, dtype=np.int64))
    fronts = begins(plan.ends)
    columns -= columns[fronts][rows]
    skip = np.ones(len(rows), dtype=np.int64)
    if plan.crossing:
        skip[:] = 0
        skip[fronts] = 1
    piece, first, last = piece_runs(corpus, plan.document, plan.start, plan.length, skip)
    return LabelRuns(
        ends=np.cumsum(np.bincount(rows[piece], minlength=len(plan)), dtype=np.int64),
        first=(first + columns[piece]).astype(np.int32),
        last=(last + columns[piece]).astype(np.int32),
    )
