"""What the pipeline knows of an encoder: uint8 pixels in, latents of the storage type out. No torch here.

A batch is submitted and fetched later, so that copies and the host's work lie beside the computation. An encoder
that computes where it is called returns a :class:`Finished`, and nothing is different for whoever uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.recipe import EncoderSpec

Pixels = NDArray[np.uint8]
"""RGB pixels, (B, H, W, 3), C-contiguous: the bytes of a channels-last (B, 3, H, W) tensor as they stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """Raw latents of one batch, in the order of its pixels. The arrays own their memory."""

    latents: NDArray[Any]
    """(B, C, H/f, W/f) in the storage type; bfloat16 travels as uint16. Moments have 2C channels, all means before
    all logvars; where one draw of them is stored, they come in float32 and ``posterior.drawn`` makes it."""
    finite: NDArray[np.bool_]
    """(B,) whether every value of that item is finite in the storage type."""
    device_s: float = 0.0
    """Seconds that the device worked on it; 0 where the encoder does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What ``--compute-dtype auto`` came to."""

    compute_dtype: str
    why: str = ""
    """Why it is not float16, where a user on CUDA would expect that."""


class Pending(Protocol):
    """A batch that the device has been given."""

    def done(self) -> bool:
        """Whether ``result`` would return at once."""

    def result(self) -> EncodedBatch:
        """The latents; waits for the device. Raises what ``Encoder.encode`` raises. To be called once."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What an encoder gives that has computed before it returned."""

    batch: EncodedBatch

    def done(self) -> bool:
        """Always."""
        return True

    def result(self) -> EncodedBatch:
        """The latents."""
        return self.batch


class Encoder(Protocol):
    """Turns pixels into raw (unscaled) latents.

    ``encode``, ``submit`` and ``Pending.result`` raise ``DeviceMemoryError`` when the batch does not fit (the
    pipeline halves it and tries the same pictures again) and ``DeviceError`` when the device is lost.
    ``precise=True`` asks for float32 throughout, for pictures whose latents were not finite.
    """

    @property
    def spec(self) -> EncoderSpec:
        """What this encoder is."""

    @property
    def device(self) -> str:
        """Where it runs: ``cpu``, or the kind and the name of a device. Others may round otherwise."""

    def encode(self, pixels: Pixels, *, precise: bool = False) -> EncodedBatch:
        """Encode one batch of pictures of one size, and wait for it."""

    def submit(self, pictures: Sequence[Pixels], *, precise: bool = False) -> Pending:
        """Begin to encode B pictures (H, W, 3) of one size; their memory is not needed after the call."""

    def close(self) -> None:
        """Give memory back."""
