"""Which stored variant of a sample an epoch serves: one of its crops, as it is or flipped; one of its captions.

Guarantee: a draw depends on (seed, epoch, sample, occurrence) alone, so it is the same on every rank, in every
worker, for any batch size and after a resume. A sample that an epoch serves several times is drawn anew each time.
Crops and flips go by the content of a sample; draws of other inputs, such as captions, by its number, because many
samples may have the same caption.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.content import HASH_BYTES, checksum
from latentcache.identity.key import CONTENT_AT

Ints = NDArray[np.integer]
_END = CONTENT_AT + HASH_BYTES
_WORD = 0xFFFF_FFFF_FFFF_FFFF


def drawn_variants(
    keys: NDArray[np.uint8], turn: tuple[int, int], *, stored: int, crops: bool, flips: bool,
    occurrence: Ints | None = None,
) -> NDArray[np.int64]:  # fmt: skip
    """(B,) variant of each sample in an epoch (``turn``: seed, epoch): one of its crops, as it is or flipped.

    The content in the item keys (B, 32) decides. Of the ``stored`` crops all are served, or the first; their flips
    follow them. ``occurrence`` (B,) numbers the occurrences of a sample that the epoch serves several times.
    """
    draws = _draws("flip", (key[CONTENT_AT:_END].tobytes() for key in keys), turn, occurrence)
    chosen, flip = stored if crops else 1, stored if flips else 0
    crop = ((draws >> np.uint64(1)) % np.uint64(chosen)).astype(np.int64)
    variant: NDArray[np.int64] = crop + flip * (draws & np.uint64(1)).astype(np.int64)
    return variant


def drawn_of_samples(
    name: str, samples: Ints, turn: tuple[int, int], occurrence: Ints | None = None
) -> NDArray[np.uint64]:
    """(B,) 64 bits for each sample, by its number in the snapshot; draws of other names are independent."""
    return _draws(name, (number.to_bytes(8, "little") for number in samples.tolist()), turn, occurrence)


def _draws(
    name: str, subjects: Iterable[bytes], turn: tuple[int, int], occurrence: Ints | None
) -> NDArray[np.uint64]:
    """(B,) xxh3-64 of name, seed, epoch, subject, and the occurrence from the second on."""
    head = name.encode() + b"".join((word & _WORD).to_bytes(8, "little") for word in turn)
    if occurrence is None:
        draws = [checksum(head + one) for one in subjects]
    else:
        tails = (number.to_bytes(4, "little") if number else b"" for number in occurrence.tolist())
        draws = [checksum(head + one + tail) for one, tail in zip(subjects, tails, strict=True)]
    return np.array(draws, dtype=np.uint64)
