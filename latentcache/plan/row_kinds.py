"""The three kinds of rows: one document each, several to a row, or everything in one string cut into rows.

Decides what stands where; nothing is read. Guarantee: the same documents and settings give the same rows on any
machine; every token is in a row or counted. Cost per million documents, measured on two cores: docs/log.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.packing import best_fit
from latentcache.plan.pieces import (
    Idle,
    Overflow,
    Pieces,
    check_policies,
    cut_pieces,
    idle_error,
    without_idle,
    without_loss,
)
from latentcache.plan.rows import Corpus, Left, RowPlan, accounted, begins, rows_of_pieces, spread
from latentcache.plan.runs import label_runs


def padded_rows(corpus: Corpus, max_length: int, *, overflow: Overflow, idle: Idle = "drop") -> RowPlan:
    """One piece to a row, in the order of the documents.

    Raises:
        UsageError: No such policy, or rows of fewer than 2 tokens.
        PlanError: A policy says ``error`` and there are such documents.
    """
    pieces = without_idle(cut_pieces(corpus, max_length, overflow=overflow, idle=idle), corpus, idle)
    return accounted(_plan(pieces, max_length, np.arange(1, len(pieces.document) + 1)), corpus)


def packed_rows(corpus: Corpus, max_length: int, *, overflow: Overflow, idle: Idle = "drop") -> RowPlan:
    """As few rows as best-fit-decreasing finds, over all documents at once. Documents do not see each other.

    Raises:
        UsageError: No such policy, or rows of fewer than 2 tokens.
        PlanError: A policy says ``error`` and there are such documents.
    """
    pieces = cut_pieces(corpus, max_length, overflow=overflow, idle=idle)
    order, ends = best_fit(pieces.length, max_length)
    kept = replace(pieces, document=pieces.document[order], start=pieces.start[order], length=pieces.length[order])
    return accounted(_without_idle_rows(_plan(kept, max_length, ends), corpus, idle), corpus)


def block_rows(
    corpus: Corpus, max_length: int, *, keep_tail: bool = True, crossing: bool = True, idle: Idle = "drop"
) -> RowPlan:
    """All documents in their order as one string, cut into rows.

    Args:
        corpus: The documents.
        max_length: Tokens in a row.
        keep_tail: Whether what is left at the end is a short row; else it is dropped and counted.
        crossing: Whether tokens see the documents before theirs in the row.
        idle: What becomes of rows of which nothing is learned.

    Raises:
        UsageError: Rows of fewer than 2 tokens.
        PlanError: ``idle`` says ``error`` and there are such rows.
    """
    check_policies(max_length, "split", idle)
    out = without_loss(corpus)
    document = corpus.documents[~out]
    silent = Left(
        documents=np.unique(corpus.documents[out]), tokens=corpus.tokens - int(corpus.length[document].sum())
    )
    if idle == "error" and len(silent.documents):
        raise idle_error(silent, corpus)
    ends = np.cumsum(corpus.length[document], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(np.arange(max_length, total + max_length, max_length).clip(max=total), ends)
    plan = _string(corpus, document, ends, cuts, max_length)
    plan = replace(plan, crossing=crossing, idle=silent)
    if not keep_tail and total % max_length:
        plan = _without_tail(plan)
    return accounted(_without_idle_rows(plan, corpus, idle), corpus)


def _string(
    corpus: Corpus, document: NDArray[np.int32], ends: NDArray[np.int64], cuts: NDArray[np.int64], max_length: int
) -> RowPlan:
    """Pieces between cuts, which are the ends of documents and of rows, counted in the whole string."""
    first = begins(cuts)
    which = np.searchsorted(ends, first, side="right")
    row = first // max_length
    return RowPlan(
        max_length=max_length,
        ends=np.cumsum(np.bincount(row), dtype=np.int64) if len(row) else cuts,
        document=document[which],
        start=(first - begins(ends)[which]).astype(np.uint32) if len(which) else np.empty(0, dtype=np.uint32),
        length=(cuts - first).astype(np.uint32),
    )


def _plan(pieces: Pieces, max_length: int, ends: NDArray[np.integer]) -> RowPlan:
    return RowPlan(
        max_length=max_length,
        ends=ends.astype(np.int64),
        document=pieces.document,
        start=pieces.start.astype(np.uint32),
        length=pieces.length.astype(np.uint32),
        too_long=pieces.too_long,
        cut=pieces.cut,
        idle=pieces.idle,
    )


def _without_tail(plan: RowPlan) -> RowPlan:
    last = plan.pieces(len(plan) - 1)
    kept = np.arange(len(plan)) < len(plan) - 1
    left = Left(documents=np.unique(plan.document[last]), tokens=int(plan.length[last].sum()))
    return replace(_rows(plan, kept), tail=left)


def _without_idle_rows(plan: RowPlan, corpus: Corpus, idle: Idle) -> RowPlan:
    """The plan without rows of which nothing is learned; those would make a loss of nan."""
    taught = label_runs(corpus, plan).learned() > 0
    if taught.all():
        return plan
    lost = ~taught[rows_of_pieces(plan)]
    left = Left(documents=np.unique(plan.document[lost]), tokens=int(plan.length[lost].sum()))
    if idle == "error":
        raise idle_error(left, corpus)
    documents = np.unique(np.concatenate([plan.idle.documents, left.documents]))
    return replace(_rows(plan, taught), idle=Left(documents=documents, tokens=plan.idle.tokens + left.tokens))


def _rows(plan: RowPlan, kept: NDArray[np.bool_]) -> RowPlan:
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
