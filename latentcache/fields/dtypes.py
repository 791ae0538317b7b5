"""Storage types of field values. bfloat16, which NumPy lacks, travels as uint16: the upper half of a float32.

Rows of 8-bit floats with a scale each are for values that are read and not computed with, a quarter of float32. A row
of n values takes n + 4 bytes: n numbers of float8_e4m3fn, then the float32 that they are multiplied by, little
endian. float8_e4m3fn ("OFP8" of the Open Compute Project) has 4 bits of exponent, 3 of mantissa, 448 at most and no
infinity. The largest value of a row becomes 448. A row of zero bytes is a row of zeros, so padding needs no scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Name -> (code in the entry header, bytes per value).
DTYPES: Mapping[str, tuple[int, int]] = {
    "uint8": (1, 1),
    "float16": (2, 2),
    "bfloat16": (3, 2),
    "float32": (4, 4),
    "uint16": (5, 2),
    "int32": (6, 4),
    "uint32": (7, 4),
    "int64": (8, 8),
}
_NUMPY = {"bfloat16": "<u2"}
#: Types that encoders compute in and values are stored in.
FLOATS = ("float16", "bfloat16", "float32")
#: Type of rows of 8-bit floats, and bytes of the scale at the end of a row.
FLOAT8, SCALE_BYTES = "float8_e4m3fn", 4
_LARGEST = 448.0


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type that carries a storage type."""
    return np.dtype(_NUMPY.get(name, name)).newbyteorder("<")


def stored(values: NDArray[np.float32], name: str) -> NDArray[Any]:
    """In a storage type of floats, rounded once, to nearest even; NaN stays NaN."""
    if name != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(numpy_dtype(name))
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def as_floats(values: NDArray[Any]) -> NDArray[np.float32]:
    """Stored values as float32, exact."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


class Limit(NamedTuple):
    """Condition on the stored values of a field: ``value & mask < below``, as unsigned integers of their width."""

    mask: int
    below: int

    def holds(self, values: NDArray[Any]) -> bool:
        """True if it does for all values, in a tenth of the time of ``isfinite``."""
        return not self.mask or bool((values.view(f"<u{values.itemsize}") & self.mask < self.below).all())


_FINITE = {
    "float16": Limit(0x7FFF, 0x7C00),
    "bfloat16": Limit(0x7FFF, 0x7F80),
    "float32": Limit(0x7FFF_FFFF, 0x7F80_0000),
}


def is_finite(values: NDArray[Any]) -> bool:
    """True if all stored values are finite."""
    return finite_limit("bfloat16" if values.dtype == np.uint16 else values.dtype.name).holds(values)


def finite_limit(name: str) -> Limit:
    """Finite values of a storage type; any integer will do."""
    return _FINITE.get(name, Limit(0, 1))


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
