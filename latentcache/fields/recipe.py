"""How the items of a field are stored and read, and the recipe that decides their bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, cast

from latentcache.errors import RecipeError
from latentcache.fields.captions import CaptionVariants
from latentcache.fields.settings import differing, flat_settings
from latentcache.identity.content import json_hash
from latentcache.value import Value, typed

Differences = list[tuple[str, Any, Any]]
"""Settings in which two recipes differ: (name, cached, requested); nested names joined by dots."""


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
