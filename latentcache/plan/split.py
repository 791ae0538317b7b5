"""Which samples are for validation: decided by content, so that no sample ever crosses when data is added.

Guarantee: a sample's side depends on its bytes and the share alone, not on names, order or what else is there. A
larger share keeps everything that a smaller one took. Equal pictures under two names are on one side.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.given_numbers import real

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
    share = real("validation", share, 0, 1, why="the share of all samples, from 0 to 1", fix="for example 0.05")
    if share == 1:
        return np.ones(len(content), dtype=np.bool_)
    # The first eight bytes are as good as uniform; the other eight stay free for other uses of the hash.
    leading = np.ascontiguousarray(content[:, :8]).view(">u8").reshape(-1)
    return np.asarray(leading < np.uint64(int(Fraction(share) * _SPAN)))
