"""Training and validation parts, decided by content, so no sample crosses from one to the other when data is added.

Guarantee: the side of a sample depends on its bytes and the fraction alone, not on names, order or other samples. A
larger fraction keeps everything that a smaller one took. Equal inputs under two names are on one side.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from latentcache.plan.numbers import real

_SPAN = 1 << 64


def in_validation(content: NDArray[np.uint8], fraction: float) -> NDArray[np.bool_]:
    """Which samples belong to the validation part.

    Args:
        content: (S, 16) content hashes.
        fraction: Part of all samples, from 0 to 1.
    """
    fraction = real("validation", fraction, 0, 1, why="the fraction of the samples to hold out", fix="split(0.05)")
    if fraction == 1:
        return np.ones(len(content), dtype=np.bool_)
    # The first eight bytes are as good as uniform; the other eight stay free for other uses of the hash.
    leading = np.ascontiguousarray(content[:, :8]).view(">u8").reshape(-1)
    return np.asarray(leading < np.uint64(int(Fraction(fraction) * _SPAN)))
