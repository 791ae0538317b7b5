"""Storage types of field values. bfloat16, which NumPy lacks, travels as uint16: the upper half of a float32."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

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


#: Bits that are all set in a value that is not finite.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000}


def is_finite(values: NDArray[Any], name: str = "") -> bool:
    """True if all values of a storage type are finite, as integers are; without a name uint16 is bfloat16."""
    bits = _EXPONENTS.get(name or ("bfloat16" if values.dtype == np.uint16 else values.dtype.name))
    # A tenth of the time of ``isfinite``.
    return bits is None or not ((values.view(f"<u{values.itemsize}") & bits) == bits).any()
