"""Image encoders as producers see them: uint8 pixels in, latents of the storage type out. No torch here.

A batch is submitted and fetched later, so that copies and the work of the host overlap the computation. An encoder
that computes in the call returns the batch itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.latents import EncoderSpec
from latentcache.value import Value

Pixels = NDArray[np.uint8]
"""RGB pixels, (B, H, W, 3), C-contiguous: the bytes of a channels-last (B, 3, H, W) tensor."""


class PendingBatch(Protocol):
    """A batch that the device has been given."""

    def done(self) -> bool:
        """True if ``result`` would return at once."""

    def result(self) -> EncodedBatch:
        """The latents; waits for the device. Raises the errors of ``Encoder.submit``. To be called once."""


class EncodedBatch(Value):
    """Raw latents of one batch, in the order of its pixels. The arrays own their memory."""

    latents: NDArray[Any]
    """(B, C, H/f, W/f) in the storage type; bfloat16 travels as uint16. Moments have 2C channels,
    all means before all logvars."""
    finite: NDArray[np.bool_]
    """(B,) True if every value of the item is finite in the storage type."""

    def done(self) -> bool:
        """Always True."""
        return True

    def result(self) -> EncodedBatch:
        """This batch."""
        return self


class Encoder:
    """Turns pixels into raw (unscaled) latents."""

    spec: EncoderSpec
    """Description of this encoder."""
    device: str = "cpu"
    """Where it runs: ``cpu``, or kind and name of a device. Other devices may round otherwise."""

    def submit(self, images: Sequence[Pixels], *, precise: bool = False) -> PendingBatch:
        """Begin to encode B images (H, W, 3) or clips (F, H, W, 3) of one size.

        Args:
            images: Their memory is not needed after the call.
            precise: Compute in float32 throughout, for images whose latents were not finite.

        Raises:
            DeviceMemoryError: The batch does not fit; nothing of it is left on the device. The engine halves it.
            DeviceError: The device failed.
            EncoderError: The model cannot encode this size, or gives another shape than described.
        """
        raise NotImplementedError

    def encode(self, images: Pixels | Sequence[Pixels], *, precise: bool = False) -> EncodedBatch:
        """Encode one batch and wait for it."""
        return self.submit(list(images), precise=precise).result()

    def close(self) -> None:
        """Free the memory of the device."""
