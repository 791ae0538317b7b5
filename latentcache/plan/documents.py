"""Documents, the rows that are made of them, and which tokens of a row are learned: columns of numbers.

Rows have one document each, several that are packed, or a chunk of all documents as one string. They differ only in
their row plan, so one reader serves all of them. Guarantee: the same documents and settings give the same rows on any
machine. Nothing is cut unless it was asked for. Every token is in a row, or counted by document under the reason that
left it out. What is learned follows from loss spans alone. Nothing is inferred from an id, so padding with the id
that ends a text is safe. A piece without a learned token is left out: alone it would make a loss of nan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain, repeat
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import PlanError, count_of
from latentcache.plan.numbers import choice
from latentcache.value import Value

Ints = NDArray[np.integer]
Rows = TypeVar("Rows", "RowPlan", "LossSpans")
_NONE = np.empty(0, dtype=np.int32)
Overflow = Literal["error", "drop", "truncate_right", "truncate_left", "split"]
"""Rule for documents that are longer than a row.

``error``: raise an error. ``drop``: leave them out. ``truncate_right``: cut off the ends. ``truncate_left``: cut off
the beginnings. ``split``: they become several pieces, and every token is in one.
"""
LastChunk = Literal["keep", "drop"]
"""Rule for an incomplete last chunk: a short row, or left out and counted."""

_NAMED = 5
_SHORT = 1 << 16


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
    learned = last > first
    piece = piece[learned]
    return LossSpans(
        ends=np.cumsum(np.bincount(rows[piece], minlength=len(plan)), dtype=np.int64),
        first=(first[learned] + columns[piece]).astype(np.int32),
        last=(last[learned] + columns[piece]).astype(np.int32),
    )


def plan_rows(
    corpus: Corpus,
    kind: str,
    length: int,
    *,
    overflow: Overflow = "error",
    last_chunk: LastChunk = "keep",
    cross_document: bool = True,
) -> RowPlan:
    """Rows of a kind; ``cache.rows`` says what the options mean.

    ``pad``: one piece per row, in the order of the documents. ``pack``: as few rows as best-fit-decreasing finds,
    over all documents at once. ``chunk``: all documents in their order as one string, cut into rows.
    """
    plan = _documents(corpus, length)
    plan = _chunks(plan, last_chunk) if kind == "chunk" else _fitted(plan, corpus, overflow)
    if kind == "pack":
        order, ends = best_fit(plan.length, length)
        plan = replace(_some_rows(plan, order), ends=ends)
    plan = replace(plan, cross_document=cross_document and kind != "pack")
    return _without_loss(plan, loss_spans(corpus, plan).learned() == 0)  # they would make a loss of nan


def _documents(corpus: Corpus, length: int) -> RowPlan:
    """Each document as a row, however long, but those that are empty or have no loss."""
    count = len(corpus.length)
    plan = RowPlan(
        length_of_row=length,
        ends=np.arange(1, count + 1),
        document=np.arange(count, dtype=np.int32),
        start=np.zeros(count, dtype=np.uint32),
        length=corpus.length.astype(np.uint32),
    )
    return _without_loss(plan, (corpus.length == 0) | (np.diff(corpus.span_ends, prepend=0) == 0))


def _chunks(plan: RowPlan, last_chunk: LastChunk) -> RowPlan:
    """Documents as one string, cut into rows; the incomplete last chunk is a short row, or dropped and counted."""
    choice("last_chunk", last_chunk, get_args(LastChunk))
    length = plan.length_of_row
    ends = np.cumsum(plan.length, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(np.arange(length, total + length, length).clip(max=total), ends)
    first = begins(cuts)
    which = np.searchsorted(ends, first, side="right")
    chunks = replace(
        _some_rows(plan, which),
        start=(first - begins(ends)[which]).astype(np.uint32),
        length=(cuts - first).astype(np.uint32),
        ends=np.cumsum(np.bincount(first // length), dtype=np.int64),
    )
    if last_chunk == "keep" or total % length == 0:
        return chunks
    last = chunks.pieces(len(chunks) - 1)
    left = chunks.document[last]
    tokens = int(chunks.length[last].sum())
    return _some_rows(chunks, np.arange(len(chunks) - 1)).without("last_chunk", left, tokens)


def _fitted(plan: RowPlan, corpus: Corpus, overflow: Overflow) -> RowPlan:
    """Documents as pieces that fit into a row; those that lose all their learned tokens are left out."""
    choice("overflow", overflow, get_args(Overflow))
    limit = plan.length_of_row
    long = plan.length > plan.length_of_row
    if not long.any():
        return plan
    over = plan.document[long]
    if overflow == "error":
        longest = int(corpus.length[over].max())
        raise PlanError(
            f"{count_of(len(over), 'documents')} longer than {limit} tokens",
            argument="overflow",
            value="error",
            where=_named(over, corpus),
            why="documents are not cut unless you ask for it",
            fix=f"rows of {longest} tokens, or --overflow=drop|truncate_right|truncate_left|split",
            slug="too-long",
        )
    if overflow == "drop":
        return _some_rows(plan, ~long).without("too_long", over, int(plan.length[long].sum()))
    if overflow == "split":
        return _split(plan)
    beyond = np.where(long, plan.length - limit, 0).astype(np.uint32)
    start = beyond if overflow == "truncate_left" else plan.start
    cut = replace(plan, start=start, length=plan.length - beyond).without("truncated", over, int(beyond.sum()))
    return _without_loss(cut, long & (loss_spans(corpus, cut).learned() == 0))


def _split(plan: RowPlan) -> RowPlan:
    """Full rows of each document and the rest; a rest of one token gets one more, so that it follows a token."""
    limit = plan.length_of_row
    length = plan.length.astype(np.int64)
    counts = -(-length // limit)
    start = spread(np.zeros(len(counts), dtype=np.int64), counts) * limit
    last = np.cumsum(counts) - 1
    lonely = last[(length % limit == 1) & (counts > 1)] if limit > 2 else last[:0]
    start[lonely] -= 1
    ends = np.append(start[1:], 0)
    ends[last] = length
    pieces = _some_rows(plan, np.repeat(np.arange(len(counts)), counts))
    return replace(pieces, start=start.astype(np.uint32), length=(ends - start).astype(np.uint32))


def _without_loss(plan: RowPlan, silent: NDArray[np.bool_]) -> RowPlan:
    """The other rows; these are counted as having no loss."""
    if not silent.any():
        return plan
    lost = silent[rows_of_pieces(plan)]
    return _some_rows(plan, ~silent).without("no_loss", plan.document[lost], int(plan.length[lost].sum()))


def _some_rows(plan: RowPlan, which: NDArray[np.integer] | NDArray[np.bool_]) -> RowPlan:
    """Some of the rows, in the order in which they are named."""
    first = begins(plan.ends)[which]
    counts = plan.ends[which] - first
    pieces = spread(first, counts)
    return replace(
        plan,
        ends=np.cumsum(counts, dtype=np.int64),
        document=plan.document[pieces],
        start=plan.start[pieces],
        length=plan.length[pieces],
    )


def _named(documents: NDArray[np.integer], corpus: Corpus) -> str:
    """The first documents by file, line and length."""
    names = [f"{corpus.where(number)} ({corpus.length[number]} tokens)" for number in documents[:_NAMED].tolist()]
    more = len(documents) - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def best_fit(length: NDArray[np.integer], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(P,) pieces of these lengths row after row, the longest first in each, and (R,) where those of each row end.

    From the longest to the shortest, each goes into the fullest row that still has room. That gives at most 11/9 of
    the fewest rows (Johnson 1973), and on usual lengths nearly the fewest. All pieces of one length are placed at
    once: a row with room ``r`` takes ``r // length`` of them, because after each it is still the fullest that fits.
    A million documents of log-normal lengths in rows of 4096 take 0.09 s of CPU.
    """
    rest = capacity - length
    order = np.argsort(rest.astype(np.uint16) if capacity <= _SHORT else rest, kind="stable")
    rows = np.array(_rows(np.bincount(length, minlength=capacity + 1).tolist(), capacity), dtype=np.int64)
    return order[np.argsort(rows, kind="stable")], np.cumsum(np.bincount(rows), dtype=np.int64)


def _rows(counts: list[int], capacity: int) -> list[int]:
    """The row of each piece, from the longest to the shortest."""
    opened = 0
    placed: list[int] = []
    rooms: list[list[int]] = [[] for _ in range(capacity + 1)]
    occurring = 0  # bit r: some row has room r
    for length in range(capacity, 0, -1):
        waiting = counts[length]
        while waiting:
            wide = occurring >> length
            room = length + (wide & -wide).bit_length() - 1 if wide else capacity
            fit = room // length
            needed = -(-waiting // fit)
            if wide:
                rows = rooms[room][-needed:]
                del rooms[room][-needed:]
            else:
                rows = list(range(opened, opened + needed))
                opened += needed
            full, rest = divmod(min(waiting, fit * len(rows)), fit)
            placed += rows[:full] if fit == 1 else chain.from_iterable(repeat(row, fit) for row in rows[:full])
            rooms[room - fit * length] += rows[:full]
            occurring |= (full > 0) << (room - fit * length)
            if rest:
                placed += [rows[full]] * rest
                rooms[room - rest * length].append(rows[full])
                occurring |= 1 << (room - rest * length)
            if wide and not rooms[room]:
                occurring ^= 1 << room
            waiting -= full * fit + rest
    return placed
