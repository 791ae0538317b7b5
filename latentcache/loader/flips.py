"""Which of a picture's two entries an epoch serves: the picture, or its mirror image.

Decides by (seed, epoch, content of the file) alone: the same on every rank, in every worker, for any batch size and
after a resume; at every resolution alike; about half of the pictures are mirrored in each epoch. A latent is never
mirrored, because encoders are not symmetric: mirror images were encoded from mirrored pixels.
Cost: one short hash per entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.identity.content import HASH_BYTES, checksum
from latentcache.store.generation import Rows
from latentcache.store.variants import FoldedRows

_WORD = 0xFFFF_FFFF_FFFF_FFFF
#: Where the content hash stands in a key.
_CONTENT = slice(8, 8 + HASH_BYTES)


def turned(
    rows: Sequence[int] | NDArray[np.integer], keys: NDArray[np.uint8], *, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Rows of the variants that this epoch serves.

    Args:
        rows: (B,) rows of pictures, below N.
        keys: (2N, 32) keys of pictures, then of their mirror images.
        seed: That of the loader.
        epoch: Number of the epoch.
    """
    count = len(keys) // 2
    name = b"flip" + (seed & _WORD).to_bytes(8, "little") + (epoch & _WORD).to_bytes(8, "little")
    contents = [key.tobytes() for key in keys[rows, _CONTENT]]
    turns = [checksum(name + content) & 1 for content in contents]
    return np.asarray(rows, dtype=np.int64) + count * np.asarray(turns, dtype=np.int64)


def checked_flip(asked: bool | None, rows: Rows) -> bool:
    """Whether mirror images are served.

    Raises:
        UsageError: They are asked for and not stored.
    """
    stored = isinstance(rows, FoldedRows)
    if asked and not stored:
        raise UsageError(
            "flip=True of a cache without mirrored pictures",
            why="latents are never mirrored: encoders are not symmetric",
            fix="run the same `latentcache build` with --flip: only what is mirrored is encoded",
            slug="no-flips",
        )
    return stored if asked is None else asked
