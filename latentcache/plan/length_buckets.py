"""Allowed lengths of rows: the length at which each row is served, so batches waste little and have few shapes.

Guarantee: a row is in the smallest allowed length that holds it or, if that length would have an incomplete batch, in
a longer one: incomplete batches move up, the longest rows first, so only the longest length in use has a remainder
and no row is skipped (report R1). A remainder is never repeated from fewer rows than a batch unless there are no
more. Each row counts once: with weights every length may have an incomplete batch. Cost: one sort by length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.plan.numbers import is_whole, several


def checked_lengths(lengths: Sequence[int] | None, longest: int) -> tuple[int, ...]:
    """The allowed lengths, rising; only ``longest`` if none are given."""
    given = (longest,) if lengths is None else tuple(several("lengths", lengths, fix=f"lengths=[{longest}]"))
    allowed = tuple(int(length) for length in given if is_whole(length))
    rising = len(allowed) == len(given) > 0 and list(allowed) == sorted(set(allowed))
    if not rising or allowed[0] < 2 or allowed[-1] != longest:
        raise UsageError(
            f"lengths={list(given)}: must rise from at least 2 up to {longest}",
            fix=f"lengths={sorted({max(longest // 4, 2), max(longest // 2, 2), longest})}",
        )
    return allowed


def fitting(tokens: NDArray[np.integer], allowed: Sequence[int]) -> NDArray[np.int32]:
    """(R,) the smallest allowed length that holds each row, as a position in ``allowed``."""
    return np.searchsorted(np.asarray(allowed), tokens).astype(np.int32)


def merged_upward(tokens: NDArray[np.integer], allowed: Sequence[int], batch: int) -> NDArray[np.int32]:
    """(R,) as :func:`fitting`, with rows moved up until every length in use but the last has only full batches.

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
