"""Rows of 8-bit floats with a scale each: a quarter of float32, for values that are read and not computed with.

A row of n values takes n + 4 bytes: n numbers of float8_e4m3fn (4 bits of exponent, 3 of mantissa, 448 at most, no
infinity; "OFP8" of the Open Compute Project), then the float32 that they are multiplied by, little endian. The
largest value of a row becomes 448. A row of zero bytes is a row of zeros, so padding needs no scale. NumPy alone.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

NAME = "float8_e4m3fn"
#: Bytes of the scale at the end of a row.
SCALE_BYTES = 4
_LARGEST = 448.0


def quantized(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(..., n) as (..., n + 4) bytes; each value is rounded to float16 and then to nearest even."""
    rows = np.asarray(values, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(_LARGEST)
        halves = (rows / np.where(scale > 0, scale, np.float32(1))).astype(np.float16)
    return np.concatenate([_codes()[halves.view(np.uint16)], scale.astype("<f4").view(np.uint8)], axis=-1)


def restored(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(..., n + 4) bytes as (..., n) values."""
    scale = np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view("<f4")
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float32] = _values()[rows[..., :-SCALE_BYTES]] * scale
    return found


def relative_error(values: NDArray[np.float32], rows: NDArray[np.uint8]) -> float:
    """Root mean square of the rounding, over that of the values."""
    power = float(np.square(values, dtype=np.float64).mean())
    return float((np.square(values - restored(rows), dtype=np.float64).mean() / power) ** 0.5) if power else 0.0


def within_a_step(made: NDArray[np.float32], stored: NDArray[np.float32]) -> NDArray[np.float32]:
    """``made``, with the stored value wherever the two are neighbors: noise can move a value to the next number."""
    least = np.abs(stored).max(axis=-1, keepdims=True) / _LARGEST / 64
    near = np.abs(made - stored) <= np.abs(stored) / 7 + least
    return np.where(near, stored, made)


@cache
def _values() -> NDArray[np.float32]:
    """(256,) the number of each byte; the two bytes without one are NaN."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, (code & 7) / 8
    found = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    found[127] = np.nan
    return np.concatenate([found, -found]).astype(np.float32)


@cache
def _codes() -> NDArray[np.uint8]:
    """(65536,) the byte of each float16; beyond the largest number, that of NaN."""
    steps, half = _values()[:127], np.arange(1 << 15, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (steps[1:] + steps[:-1]) / 2
    code = np.searchsorted(middle, half)
    tie = (code < len(middle)) & (half == middle[np.minimum(code, len(middle) - 1)])
    code = np.where(half > _LARGEST, 127, code + (tie & (code % 2 == 1)))  # NaN is sorted last
    code = np.where(np.isnan(half), 127, code).astype(np.uint8)
    return np.concatenate([code, code | 0x80])
