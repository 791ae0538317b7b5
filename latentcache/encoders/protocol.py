"""Image encoders as producers see them: uint8 pixels in, latents of the storage type out. No torch here.

A batch is submitted and fetched later, so that copies and the work of the host overlap the computation. An encoder
that computes in the call returns a :class:`Computed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.latents import EncoderSpec
from latentcache.value import Value

Pixels = NDArray[np.uint8]
"""RGB pixels, (B, H, W, 3), C-contiguous: the bytes of a channels-last (B, 3, H, W) tensor."""


class EncodedBatch(Value):
    """Raw latents of one batch, in the order of its pixels. The arrays own their memory."""

    latents: NDArray[Any]
    """(B, C, H/f, W/f) in the storage type; bfloat16 travels as uint16. Moments have 2C channels,
    all means before all logvars."""
    finite: NDArray[np.bool_]
    """(B,) True if every value of the item is finite in the storage type."""


class PendingBatch(Protocol):
    """A batch that the device has been given."""

    def done(self) -> bool:
        """True if ``result`` would return at once."""

    def result(self) -> EncodedBatch:
        """The latents; waits for the device. Raises the errors of ``Encoder.submit``. To be called once."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A batch that was encoded in the call."""

    batch: EncodedBatch

    def done(self) -> bool:
        """Always True."""
        return True

    def result(self) -> EncodedBatch:
        """The latents."""
        return self.batch


class Encoder(Protocol):
    """Turns pixels into raw (unscaled) latents.

    ``submit`` and ``result`` raise ``DeviceMemoryError`` if the batch does not fit (the engine halves it and tries
    the same images again) and ``DeviceError`` if the device is lost. ``precise=True`` asks for float32 throughout,
    for images whose latents were not finite.
    """

    @property
    def spec(self) -> EncoderSpec:
        """Description of this encoder."""

    @property
    def device(self) -> str:
        """Where it runs: ``cpu``, or kind and name of a device. Other devices may round otherwise."""

    def submit(self, images: Sequence[Pixels], *, precise: bool = False) -> PendingBatch:
        """Begin to encode B images (H, W, 3) of one size; their memory is not needed after the call."""

    def close(self) -> None:
        """Free the memory of the device."""


def encode(encoder: Encoder, images: Pixels | Sequence[Pixels], *, precise: bool = False) -> EncodedBatch:
    """Encode one batch and wait for it."""
    return encoder.submit(list(images), precise=precise).result()
