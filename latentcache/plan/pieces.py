"""Documents that are longer than a row: what becomes of them, token by token.

Decides the policies ``error``, ``drop``, ``truncate_right``, ``truncate_left`` and ``split``. Guarantee: nothing is
cut without having been asked for; what is left out is counted in tokens and listed by document; ``split`` leaves out
nothing. A piece that teaches nothing would make a loss of nan if it stood alone, so it is left out and counted, or is
an error. Cost: a few passes over the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import PlanError, UsageError
from latentcache.plan.given_numbers import whole
from latentcache.plan.rows import Corpus, Left, spread
from latentcache.plan.runs import learned_of_pieces

Overflow = Literal["error", "drop", "truncate_right", "truncate_left", "split"]
"""What happens to documents that are longer than a row.

``error``: refuse. ``drop``: they are left out. ``truncate_right``: their ends are cut off. ``truncate_left``: their
beginnings. ``split``: they become several pieces, and every token stands in one.
"""
Idle = Literal["drop", "error"]
"""What happens to documents, pieces and rows of which nothing is learned: left out and counted, or refused."""

#: Documents that a message names.
NAMED = 5
#: Places in a row are counted in 32 bits.
MAX_LENGTH = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Pieces that fit into a row, in the order of their documents."""

    document: NDArray[np.int32]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    too_long: Left
    cut: Left
    idle: Left

    def only(self, kept: NDArray[np.bool_]) -> Pieces:
        """Those pieces; the account stays."""
        return replace(self, document=self.document[kept], start=self.start[kept], length=self.length[kept])


def cut_pieces(corpus: Corpus, max_length: int, *, overflow: Overflow, idle: Idle = "drop") -> Pieces:
    """Cut documents into pieces that fit into a row; what is empty or never carries loss is left out.

    Args:
        corpus: The documents.
        max_length: Tokens in a row.
        overflow: What becomes of longer documents.
        idle: What becomes of documents, and of what is left of cut ones, that teach nothing.

    Raises:
        UsageError: No such policy, or rows of fewer than 2 tokens.
        PlanError: A policy says ``error``, and there are such documents; they are named.
    """
    check_policies(max_length, overflow, idle)
    document = corpus.documents
    length = corpus.length[document].astype(np.int64)
    silent = without_loss(corpus)
    pieces = Pieces(
        document=document,
        start=np.zeros(len(document), dtype=np.int64),
        length=length,
        too_long=Left(),
        cut=Left(),
        idle=Left(documents=np.unique(document[silent]), tokens=int(length[silent].sum())),
    ).only(~silent)
    return refused_idle(_fitted(pieces, corpus, max_length, overflow), corpus, idle)


def without_loss(corpus: Corpus) -> NDArray[np.bool_]:
    """For each document to lay out whether it is empty or has no token with loss: it stands in no row of any view."""
    document = corpus.documents
    return np.asarray((corpus.length[document] == 0) | (np.diff(corpus.span_ends, prepend=0)[document] == 0))


def without_idle(pieces: Pieces, corpus: Corpus, idle: Idle) -> Pieces:
    """The pieces that teach something by themselves.

    Raises:
        PlanError: There are others, and ``idle`` is ``error``.
    """
    taught = learned_of_pieces(corpus, pieces.document, pieces.start, pieces.length) > 0
    return refused_idle(_moved_to_idle(pieces, ~taught), corpus, idle)


def refused_idle(pieces: Pieces, corpus: Corpus, idle: Idle) -> Pieces:
    """The pieces, unless something was left out as idle and that was to be an error."""
    if idle == "error" and len(pieces.idle.documents):
        raise idle_error(pieces.idle, corpus)
    return pieces


def idle_error(left: Left, corpus: Corpus) -> PlanError:
    """What is said of documents that teach nothing."""
    return PlanError(
        f"{_count(left)} would teach nothing",
        where=named(left.documents, corpus),
        why="no token carries loss and has a token before it, and a batch of such rows has a loss of nan",
        fix="take them out of the data, or idle='drop'",
    )


