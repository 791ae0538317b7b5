"""Draws of stored variants in an epoch: a crop of a sample, as it is or flipped; a caption.

Guarantee: a draw depends on (seed, epoch, sample, occurrence) alone, so it is the same on every rank, in every
worker, for any batch size and after a resume. A sample that an epoch serves several times is drawn anew each time.
Samples are distinguished by their numbers, because many may have the same content or caption.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.content import checksum

Ints = NDArray[np.integer]
_WORD = 0xFFFF_FFFF_FFFF_FFFF


def drawn_of_samples(
    name: str, samples: Ints, turn: tuple[int, int], occurrence: Ints | None = None
) -> NDArray[np.uint64]:
    """(B,) 64 bits for each sample, by its number in the snapshot; draws of other names are independent.

    They are xxh3-64 of name, seed and epoch (``turn``), number, and from the second on of the ``occurrence`` (B,) of
    a sample that the epoch serves several times.
    """
    head = name.encode() + b"".join((word & _WORD).to_bytes(8, "little") for word in turn)
    again = [0] * len(samples) if occurrence is None else occurrence.tolist()
    tails = (number.to_bytes(4, "little") if number else b"" for number in again)
    draws = [
        checksum(head + sample.to_bytes(8, "little") + tail)
        for sample, tail in zip(samples.tolist(), tails, strict=True)
    ]
    return np.array(draws, dtype=np.uint64)
