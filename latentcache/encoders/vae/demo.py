"""The embedded codec behind ``--model demo``: an analytic 8x8 block DCT. For trying the tool, not for training.

Each 8x8 block of pixels becomes 16 numbers: the first 10 coefficients in zig-zag order of a luma-like axis and
the first 3 of each of two chroma-like axes. The colour axes are the orthonormal (1,1,1)/sqrt(3),
(1,0,-1)/sqrt(2), (1,-2,1)/sqrt(6); the DCT is the orthonormal DCT-II (Ahmed, Natarajan, Rao 1974); zig-zag as
in JPEG (ITU-T T.81). Pixels in [-1, 1] and a division by 8 keep latents near unit scale: |luma DC| <= sqrt(3).

Guarantee: bit-identical in any batch on any machine. The basis is rounded to multiples of 2**-30 and multiplied
with integers, so that every partial sum is an integer below 2**53 and exact in float64, in whatever order a
machine adds. Geometry is that of SD and Flux (f8, 16 channels). Cost: 10 ms for 512x512. NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.protocol import EncodedBatch, Finished, Pixels
from latentcache.encoders.storage import from_bfloat16, stored
from latentcache.identity.content import content_hash, json_hash
from latentcache.recipe import EncoderSpec

_BLOCK = 8
_COEFFICIENTS = (10, 3, 3)
_CHANNELS = sum(_COEFFICIENTS)
_AXES = ((1, 1, 1), (1, 0, -1), (1, -2, 1))
_UNIT = 1 << 30
_VERSION = 1
_ZIGZAG = ((0, 0), (0, 1), (1, 0), (2, 0), (1, 1), (0, 2), (0, 3), (1, 2), (2, 1), (3, 0))


@cache
def _basis() -> NDArray[np.float64]:
    """Rows of the codec, (16, 8, 8, 3), orthonormal up to their rounding, in units of 2**-30 (integers)."""
    rows = []
    for axis, count in zip(_AXES, _COEFFICIENTS, strict=True):
        colour = np.array(axis) / math.sqrt(sum(value * value for value in axis))
        rows += [np.multiply.outer(np.outer(_cosine(v), _cosine(u)), colour) for v, u in _ZIGZAG[:count]]
    basis: NDArray[np.float64] = np.rint(np.stack(rows) * _UNIT)
    return basis


def demo_spec(storage_dtype: str = "float16") -> EncoderSpec:
    """What the codec is; its fingerprint is the hash of its basis."""
    return EncoderSpec(
        family="demo",
        fingerprint=content_hash(_basis().astype("<i8").tobytes()).hex(),
        config=json_hash({"block": _BLOCK, "version": _VERSION}).hex(),
        channels=_CHANNELS,
        factor=_BLOCK,
        multiple=_BLOCK,
        storage_dtype=storage_dtype,
    )


class DemoEncoder:
    """Encoder half of the codec.

    Args:
        storage_dtype: float16, bfloat16 or float32.
    """

    def __init__(self, *, storage_dtype: str = "float16") -> None:
        self._spec = demo_spec(storage_dtype)

    @property
    def spec(self) -> EncoderSpec:
        """What this encoder is."""
        return self._spec

    @property
    def device(self) -> str:
        """Where it runs."""
        return "cpu"

    def encode(self, pixels: Pixels, *, precise: bool = False) -> EncodedBatch:
        """(B, H, W, 3) as (B, 16, H/8, W/8). ``precise`` changes nothing: the arithmetic is exact."""
        batch, height, width, _ = pixels.shape
        rows, columns = height // _BLOCK, width // _BLOCK
        blocks = pixels.reshape(batch, rows, _BLOCK, columns, _BLOCK, 3).transpose(0, 1, 3, 2, 4, 5)
        whole = blocks.reshape(-1, _BLOCK * _BLOCK * 3).astype(np.float64) * 2 - 255
        sums = whole @ _basis().reshape(_CHANNELS, -1).T
        latents = (sums / (255.0 * _BLOCK * _UNIT)).reshape(batch, rows, columns, _CHANNELS)
        return stored(np.ascontiguousarray(latents.transpose(0, 3, 1, 2), dtype=np.float32), self._spec.storage_dtype)

    def submit(self, pictures: Sequence[Pixels], *, precise: bool = False) -> Finished:
        """Encode now: there is no device to wait for."""
        return Finished(self.encode(np.stack(pictures), precise=precise))

    def close(self) -> None:
        """Nothing to give back."""


def decode(latents: NDArray[Any]) -> Pixels:
    """Pictures (B, H, W, 3), uint8, from latents (B, 16, H/8, W/8) of any storage type; for previews."""
    floats = from_bfloat16(latents) if latents.dtype == np.uint16 else latents.astype(np.float32)
    batch, channels, rows, columns = floats.shape
    flat = floats.transpose(0, 2, 3, 1).reshape(-1, channels)
    basis = (_basis() * (_BLOCK / _UNIT)).astype(np.float32).reshape(_CHANNELS, -1)
    blocks = (flat @ basis).reshape(batch, rows, columns, _BLOCK, _BLOCK, 3).transpose(0, 1, 3, 2, 4, 5)
    pictures = blocks.reshape(batch, rows * _BLOCK, columns * _BLOCK, 3)
    levels: Pixels = np.rint(np.clip((pictures + 1) * 127.5, 0, 255)).astype(np.uint8)
    return levels


def _cosine(frequency: int) -> NDArray[np.float64]:
    """One row of the orthonormal DCT-II of length 8."""
    scale = math.sqrt((1 if frequency == 0 else 2) / _BLOCK)
    return np.array([scale * math.cos(math.pi * (2 * n + 1) * frequency / (2 * _BLOCK)) for n in range(_BLOCK)])
