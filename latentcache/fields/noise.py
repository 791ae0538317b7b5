"""Floating-point noise: how far two encodings of one input may lie apart, and how numbers are stored.

Encoders round otherwise on another device, in another batch and in another precision. A build measures its own noise
(``Producer.noise``); the floors below cover what one small measurement misses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.dtypes import as_floats, is_finite
from latentcache.value import Value

#: Allowed parts of a build's own noise: of the largest difference, and of the mean one.
_OF_FLOOR = (8.0, 4.0)
#: Spacing of numbers next to 1 in each storage type.
_STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
#: Noise of encoders that give the same bits everywhere.
EXACT: Mapping[str, Any] = {"devices": ["cpu"], "largest": 0.0, "mean": 0.0}
#: Differences that count as noise (largest, mean), in standard deviations of the values: above those of batches,
#: threads and kernels in bfloat16 (0.015 at most) and of bfloat16 against float32 (0.055), measured on latents; far
#: below one pixel of shift (4) or tiles (2.4).
LEAST = 0.1, 0.02
#: In bfloat16 on another device, where each device is 2 % (root mean square) from float32.
ELSEWHERE_IN_BFLOAT16 = 0.5, 0.06


class Difference(Value):
    """Difference of a stored item from the one made again."""

    differs: bool
    largest: float = 0.0
    mean: float = 0.0
    detail: str = ""


def compare_floats(
    stored: NDArray[Any],
    remade: NDArray[Any],
    noise: Mapping[str, Any],
    compute_dtype: str,
    storage_dtype: str,
    *,
    parts: int = 1,
) -> Difference:
    """Different if beyond the noise, and beyond two roundings of the largest value; bfloat16 as uint16.

    Differences are in standard deviations of the item, or of the test input if that is larger, so that a flat input
    does not count as different. ``noise`` has those of the test input: ``scale``, and ``scale_logvar`` of the second
    of ``parts`` along the first axis.
    """
    elsewhere = noise.get("devices") != [noise.get("device", "")]
    least = ELSEWHERE_IN_BFLOAT16 if elsewhere and compute_dtype == "bfloat16" else LEAST
    measured_in_build = noise.get("largest", 0.0), noise.get("mean", 0.0)
    of_build = zip(least, measured_in_build, _OF_FLOOR, strict=True)
    allowed = [max(low, number * times) for low, number, times in of_build]
    step = _STEP[storage_dtype]
    differs, worst = False, [0.0, 0.0]
    if stored.shape != remade.shape or not (is_finite(stored) and is_finite(remade)):
        differs, worst = True, [math.inf, math.inf]
    else:
        sides = (np.array_split(as_floats(side).astype(np.float64), parts) for side in (stored, remade))
        for old, new, name in zip(*sides, ("scale", "scale_logvar")[:parts], strict=True):
            apart = np.abs(old - new)
            unit, rounding = max(float(old.std()), float(noise.get(name, 0.0))), 2 * step * float(np.abs(old).max())
            for number, difference in enumerate((float(apart.max()), float(apart.mean()))):
                differs |= difference > max(allowed[number] * unit, rounding)
                worst[number] = max(worst[number], difference / unit if unit else math.inf if difference else 0.0)
    text = (
        f"up to {worst[0]:.2g} std, {worst[1]:.2g} on average; at most {allowed[0]:.2g} std, {allowed[1]:.2g} allowed"
    )
    return Difference(differs=differs, largest=worst[0], mean=worst[1], detail=text if differs else "")


def measured(first: NDArray[np.float32], other: NDArray[np.float32]) -> dict[str, float]:
    """``largest`` and ``mean`` difference of two encodings in standard deviations, and ``scale``: that deviation."""
    apart, scale = np.abs(first - other), float(first.std()) or 1.0
    return {"largest": float(apart.max()) / scale, "mean": float(apart.mean()) / scale, "scale": scale}


def join_noise(noise: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The noise of two devices or builds together: the larger number, and all elements of lists, sorted."""
    joined = {**noise, **other}
    for name in noise.keys() & other.keys():
        lists = isinstance(joined[name], (list, tuple))
        joined[name] = sorted({*noise[name], *other[name]}) if lists else max(noise[name], other[name])
    return joined
