"""How the items of a field are stored, read and compared, and the recipe that decides their bytes.

Encoders round otherwise on another device, in another batch and in another precision. A build measures its own noise
(``Producer.noise``); the floors below cover what one small measurement misses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import RecipeError
from latentcache.fields.captions import CaptionVariants
from latentcache.fields.dtypes import as_floats, is_finite
from latentcache.fields.settings import differing, flat_settings
from latentcache.identity.content import json_hash
from latentcache.value import Value, typed

Differences = list[tuple[str, Any, Any]]
"""Settings in which two recipes differ: (name, cached, requested); nested names joined by dots."""
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


class Group(Value):
    """One shape of items of a field: a bucket of images, or the ragged group of documents."""

    label: str
    """Name in messages: ``1024x768`` (height x width, pixels); empty for a ragged field."""
    shape: tuple[int, ...]
    """Shape of one item's payload; -1 in the first place is the ragged axis."""
    dims: tuple[int, int, int] = (1, 1, 1)
    """Frames, height and width (pixels) that enter the key."""


class FieldSpec(Value):
    """Storage of the items of a field, and their collation in a batch."""

    dtype: str
    """Storage type, a name of ``fields.dtypes.DTYPES``."""
    dims: tuple[str, ...]
    """Names of the axes, such as ``("C", "h", "w")``; a ragged axis comes first and is marked by ``ragged``."""
    ragged: bool = False
    """True if the first axis differs between items."""
    collate: Literal["stack", "pad", "pack"] = "stack"
    pad_value: int | float = 0
    variants: int = 1
    """Stored variants per item: its crops, and their flips after them."""
    length: int = 0
    """Elements that ragged items are padded to; 0: those of the longest item."""
    first_prompt: int = 256
    """Numbers from here on are items of the field and of no sample, see :attr:`ReadSpec.prompts`."""


class ReadSpec(Value):
    """Operations of the loader on stored values. Nothing here changes stored bytes."""

    affine: Mapping[str, Any] | None = None
    """``kind`` (scale-shift, mean-std, batch-norm), ``scale``, ``shift``, ``mean``, ``std``, ``patch``."""
    posterior: bool = False
    """True if means and log variances are stored, from which the loader draws."""
    texts: str = ""
    """Settings that decide the texts of variants. Fields of one input are served together only if these are equal."""
    prompts: Mapping[str, int] = field(default_factory=dict)
    """Texts that belong to the field and to no sample -> variant of their item; one sample has their rows."""


class FieldRecipe(Value):
    """The frozen settings that decide an entry's bytes, plus read-time and provenance parts."""

    id_name: ClassVar[str] = ""
    """Enters the id with the identity; kinds that share it share entries' recipes."""

    @property
    def spec(self) -> FieldSpec:
        """Storage and collation."""
        raise TypeError(f"{type(self).__name__} lacks spec")

    @property
    def compute_dtype(self) -> str:
        """Type that values are computed in."""
        return "float32"

    @property
    def read_time(self) -> ReadSpec:
        """Operations that the loader applies."""
        return ReadSpec()

    def text(self, text: str, variant: int) -> str:
        """Return the text of a variant, from the text of its input: one of several, which are joined by NUL."""
        return CaptionVariants().text(text, variant)

    def identity(self) -> dict[str, Any]:
        """The part that moves stored bytes, as JSON values without floats."""
        return self.as_json()

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return cast("dict[str, Any]", json.loads(json.dumps(asdict(self))))

    @cached_property
    def recipe_id(self) -> bytes:
        """16 bytes of :meth:`identity` and :attr:`id_name`; the first 8 are in every key."""
        return json_hash({self.id_name: self.identity()})

    def differences(self, requested: Self, provenance: Sequence[Mapping[str, Any]] = ({}, {})) -> Differences:
        """Settings in which another recipe differs from this one of a cache; ``provenance`` is that of both."""
        return differing(flat_settings(self.as_json()), flat_settings(requested.as_json()))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`as_json`; raises RecipeError."""
        try:
            recipe = cast("Self", typed(cls, data))
            if recipe.as_json() != data:
                raise ValueError("a part is missing, or of another version")
        except (TypeError, ValueError, AttributeError) as error:
            raise RecipeError(
                "the recipe in the manifest cannot be read", why=str(error), fix="build the cache again"
            ) from error
        return recipe


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
    differs = False
    worst = [0.0, 0.0]
    if stored.shape != remade.shape or not (is_finite(stored) and is_finite(remade)):
        differs = True
        worst = [math.inf, math.inf]
    else:
        sides = (np.array_split(as_floats(side).astype(np.float64), parts) for side in (stored, remade))
        for old, new, name in zip(*sides, ("scale", "scale_logvar")[:parts], strict=True):
            apart = np.abs(old - new)
            unit = max(float(old.std()), float(noise.get(name, 0.0)))
            rounding = 2 * step * float(np.abs(old).max())
            for number, difference in enumerate((float(apart.max()), float(apart.mean()))):
                differs |= difference > max(allowed[number] * unit, rounding)
                worst[number] = max(worst[number], difference / unit if unit else math.inf if difference else 0.0)
    text = (
        f"up to {worst[0]:.2g} std, {worst[1]:.2g} on average; at most {allowed[0]:.2g} std, {allowed[1]:.2g} allowed"
    )
    return Difference(differs=differs, largest=worst[0], mean=worst[1], detail=text if differs else "")


def measured(first: NDArray[np.float32], other: NDArray[np.float32]) -> dict[str, float]:
    """``largest`` and ``mean`` difference of two encodings in standard deviations, and ``scale``: that deviation."""
    apart = np.abs(first - other)
    scale = float(first.std()) or 1.0
    return {"largest": float(apart.max()) / scale, "mean": float(apart.mean()) / scale, "scale": scale}


def join_noise(noise: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The noise of two devices or builds together: the larger number, and all elements of lists, sorted."""
    joined = {**noise, **other}
    for name in noise.keys() & other.keys():
        lists = isinstance(joined[name], (list, tuple))
        joined[name] = sorted({*noise[name], *other[name]}) if lists else max(noise[name], other[name])
    return joined
