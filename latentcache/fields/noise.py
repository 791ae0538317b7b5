"""Floating-point noise: how far two encodings of one input may lie apart, and how numbers are stored.

Encoders round otherwise on another device, in another batch and in another precision. A build measures its own noise
(``Producer.noise``); the floors below cover what one small measurement misses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.dtypes import as_floats
from latentcache.fields.protocol import Difference
from latentcache.value import Value

#: Allowed parts of a build's own noise: of the largest difference, and of the mean one.
_OF_FLOOR = (8.0, 4.0)
#: Spacing of numbers next to 1 in each storage type.
_STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}


#: Noise of encoders that give the same bits everywhere.
EXACT: Mapping[str, Any] = {"devices": ["cpu"], "largest": 0.0, "mean": 0.0}


class Tolerance(Value):
    """Differences that count as noise, in standard deviations of the values."""

    largest: float
    mean: float

    def __str__(self) -> str:
        return f"at most {self.largest:.2g} std, {self.mean:.2g} on average"


#: Above the differences of batches, threads and kernels in bfloat16 (0.015 std at most) and of bfloat16 against
#: float32 (0.055), measured on latents; far below one pixel of shift (4) or tiles (2.4).
LEAST = Tolerance(largest=0.1, mean=0.02)
#: In bfloat16 on another device, where each device is 2 % (root mean square) from float32.
ELSEWHERE_IN_BFLOAT16 = Tolerance(largest=0.5, mean=0.06)


def tolerance(noise: Mapping[str, Any], compute_dtype: str) -> Tolerance:
    """Differences that still count as noise between a cache and an encoder."""
    elsewhere = noise.get("devices") != [noise.get("device", "")]
    least = ELSEWHERE_IN_BFLOAT16 if elsewhere and compute_dtype == "bfloat16" else LEAST
    return Tolerance(
        largest=max(least.largest, _OF_FLOOR[0] * noise.get("largest", 0.0)),
        mean=max(least.mean, _OF_FLOOR[1] * noise.get("mean", 0.0)),
    )


def compare_floats(
    stored: NDArray[Any],
    made: NDArray[Any],
    noise: Mapping[str, Any],
    *,
    compute_dtype: str,
    storage_dtype: str,
    parts: int = 1,
) -> Difference:
    """Different if beyond the noise, and beyond two roundings of the largest value.

    Differences are in standard deviations: of the item, or of the test input where that is larger (``scale``; of the
    second part ``scale_logvar``), so that a flat input does not count as different.

    Args:
        stored: An item of a cache; bfloat16 as uint16.
        made: The same item, made again.
        noise: As :meth:`FieldKind.compare` gets it.
        compute_dtype: Of the cache.
        storage_dtype: Of both.
        parts: Parts of equal size along the first axis that have a scale of their own.
    """
    allowed, step = tolerance(noise, compute_dtype), _STEP[storage_dtype]
    scales = [float(noise.get(name, 0.0)) for name in ("scale", "scale_logvar")[:parts]]
    old, new = (np.array_split(as_floats(side), parts) for side in (stored, made))
    rows = zip(old, new, scales, strict=True)
    found = [_apart(before, after, scale, allowed, step) for before, after, scale in rows]
    worst = Difference(
        differs=any(part.differs for part in found),
        largest=max(part.largest for part in found),
        mean=max(part.mean for part in found),
    )
    text = f"up to {worst.largest:.2g} std, {worst.mean:.2g} on average; {allowed} allowed"
    return replace(worst, detail=text if worst.differs else "")


def measured(one: NDArray[np.float32], other: NDArray[np.float32]) -> dict[str, float]:
    """``largest`` and ``mean`` difference of two encodings in standard deviations, and ``scale``: that deviation."""
    apart, scale = np.abs(one - other), float(one.std()) or 1.0
    return {"largest": float(apart.max()) / scale, "mean": float(apart.mean()) / scale, "scale": scale}


def _apart(
    old: NDArray[np.float32], new: NDArray[np.float32], scale: float, allowed: Tolerance, step: float
) -> Difference:
    """The difference of two items of one shape; infinite if one is not finite."""
    if old.shape != new.shape or not (np.isfinite(old).all() and np.isfinite(new).all()):
        return Difference(differs=True, largest=math.inf, mean=math.inf)
    wide = old.astype(np.float64)
    difference = np.abs(wide - new)
    unit, rounding = max(float(wide.std()), scale), 2 * step * float(np.abs(wide).max())
    largest, mean = float(difference.max()), float(difference.mean())
    return Difference(
        differs=largest > max(allowed.largest * unit, rounding) or mean > max(allowed.mean * unit, rounding),
        largest=_ratio(largest, unit),
        mean=_ratio(mean, unit),
    )


def _ratio(difference: float, scale: float) -> float:
    return difference / scale if scale else (math.inf if difference else 0.0)
