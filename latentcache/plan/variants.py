"""Which stored variant of a sample an epoch serves: one of its crops, as it is or flipped.

Guarantee: it depends on (seed, epoch, content, occurrence) alone, so it is the same on every rank, in every
worker, for any batch size and after a resume. A sample that an epoch serves several times is drawn anew each time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.content import HASH_BYTES, checksum
from latentcache.identity.key import CONTENT_AT

_END = CONTENT_AT + HASH_BYTES
_WORD = 0xFFFF_FFFF_FFFF_FFFF


def drawn_variants(
    keys: NDArray[np.uint8],
    turn: tuple[int, int],
    *,
    stored: int,
    crops: bool,
    flips: bool,
    occurrence: NDArray[np.integer] | None = None,
) -> NDArray[np.int64]:
    """(B,) variant of each sample in this epoch: one of its crops, as it is or flipped.

    Args:
        keys: (B, 32) item keys; their content decides.
        turn: Seed and epoch.
        stored: Crops that are stored of each; their flips follow them.
        crops: Serve all of them; False: the first.
        flips: Serve horizontal flips too.
        occurrence: (B,) number of each occurrence of a sample that the epoch serves several times.
    """
    seed, epoch = turn
    name = b"flip" + (seed & _WORD).to_bytes(8, "little") + (epoch & _WORD).to_bytes(8, "little")
    times = [0] * len(keys) if occurrence is None else occurrence.tolist()
    draws = [
        checksum(name + key[CONTENT_AT:_END].tobytes() + (number.to_bytes(4, "little") if number else b""))
        for key, number in zip(keys, times, strict=True)
    ]
    chosen, flip = stored if crops else 1, stored if flips else 0
    return np.array([(draw >> 1) % chosen + flip * (draw & 1) for draw in draws], dtype=np.int64)
