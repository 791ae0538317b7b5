"""Makes rows of documents: one per row, several packed into a row, or all concatenated and cut into chunks.

Decides what is where; nothing is read. Guarantee: the same documents and settings give the same rows on any machine;
nothing is cut unless it was asked for; what is left out is counted in tokens and listed by document. A piece without
a learned token would make a loss of nan if it were alone, so it is left out and counted, or is an error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import PlanError
from latentcache.plan.documents import Corpus, Dropped, RowPlan, begins, rows_of_pieces, spread
from latentcache.plan.loss_spans import learned_of_pieces, loss_spans
from latentcache.plan.numbers import choice
from latentcache.plan.packing import best_fit
from latentcache.value import Value

Overflow = Literal["error", "drop", "truncate_right", "truncate_left", "split"]
"""What happens to documents that are longer than a row.

``error``: refuse. ``drop``: they are left out. ``truncate_right``: their ends are cut off. ``truncate_left``: their
beginnings. ``split``: they become several pieces, and every token is in one.
"""
NoLoss = Literal["drop", "error"]
"""What happens to documents, pieces and rows without a learned token: left out and counted, or refused."""

#: Documents that a message names.
_NAMED = 5


def padded_rows(corpus: Corpus, length: int, *, overflow: Overflow, no_loss: NoLoss = "drop") -> RowPlan:
    """One piece per row, in the order of the documents."""
    pieces = _cut(corpus, length, overflow, no_loss)
    plan = pieces.as_plan(length, np.arange(1, len(pieces.document) + 1))
    return _accounted(_learned_rows(plan, corpus, no_loss), corpus)


def packed_rows(corpus: Corpus, length: int, *, overflow: Overflow, no_loss: NoLoss = "drop") -> RowPlan:
    """As few rows as best-fit-decreasing finds, over all documents at once; documents do not attend to each other."""
    pieces = _cut(corpus, length, overflow, no_loss)
    order, ends = best_fit(pieces.length, length)
    return _accounted(_learned_rows(pieces.taken(order).as_plan(length, ends), corpus, no_loss), corpus)


def concat_and_chunk(
    corpus: Corpus, length: int, *, keep_last: bool = True, cross_document: bool = True, no_loss: NoLoss = "drop"
) -> RowPlan:
    """All documents in their order as one string, cut into rows.

    Args:
        corpus: The documents.
        length: Tokens in a row.
        keep_last: Keep the incomplete last chunk as a short row; else it is dropped and counted.
        cross_document: Tokens attend to the documents before theirs in the row.
        no_loss: What happens to rows without a learned token.
    """
    pieces = _cut(corpus, length, "split", no_loss, cut=False)
    ends = np.cumsum(pieces.length, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(np.arange(length, total + length, length).clip(max=total), ends)
    first = begins(cuts)
    which, row = np.searchsorted(ends, first, side="right"), first // length
    starts = first - begins(ends)[which] if len(which) else first
    chunks = replace(pieces, document=pieces.document[which], start=starts, length=cuts - first)
    plan = chunks.as_plan(length, np.cumsum(np.bincount(row), dtype=np.int64) if len(row) else cuts)
    plan = replace(plan, cross_document=cross_document)
    if not keep_last and total % length:
        last = plan.pieces(len(plan) - 1)
        dropped = Dropped(documents=np.unique(plan.document[last]), tokens=int(plan.length[last].sum()))
        plan = replace(_some_rows(plan, np.arange(len(plan)) < len(plan) - 1), last_chunk=dropped)
    return _accounted(_learned_rows(plan, corpus, no_loss), corpus)


class _Pieces(Value, eq=False):
    """Pieces of documents, in order, and what was left out."""

    document: NDArray[np.int32]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    too_long: Dropped
    truncated: Dropped
    no_loss: Dropped

    def taken(self, which: NDArray[np.integer] | NDArray[np.bool_]) -> _Pieces:
        return replace(self, document=self.document[which], start=self.start[which], length=self.length[which])

    def without_loss(self, silent: NDArray[np.bool_]) -> _Pieces:
        """The others; these are counted as having no loss."""
        documents = np.unique(np.concatenate([self.no_loss.documents, self.document[silent]]))
        dropped = Dropped(documents=documents, tokens=self.no_loss.tokens + int(self.length[silent].sum()))
        return replace(self.taken(~silent), no_loss=dropped)

    def as_plan(self, length: int, ends: NDArray[np.integer]) -> RowPlan:
        return RowPlan(
            length_of_row=length,
            ends=ends.astype(np.int64),
            document=self.document,
            start=self.start.astype(np.uint32),
            length=self.length.astype(np.uint32),
            too_long=self.too_long,
            truncated=self.truncated,
            no_loss=self.no_loss,
        )


def _cut(corpus: Corpus, length: int, overflow: Overflow, no_loss: NoLoss, *, cut: bool = True) -> _Pieces:
    """Documents as pieces that fit into a row; documents that are empty or have no loss are left out."""
    choice("overflow", overflow, get_args(Overflow))
    choice("no_loss", no_loss, get_args(NoLoss))
    count = len(corpus.length)
    pieces = _Pieces(
        document=np.arange(count, dtype=np.int32),
        start=np.zeros(count, dtype=np.int64),
        length=corpus.length.astype(np.int64),
        too_long=Dropped(),
        truncated=Dropped(),
        no_loss=Dropped(),
    )
    pieces = pieces.without_loss((corpus.length == 0) | (np.diff(corpus.span_ends, prepend=0) == 0))
    return _checked(_fitted(pieces, corpus, length, overflow) if cut else pieces, corpus, no_loss)


def _fitted(pieces: _Pieces, corpus: Corpus, length: int, overflow: Overflow) -> _Pieces:
    """The pieces by the policy; truncated ones that have no loss any more are left out."""
    long = pieces.length > length
    if not long.any():
        return pieces
    over = pieces.document[long]
    if overflow == "error":
        raise _too_long(over, corpus, length)
    if overflow == "drop":
        return replace(pieces.taken(~long), too_long=Dropped(documents=over, tokens=int(pieces.length[long].sum())))
    if overflow == "split":
        return _split(pieces, length)
    beyond = np.where(long, pieces.length - length, 0)
    start = pieces.start + beyond if overflow == "truncate_left" else pieces.start
    truncated = Dropped(documents=over, tokens=int(beyond.sum()))
    shorter = replace(pieces, start=start, length=pieces.length - beyond, truncated=truncated)
    silent = long.copy()
    silent[long] = learned_of_pieces(corpus, over, start[long], shorter.length[long]) == 0
    return shorter.without_loss(silent)


def _split(pieces: _Pieces, length: int) -> _Pieces:
    """Full rows of each document and the rest; a rest of one token gets one more, so that it follows a token."""
    counts = -(-pieces.length // length)
    which = np.repeat(np.arange(len(counts)), counts)
    start = spread(np.zeros(len(counts), dtype=np.int64), counts) * length
    last = np.cumsum(counts) - 1
    lonely = last[(pieces.length % length == 1) & (counts > 1)] if length > 2 else last[:0]
    start[lonely] -= 1
    ends = np.append(start[1:], 0)
    ends[last] = pieces.length
    return replace(pieces, document=pieces.document[which], start=start, length=ends - start)


def _checked(pieces: _Pieces, corpus: Corpus, no_loss: NoLoss) -> _Pieces:
    if no_loss == "error" and len(pieces.no_loss.documents):
        raise _no_loss_error(pieces.no_loss, corpus)
    return pieces


def _learned_rows(plan: RowPlan, corpus: Corpus, no_loss: NoLoss) -> RowPlan:
    """The plan without rows that have no learned token; those would make a loss of nan."""
    learned = loss_spans(corpus, plan).learned() > 0
    if learned.all():
        return plan
    lost = ~learned[rows_of_pieces(plan)]
    documents = np.unique(np.concatenate([plan.no_loss.documents, plan.document[lost]]))
    dropped = Dropped(documents=documents, tokens=plan.no_loss.tokens + int(plan.length[lost].sum()))
    if no_loss == "error":
        raise _no_loss_error(dropped, corpus)
    return replace(_some_rows(plan, learned), no_loss=dropped)


def _some_rows(plan: RowPlan, kept: NDArray[np.bool_]) -> RowPlan:
    """Some of the rows, in their order."""
    first = begins(plan.ends)[kept]
    counts = plan.ends[kept] - first
    pieces = spread(first, counts)
    return replace(
        plan,
        ends=np.cumsum(counts, dtype=np.int64),
        document=plan.document[pieces],
        start=plan.start[pieces],
        length=plan.length[pieces],
    )


def _accounted(plan: RowPlan, corpus: Corpus) -> RowPlan:
    """The plan, checked: every token of the corpus is in a row or counted, and no row is too long."""
    placed, left = plan.tokens, plan.tokens_dropped
    assert placed + left == corpus.tokens, f"{placed} tokens placed and {left} left out of {corpus.tokens}"
    longest = int(plan.row_lengths().max(initial=0))
    assert longest <= plan.length_of_row, f"a row of {longest} tokens in rows of {plan.length_of_row}"
    return plan


def _named(documents: NDArray[np.integer], corpus: Corpus) -> str:
    """The first documents by file, line and length."""
    some = [f"{corpus.where(number)} ({corpus.length[number]} tokens)" for number in documents[:_NAMED].tolist()]
    more = len(documents) - len(some)
    return ", ".join(some) + (f" and {more} more" if more > 0 else "")


def _no_loss_error(dropped: Dropped, corpus: Corpus) -> PlanError:
    count = len(dropped.documents)
    return PlanError(
        f"no_loss='error': {count} document{'s' * (count > 1)} without a token to learn",
        where=_named(dropped.documents, corpus),
        why="none of their tokens has loss and a token before it, and a batch of such rows has a loss of nan",
        fix="remove them from the data, or no_loss='drop'",
    )


def _too_long(documents: NDArray[np.int32], corpus: Corpus, length: int) -> PlanError:
    longest = int(corpus.length[documents].max())
    return PlanError(
        f"overflow='error': {len(documents)} document{'s' * (len(documents) > 1)} longer than {length} tokens",
        where=_named(documents, corpus),
        why="documents are not cut unless you ask for it",
        fix=f"rows of {longest} tokens, or overflow='drop', 'truncate_right', 'truncate_left' or 'split'",
        slug="too-long",
    )
