"""Rows of several allowed lengths: at which one each is served, so that batches waste little and have few shapes.

Decides the buckets of a padded view with ``lengths``. Guarantee: a row stands in the smallest allowed length that
holds it, or, where a length would have a batch that is not full, in a longer one: what fills no batch moves up, the
longest rows first, so only the longest length in use has a rest, and no row is skipped (report R1). There a rest is
never repeated from fewer rows than a batch, unless there are no more. With weights an epoch serves some rows more
often than others, and other ones in the next, so lengths are decided for the servings of each epoch: then every epoch
has the steps that it would have at one length. Cost: one sort of the rows, or of an epoch's servings, by length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.plan.given_numbers import is_whole, several
from latentcache.plan.weights import Mixture, servings


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The servings of one epoch, row by row."""

    bucket: NDArray[np.int32]
    """(S,) the allowed length of each, as a position."""
    entry: NDArray[np.int64]
    """(S,) row and length in one number, for :func:`row_and_length`; a row may come at two lengths in one epoch."""


def checked_lengths(lengths: Sequence[int] | None, max_length: int) -> tuple[int, ...]:
    """The allowed lengths, rising; the length of the view alone where none are given.

    Raises:
        UsageError: They do not rise, the last is not ``max_length``, or one holds fewer than 2 tokens.
    """
    given = (max_length,) if lengths is None else tuple(several("lengths", lengths, fix=f"lengths=[{max_length}]"))
    allowed = tuple(int(length) for length in given if is_whole(length))
    rising = len(allowed) == len(given) > 0 and list(allowed) == sorted(set(allowed))
    if not rising or allowed[0] < 2 or allowed[-1] != max_length:
        raise UsageError(
            f"lengths={list(given)} for rows of {max_length} tokens",
            why="they rise from at least 2 up to max_length",
            fix=f"for example lengths={sorted({max(max_length // 4, 2), max(max_length // 2, 2), max_length})}",
        )
    return allowed


def fitting(tokens: NDArray[np.integer], allowed: Sequence[int]) -> NDArray[np.int32]:
    """(R,) for each row the smallest allowed length that holds it, as a position in ``allowed``."""
    return np.searchsorted(np.asarray(allowed), tokens).astype(np.int32)


def merged_upward(tokens: NDArray[np.integer], allowed: Sequence[int], batch: int) -> NDArray[np.int32]:
    """(R,) as :func:`fitting`, with rows moved up until every length but the last in use has only full batches.

    Args:
        tokens: (R,) tokens of each row, none above the last allowed length.
        allowed: The lengths, rising.
        batch: Rows of one step on all ranks.
    """
    order = np.argsort(tokens, kind="stable")
    upto = np.searchsorted(tokens[order], np.asarray(allowed), side="right")
    top = int(np.searchsorted(upto, len(tokens)))
    if top:
        upto[:top] -= upto[:top] % batch
        if len(tokens) - upto[top - 1] < batch:
            upto[:top] = np.minimum(upto[:top], max(int(upto[top - 1]) - batch, 0))
    bucket = np.empty(len(tokens), dtype=np.int32)
    bucket[order] = np.repeat(np.arange(len(upto)), np.diff(upto, prepend=0))
    return bucket


def drawn(
    tokens: NDArray[np.integer], allowed: Sequence[int], mix: Mixture, batch: int, *, seed: int, epoch: int
) -> Drawn:
    """What an epoch serves of rows with weights, each serving at a length as in :func:`merged_upward`.

    Args:
        tokens: (R,) tokens of each row, none above the last allowed length.
        allowed: The lengths, rising.
        mix: How often each data set is served.
        batch: Servings of one step on all ranks.
        seed: Changes which rows have an extra turn in the same epoch.
        epoch: Number of the epoch.
    """
    times = servings(fitting(tokens, allowed), mix, seed=seed, epoch=epoch)
    row = np.repeat(np.arange(len(tokens), dtype=np.int64), times)
    bucket = merged_upward(tokens[row], allowed, batch)
    return Drawn(bucket=bucket, entry=bucket.astype(np.int64) * len(tokens) + row)


def each_once(bucket: NDArray[np.int32]) -> Drawn:
    """What an epoch serves of rows without weights.

    Args:
        bucket: (R,) the allowed length of each row, as a position.
    """
    rows = len(bucket)
    return Drawn(bucket=bucket, entry=bucket.astype(np.int64) * rows + np.arange(rows, dtype=np.int64))


def row_and_length(entries: NDArray[np.integer], rows: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Which rows entries of :class:`Drawn` are, and at which allowed lengths, of so many rows in all."""
    return entries % rows, entries // rows
