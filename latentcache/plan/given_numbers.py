"""Numbers as callers give them: plain ones come back, also for those of numpy, or it is said which one cannot be.

Guarantee: what passes is an ``int`` or a ``float`` of Python, so that it may stand in a checkpoint and in an
identity, and is not computed with in 8 or 32 bits. True and False are no numbers here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from latentcache.errors import UsageError


def is_whole(value: object, least: int | None = None) -> bool:
    """Whether it is a whole number, where given of at least ``least``, also one of numpy; True is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least is None or int(value) >= least


def whole(name: str, value: Any, least: int, most: int = 2**63 - 1, *, why: str, fix: str = "") -> int:
    """A whole number.

    Args:
        name: What the caller gave it as.
        value: What he gave.
        least: No number is below it.
        most: No number is above it.
        why: What the number is for.
        fix: By default the least one.

    Raises:
        UsageError: It is none, or below or above that.
    """
    if not is_whole(value, least) or int(value) > most:
        raise UsageError(f"{name}={value!r}", why=why, fix=fix or f"{name}={least}, or more")
    return int(value)


def real(name: str, value: Any, least: float, most: float = math.inf, *, why: str, fix: str) -> float:
    """A number that need not be whole; one of numpy counts as it is written: ``float32(0.3)`` is 0.3.

    Args:
        name: What the caller gave it as.
        value: What he gave.
        least: No number is below it.
        most: No number is above it.
        why: What the number is for.
        fix: One that can be.

    Raises:
        UsageError: It is none, not finite, or below or above that.
    """
    plain = isinstance(value, Real) and not isinstance(value, bool)
    if not (plain and math.isfinite(value) and least <= value <= most):
        raise UsageError(f"{name}={value!r}", why=why, fix=fix)
    return float(value) if isinstance(value, float | int) or not hasattr(value, "dtype") else float(str(value))


def several(name: str, values: Any, *, fix: str) -> list[Any]:
    """Values one by one.

    Args:
        name: What the caller gave them as.
        values: What he gave; a string is none.
        fix: Some that can be.

    Raises:
        UsageError: There is one value, or none.
    """
    try:
        if isinstance(values, Iterable) and not isinstance(values, str | bytes):
            return list(values)
    except TypeError:  # an array of no dimension says that it could
        pass
    raise UsageError(f"{name}={values!r}", why="these are several values, one after the other", fix=fix)
