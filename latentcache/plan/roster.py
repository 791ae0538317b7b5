"""Who is served in an epoch, and how often: repeats, weights between data sets, and the validation split.

Decides the entries that a plan orders. Guarantee: counts are exact integers, not draws: a data set with weight
0.3 gets its share of every epoch to the sample, and over epochs each of its samples is served equally often, to
within one. A sample is on the same side of the validation split for ever, because its content decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError

_SPAN = 1 << 64


def in_validation(content: NDArray[np.uint8], share: float) -> NDArray[np.bool_]:
    """Which samples belong to the validation set.

    Args:
        content: (S, 16) content hashes. Equal pictures fall on the same side.
        share: Part of all samples, from 0 to 1.

    Returns:
        (S,) True for validation. Adding or removing data never moves a sample across.

    Raises:
        UsageError: ``share`` is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise UsageError(f"a validation share of {share}", why="expected 0 to 1", fix="for example 0.05")
    if share == 1:
        return np.ones(len(content), dtype=np.bool_)
    # The first eight bytes are as good as uniform; the other eight stay free for other uses of the hash.
    leading = np.ascontiguousarray(content[:, :8]).view(">u8").reshape(-1)
    return np.asarray(leading < np.uint64(int(Fraction(share) * _SPAN)))


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Split ``total`` servings by weight, exactly, by largest remainder (ties to the earlier data set).

    Raises:
        UsageError: No weight, a negative one, or none above zero.
    """
    exact = [Fraction(weight) for weight in weights]
    if not exact or min(exact) < 0 or not sum(exact):
        raise UsageError(
            f"weights {list(weights)}", why="weights are 0 or more, one above 0", fix="weights=[0.7, 0.3]"
        )
    parts = [total * weight / sum(exact) for weight in exact]
    counts = [int(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: (counts[i] - parts[i], i))
    for position in by_remainder[: total - sum(counts)]:
        counts[position] += 1
    return counts


def servings(count: int, total: int, epoch: int) -> NDArray[np.int64]:
    """How often each of ``count`` samples is served when a data set has ``total`` servings in an epoch.

    Every sample gets ``total // count``; who gets one more moves on from epoch to epoch, so that after any number
    of epochs no sample is ahead of another by more than one.

    Returns:
        (count,) servings, which sum to ``total``.
    """
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    each, rest = divmod(total, count)
    result = np.full(count, each, dtype=np.int64)
    start = epoch * rest % count
    result[(start + np.arange(rest)) % count] += 1
    return result


def roster(repeats: NDArray[np.integer]) -> NDArray[np.int32]:
    """Entries to serve, each as often as ``repeats`` says: (sum of repeats,) positions, in order."""
    return np.repeat(np.arange(len(repeats), dtype=np.int32), repeats)
