"""Rows of several allowed lengths: at which one each is served, so that batches waste little and have few shapes.

Decides the buckets of a padded view with ``lengths``. Guarantee: a row stands in the smallest allowed length that
holds it, or, where a length would have a batch that is not full, in a longer one: what fills no batch moves up, the
longest rows first, so only the longest length in use has a rest, and no row is skipped (report R1). There a rest is
never repeated from fewer rows than a batch, unless there are no more. Cost: one sort of the rows by length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError


def checked_lengths(lengths: Sequence[int] | None, max_length: int) -> tuple[int, ...]:
    """The allowed lengths, rising; the length of the view alone where none are given.

    Raises:
        UsageError: They do not rise, the last is not ``max_length``, or one holds fewer than 2 tokens.
    """
    allowed = tuple(lengths) if lengths is not None else (max_length,)
    if not allowed or list(allowed) != sorted(set(allowed)) or allowed[0] < 2 or allowed[-1] != max_length:
        raise UsageError(
            f"lengths={list(allowed)} for rows of {max_length} tokens",
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