def named(documents: NDArray[np.integer], corpus: Corpus) -> str:
    """The first documents by file, line and length."""
    some = [f"{corpus.where(number)} ({corpus.length[number]} tokens)" for number in documents[:NAMED].tolist()]
    more = len(documents) - len(some)
    return ", ".join(some) + (f" and {more} more" if more > 0 else "")


def _fitted(pieces: Pieces, corpus: Corpus, max_length: int, overflow: Overflow) -> Pieces:
    """The pieces by the policy; those that were cut and teach nothing any more are left out."""
    long = pieces.length > max_length
    if not long.any():
        return pieces
    over = pieces.document[long]
    if overflow == "error":
        raise _too_long(over, corpus, max_length)
    if overflow == "drop":
        left = Left(documents=over, tokens=int(pieces.length[long].sum()))
        return replace(pieces.only(~long), too_long=left)
    if overflow == "split":
        return _split(pieces, max_length)
    beyond = np.where(long, pieces.length - max_length, 0)
    start = pieces.start + beyond if overflow == "truncate_left" else pieces.start
    left = Left(documents=over, tokens=int(beyond.sum()))
    shorter = replace(pieces, start=start, length=pieces.length - beyond, cut=left)
    idle = long.copy()
    idle[long] = learned_of_pieces(corpus, over, start[long], shorter.length[long]) == 0
    return _moved_to_idle(shorter, idle)


def _split(pieces: Pieces, max_length: int) -> Pieces:
    """Whole rows of each document and the rest; where the rest is one token it gets one more, to follow it."""
    counts = -(-pieces.length // max_length)
    which = np.repeat(np.arange(len(counts)), counts)
    start = spread(np.zeros(len(counts), dtype=np.int64), counts) * max_length
    last = np.cumsum(counts) - 1
    lonely = last[(pieces.length % max_length == 1) & (counts > 1)] if max_length > 2 else last[:0]
    start[lonely] -= 1
    ends = np.append(start[1:], 0)
    ends[last] = pieces.length
    return replace(pieces, document=pieces.document[which], start=start, length=ends - start)


def _moved_to_idle(pieces: Pieces, idle: NDArray[np.bool_]) -> Pieces:
    documents = np.concatenate([pieces.idle.documents, pieces.document[idle]])
    left = Left(documents=np.unique(documents), tokens=pieces.idle.tokens + int(pieces.length[idle].sum()))
    return replace(pieces.only(~idle), idle=left)


def _too_long(documents: NDArray[np.int32], corpus: Corpus, max_length: int) -> PlanError:
    longest = int(corpus.length[documents].max())
    plural = "documents are" if len(documents) > 1 else "document is"
    return PlanError(
        f"{len(documents)} {plural} longer than max_length={max_length}",
        where=named(documents, corpus),
        why="nothing is cut that was not asked for (overflow='error')",
        fix=f"max_length={longest}, or overflow='drop', 'truncate_right', 'truncate_left' or 'split'",
        slug="too-long",
    )


def _count(left: Left) -> str:
    return f"{len(left.documents)} document{'s' * (len(left.documents) > 1)}"


def checked_max_length(max_length: int) -> int:
    """Tokens in a row, as a plain number.

    Raises:
        UsageError: It is no whole number of at least 2, or is not counted in 32 bits.
    """
    return whole("max_length", max_length, 2, MAX_LENGTH, why="a token is learned from the one before it")


def check_policies(max_length: int, overflow: str, idle: str) -> None:
    """Refuse rows of fewer than 2 tokens and policies that are not there.

    Raises:
        UsageError: It is so.
    """
    checked_max_length(max_length)
    for name, value, known in (("overflow", overflow, Overflow), ("idle", idle, Idle)):
        if value not in get_args(known):
            raise UsageError(f"unknown policy {name}={value!r}", fix=f"use one of {', '.join(get_args(known))}")
