"""The recipe: the frozen statement of what a cache holds, its canonical JSON and its id.

Decides what makes an entry reusable. What varies per sample is in the key (content, bucket); what is constant
and moves a latent by more than one pixel step is in the recipe's *identity* and so in every key; what only
decides which entries exist (resolutions, bucket limits) or how they are read (normalisation) is in the recipe
but not in its identity, so adding a resolution or mending a scaling factor encodes nothing again.
Library versions, batch size and device are provenance: recorded in the manifest, never here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from latentcache.errors import RecipeError
from latentcache.geometry.buckets import GEOMETRY_RULE, BucketTable, bucket_table, explicit_table
from latentcache.geometry.sizes import Size
from latentcache.identity.content import json_hash
from latentcache.identity.key import RECIPE_BYTES

#: What of an encoder's posterior is stored.
POSTERIORS = ("mode", "sample", "moments")
#: Storage types of latents: name -> (code in the entry header, bytes per value).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelProfile:
    """How the bytes of a file become the pixels an encoder sees. Every field is part of the identity."""

    resample: str = "lanczos-pil"
    """``lanczos-pil`` (Pillow) or ``lanczos-u8`` (torch, uint8, antialias): at most 2 levels apart."""
    decoder: str = "libjpeg-turbo"
    """Full-size decode; simplejpeg and Pillow agree to the bit, which a self-test checks at start."""
    orientation: str = "exif"
    """Stored EXIF orientation is applied before a bucket is chosen."""
    icc: str = "srgb"
    """``srgb``: embedded profiles are converted; ``ignore``: numbers are taken as they are."""
    alpha: str = "#ffffff"
    """Colour that transparent pictures are laid on, as #rrggbb."""
    deep: str = "high-byte"
    """16-bit samples keep their high byte (Pillow's own conversion clips at 255)."""
    version: int = 1
    """Bumped when the same file would give other pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalisation:
    """How raw latents become what a model trains on; applied when they are read.

    ``scale-shift``: ``(z - shift) * scale``. ``mean-std``: per channel ``(z - mean) / std * scale``.
    ``batch-norm``: 2x2 patches into channels ``(c, pi, pj)``, then ``(z - mean) / std``. ``none``: as stored.
    """

    kind: str = "none"
    scale: float = 1.0
    shift: float = 0.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    patch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """What an encoder is, known without loading it (and without torch)."""

    family: str
    """Class name of the encoder: ``AutoencoderKL``, ..., or ``demo``, ``stub``."""
    fingerprint: str
    """Hex hash of the encoder half's tensors (name, dtype, shape, bytes)."""
    config: str
    """Hex hash of the configuration fields that ``encode`` uses."""
    channels: int
    """Channels of a latent as a model sees it; stored moments have twice as many."""
    factor: int
    """Pixels per latent cell on each side."""
    multiple: int
    """Picture sides are multiples of this many pixels."""
    compute_dtype: str = "float32"
    storage_dtype: str = "float16"
    posterior: str = "mode"
    """``mode``: the mean of the posterior; encoders without a posterior have only this. ``sample``: one draw from it,
    the same for the same pixels. ``moments``: mean and logvar, from which a loader draws."""
    tiling: bool = False
    normalisation: Normalisation = field(default_factory=Normalisation)
    generic: bool = False
    """True where the class has no row in the table of families and its facts come from its configuration."""

    @property
    def stored_channels(self) -> int:
        """Channels of an entry: those of a latent, or of the means and then of the logvars."""
        return self.channels * (2 if self.posterior == "moments" else 1)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EncoderSpec:
        """From its fields as JSON values, as ``asdict`` gives them.

        Raises:
            KeyError: A field is missing; TypeError where there is one that this version does not know.
        """
        encoder = dict(data)
        normalisation = dict(encoder.pop("normalisation"))
        normalisation |= {name: tuple(normalisation[name]) for name in ("mean", "std")}
        return cls(**encoder, normalisation=Normalisation(**normalisation))

    def identity(self) -> dict[str, Any]:
        """The fields that move the stored bytes."""
        read_time = {"normalisation", "generic", "multiple"}
        return {name: value for name, value in asdict(self).items() if name not in read_time}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometrySettings:
    """Which sizes exist: resolutions in pixels (the side of a square of equal area), or explicit buckets."""

    resolutions: tuple[int, ...] = (512,)
    multiple: int = 64
    min_side: int | None = None
    max_side: int | None = None
    buckets: tuple[Size, ...] = ()
    flip: bool = False
    """Whether every picture is stored a second time, mirrored (left and right change places)."""
    rule: int = GEOMETRY_RULE

    def tables(self) -> tuple[BucketTable, ...]:
        """One bucket table per resolution; a single one for an explicit list.

        Raises:
            RecipeError: The settings leave no bucket.
        """
        if self.buckets:
            return (explicit_table(self.buckets, multiple=self.multiple),)
        if not self.resolutions:
            raise RecipeError("no resolution given", fix="give --resolution or --bucket")
        limits = {"min_side": self.min_side, "max_side": self.max_side}
        return tuple(bucket_table(resolution=r, multiple=self.multiple, **limits) for r in self.resolutions)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a cache holds. Two equal recipes give equal caches."""

    geometry: GeometrySettings
    pixels: PixelProfile
    encoder: EncoderSpec

    def identity(self) -> dict[str, Any]:
        """What enters the id, as JSON values without floats."""
        return {"rule": self.geometry.rule, "pixels": asdict(self.pixels), "encoder": self.encoder.identity()}

    @cached_property
    def recipe_id(self) -> bytes:
        """16 bytes; the first 8 are in every key, all 16 in every entry header."""
        return json_hash(self.identity())

    @property
    def key_part(self) -> bytes:
        """The bytes of the id that enter a key."""
        return self.recipe_id[:RECIPE_BYTES]

    def as_json(self) -> dict[str, Any]:
        """All fields, as JSON values; sizes as ``[height, width]``. ``flip`` is there only where it is true."""
        geometry = asdict(self.geometry) | {"buckets": [[b.height, b.width] for b in self.geometry.buckets]}
        if not self.geometry.flip:
            del geometry["flip"]
        return {"geometry": geometry, "pixels": asdict(self.pixels), "encoder": asdict(self.encoder)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Recipe:
        """Inverse of :meth:`as_json`.

        Raises:
            RecipeError: A part is missing or has a field this version does not know.
        """
        try:
            geometry = dict(data["geometry"])
            geometry["resolutions"] = tuple(geometry["resolutions"])
            geometry["buckets"] = tuple(Size(*pair) for pair in geometry["buckets"])
            return cls(
                geometry=GeometrySettings(**geometry),
                pixels=PixelProfile(**data["pixels"]),
                encoder=EncoderSpec.from_json(data["encoder"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecipeError(
                "the recipe in the manifest cannot be read", why=str(error), fix="build the cache again"
            ) from error

    @property
    def variants(self) -> int:
        """Entries of one picture in one bucket."""
        return 2 if self.geometry.flip else 1

    def with_encoder(self, **changes: Any) -> Recipe:
        """A copy with some encoder fields replaced."""
        return replace(self, encoder=replace(self.encoder, **changes))


def flat(recipe: Recipe) -> dict[str, Any]:
    """``{"geometry.resolutions": [512], ...}``: one value per field, for comparing and printing."""
    nested = recipe.as_json()
    nested["geometry"].setdefault("flip", False)
    return {f"{part}.{name}": value for part, fields in nested.items() for name, value in fields.items()}


def differences(cached: Recipe, requested: Recipe) -> list[tuple[str, Any, Any]]:
    """The fields in which two recipes differ: (field, cached, requested), in the order of the recipe."""
    mine, theirs = flat(cached), flat(requested)
    return [(name, mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]]
