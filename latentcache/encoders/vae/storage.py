"""How float values become stored bytes without torch: the storage type, rounding and the finite flags.

Guarantee: one rounding, to nearest even, from float32; a value beyond the range of the storage type counts as
not finite. bfloat16 travels as uint16 (NumPy has no such type).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.protocol import EncodedBatch

#: Storage types of latents and the NumPy types they travel in.
STORAGE_TYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
}
_BFLOAT16_EXPONENT = 0x7F80


def stored(values: NDArray[np.float32], storage_dtype: str) -> EncodedBatch:
    """Latents (B, C, H, W) in their storage type, with one finite flag per item."""
    if storage_dtype == "bfloat16":
        latents: NDArray[Any] = to_bfloat16(values)
        fine = (latents & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT
    else:
        with np.errstate(over="ignore"):
            latents = values.astype(STORAGE_TYPES[storage_dtype])
        fine = np.isfinite(latents)
    return EncodedBatch(latents=latents, finite=fine.reshape(len(values), -1).all(axis=1))


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Upper half of each float32, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Inverse of :func:`to_bfloat16`, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
