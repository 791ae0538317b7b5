"""What the pipeline knows of an encoder: uint8 pixels in, latents of the storage type out. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.recipe import EncoderSpec

Pixels = NDArray[np.uint8]
"""RGB pixels, (B, H, W, 3), C-contiguous: the bytes of a channels-last (B, 3, H, W) tensor as they stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """Raw latents of one batch, in the order of its pixels."""

    latents: NDArray[Any]
    """(B, C, H/f, W/f) in the storage type; bfloat16 travels as uint16. Moments have 2C channels, all means before
    all logvars; where one draw of them is stored, they come in float32 and ``posterior.drawn`` makes it."""
    finite: NDArray[np.bool_]
    """(B,) whether every value of that item is finite in the storage type."""


class Encoder(Protocol):
    """Turns pixels into raw (unscaled) latents.

    ``encode`` raises ``DeviceMemoryError`` when the batch does not fit (the pipeline halves it and tries the
    same pictures again) and ``DeviceError`` when the device is lost. ``precise=True`` asks for float32
    throughout, for pictures whose latents were not finite.
    """

    @property
    def spec(self) -> EncoderSpec:
        """What this encoder is."""

    @property
    def device(self) -> str:
        """Where it runs: ``cpu``, or the kind and the name of a device. Others may round otherwise."""

    def encode(self, pixels: Pixels, *, precise: bool = False) -> EncodedBatch:
        """Encode one batch of pictures of one size."""

    def close(self) -> None:
        """Give memory back."""
