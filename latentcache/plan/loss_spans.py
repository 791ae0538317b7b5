"""Which tokens of a row are learned: the loss spans of its documents, where they are in the row.

Decides what a label is. A token is learned if it is in a loss span and has a token before it that it may attend to:
so not the first token of a document or of a piece of one, and with cross-document attention not the first of the row.
Guarantee: computed once for all rows, from spans alone; nothing is inferred from an id, so padding with the id that
ends a text is safe. Cost: some 50 ns per span.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.documents import Corpus, RowPlan, begins, rows_of_pieces, spread
from latentcache.value import Value

Ints = NDArray[np.integer]


class LossSpans(Value):
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


def loss_spans(corpus: Corpus, plan: RowPlan) -> LossSpans:
    """Where the learned tokens of all rows are."""
    rows = rows_of_pieces(plan)
    columns = begins(np.cumsum(plan.length, dtype=np.int64))
    fronts = begins(plan.ends)
    columns -= columns[fronts][rows]
    skip = np.ones(len(rows), dtype=np.int64)
    if plan.cross_document:
        skip[:] = 0
        skip[fronts] = 1
    piece, first, last = _piece_spans(corpus, plan.document, plan.start, plan.length, skip)
    return LossSpans(
        ends=np.cumsum(np.bincount(rows[piece], minlength=len(plan)), dtype=np.int64),
        first=(first + columns[piece]).astype(np.int32),
        last=(last + columns[piece]).astype(np.int32),
    )


def _piece_spans(
    corpus: Corpus, document: Ints, start: Ints, length: Ints, skip: Ints
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Piece, first and last token of the loss spans in pieces; the first ``skip`` tokens of each are not learned."""
    ends = corpus.span_ends[document]
    counts = ends - begins(corpus.span_ends)[document]
    piece = np.repeat(np.arange(len(document)), counts)
    spans = corpus.spans[spread(ends - counts, counts)].astype(np.int64)
    first = spans[:, 0] - start[piece]
    last = np.minimum(first + spans[:, 1], length[piece])
    first = np.maximum(first, skip[piece])
    some = last > first
    return piece[some], first[some], last[some]
