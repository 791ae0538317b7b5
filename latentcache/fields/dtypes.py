"""Storage types of field values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

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


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type that carries a storage type; bfloat16 travels as uint16."""
    return np.dtype(_NUMPY.get(name, name)).newbyteorder("<")
