"""Argument validation: numbers and choices as callers give them become plain Python values, or an error names them.

Guarantee: a value that passes is an ``int`` or ``float`` of Python. So it can be saved in a checkpoint, and does not
overflow as numbers of numpy do. ``True`` and ``False`` are not numbers here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

from latentcache.errors import UsageError, option

_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_ALLOWED = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(%?)")


def is_whole(value: object, least: int | None = None) -> bool:
    """True if the value is a whole number (also one of numpy), and at least ``least`` if that is given."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least is None or int(value) >= least


def whole(name: str, value: Any, least: int, most: int = 2**63 - 1, *, why: str = "", fix: str = "") -> int:
    """A whole number from ``least`` to ``most``. The error names the argument, why it is needed, and what to pass."""
    if not is_whole(value, least) or int(value) > most:
        limits = f"at least {least}" if most == 2**63 - 1 else f"from {least} to {most}"
        raise UsageError(
            f"must be a whole number, {limits}",
            argument=name,
            value=value,
            why=why,
            fix=fix or option(name, least),
        )
    return int(value)


def real(name: str, value: Any, least: float, most: float = math.inf, *, why: str = "", fix: str) -> float:
    """A finite number; a float of numpy counts as it is written: ``float32(0.3)`` is 0.3."""
    plain = isinstance(value, Real) and not isinstance(value, bool)
    if not (plain and math.isfinite(value) and least <= value <= most):
        limits = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise UsageError(f"must be a number, {limits}", argument=name, value=value, why=why, fix=fix)
    return float(value) if isinstance(value, float | int) or not hasattr(value, "dtype") else float(str(value))


def several(name: str, values: Any, *, fix: str) -> list[Any]:
    """The values of a list, tuple or array."""
    try:
        if isinstance(values, Iterable) and not isinstance(values, str | bytes):
            return list(values)
    except TypeError:  # an array or a tensor without a dimension
        pass
    raise UsageError("must be a list", argument=name, value=values, fix=fix)


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of several words."""
    if isinstance(value, str) and value in allowed:
        return value
    words = " or ".join(filter(None, [", ".join(map(repr, allowed[:-1])), repr(allowed[-1])]))
    raise UsageError(
        f"must be {words}",
        argument=name,
        value=value,
        fix=option(name, allowed[0]),
    )


def duration(text: str, argument: str = "publish_every") -> float:
    """Seconds of a duration: ``90s``, ``10m``, ``1h`` or ``7d``."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UsageError(
            "must be seconds, minutes, hours or days",
            argument=argument,
            value=text,
            fix=f"{option(argument, '10m')}; or 90s, 1h, 7d",
        )
    return float(int(match[1]) * _SECONDS[match[2]])


def tolerated(allow_failed: str, samples: int) -> int:
    """Number of rejected samples that exit status 0 allows: ``3``, or ``2%`` of all samples."""
    match = _ALLOWED.fullmatch(allow_failed)
    if match is None or (not match[2] and "." in allow_failed) or (match[2] and Fraction(match[1]) > 100):
        raise UsageError(
            "must be a number, or a percentage up to 100%",
            argument="allow_failed",
            value=allow_failed,
            fix="--allow-failed=1%",
        )
    return int(Fraction(match[1]) * samples / 100) if match[2] else int(match[1])


def human_bytes(size: float) -> str:
    """A size with its unit: 3.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def clock(seconds: float) -> str:
    """Seconds as text: 0:07, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
