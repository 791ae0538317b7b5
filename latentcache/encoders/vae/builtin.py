"""Two encoders without torch: ``stub`` for tests and ``demo`` for trying the tool. NumPy only.

``stub``: 8x8 block means. Channels are the means of red, green and blue and the mean of all three, each over a block
of 8x8 pixels and mapped from [0, 255] to [-1, 1]: ``sum / (n * 127.5) - 1`` with an exact integer ``sum`` and n of
64 or 192. Its posterior, for ``--latents moments``: those values as means, each logvar is its mean
minus 2. ``delay_ms`` makes it as slow as a model, per image. The same image gives the same bytes in any batch on any
machine.

``demo``: an 8x8 block DCT (DCT-II, Ahmed, Natarajan, Rao 1974; zig-zag as in JPEG, ITU-T T.81). Each block becomes 16
numbers: the first 10 coefficients of the color axis (1,1,1)/sqrt(3) and the first 3 of (1,0,-1)/sqrt(2) and of
(1,-2,1)/sqrt(6). It is bit-identical on any machine: the basis is rounded to multiples of 2**-30 and multiplied with
integers, so every partial sum is an integer below 2**53 and exact in float64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.protocol import EncodedBatch, Encoder, Pixels
from latentcache.fields.dtypes import finite, stored
from latentcache.fields.latents import EncoderSpec
from latentcache.identity.content import content_hash, json_hash

#: Frames of a latent frame: the first of each is encoded, as an image.
FRAME_STEP = 4
_BLOCK = 8
_STUB_CHANNELS = 4
#: Increased if the same image gives other values.
_STUB_VERSION = 1


def stub_spec(storage_dtype: str = "float16", posterior: str = "mode") -> EncoderSpec:
    """Description of the stub; the delay is not part of it."""
    return EncoderSpec(
        family="stub",
        fingerprint=json_hash({"stub": "block means", "version": _STUB_VERSION}).hex(),
        config=json_hash({"block": _BLOCK}).hex(),
        channels=_STUB_CHANNELS,
        factor=_BLOCK,
        multiple=_BLOCK,
        storage_dtype=storage_dtype,
        posterior=posterior,
    )


class _Builtin(Encoder):
    """An encoder that computes in the call."""

    def __init__(self, spec: EncoderSpec) -> None:
        self.spec = spec

    def submit(self, images: Sequence[Pixels], *, precise: bool = False) -> EncodedBatch:
        """Encode now; ``precise`` changes nothing."""
        pixels = np.stack(images)
        if pixels.ndim == 4:
            return self._stored(self._values(pixels))
        clips = pixels[:, ::FRAME_STEP]
        values = self._values(np.ascontiguousarray(clips).reshape(-1, *clips.shape[2:]))
        return self._stored(np.stack(np.split(values, len(clips))).swapaxes(1, 2))

    def _values(self, pixels: Pixels) -> NDArray[np.floating]:
        """Latents of (B, H, W, 3)."""
        raise NotImplementedError

    def _stored(self, values: NDArray[np.floating]) -> EncodedBatch:
        """In the storage type: one rounding, to nearest even, from float32."""
        latents = stored(np.ascontiguousarray(values, dtype=np.float32), self.spec.storage_dtype)
        return EncodedBatch(latents=latents, finite=np.all(finite(latents).reshape(len(values), -1), axis=1))


class StubEncoder(_Builtin):
    """Encoder of block means.

    Args:
        delay_ms: Milliseconds to sleep per image.
        storage_dtype: float16, bfloat16 or float32.
        posterior: mode or moments.
    """

    def __init__(self, delay_ms: int = 0, *, storage_dtype: str = "float16", posterior: str = "mode") -> None:
        super().__init__(stub_spec(storage_dtype, posterior))
        self._delay_s = delay_ms / 1000

    def _values(self, pixels: Pixels) -> NDArray[np.floating]:
        """Block means of (B, H, W, 3) as (B, 4, H/8, W/8), or 8 channels of moments."""
        batch = len(pixels)
        sums = _block_sums(pixels)
        everything = sums.sum(axis=3, keepdims=True)
        area = _BLOCK * _BLOCK * 127.5
        means = np.concatenate([sums / area - 1, everything / (3 * area) - 1], axis=3)
        time.sleep(self._delay_s * batch)
        values = means.transpose(0, 3, 1, 2).astype(np.float32)
        return values if self.spec.posterior == "mode" else np.concatenate([values, values - 2], axis=1)


def _block_sums(pixels: Pixels) -> NDArray[np.int64]:
    """(B, H, W, 3) to sums over blocks, (B, H/8, W/8, 3). 20 times as quick as one sum over two axes."""
    batch, height, width, colors = pixels.shape
    rows = pixels.reshape(-1, _BLOCK, width * colors)
    lines = rows[:, 0].astype(np.uint16)  # a block sums up to 64 * 255 = 16320
    for row in range(1, _BLOCK):
        lines += rows[:, row]
    columns = lines.reshape(-1, _BLOCK, colors)
    sums = columns[:, 0].copy()
    for column in range(1, _BLOCK):
        sums += columns[:, column]
    return sums.reshape(batch, height // _BLOCK, width // _BLOCK, colors).astype(np.int64)


_COEFFICIENTS = (10, 3, 3)
_CHANNELS = sum(_COEFFICIENTS)
_AXES = ((1, 1, 1), (1, 0, -1), (1, -2, 1))
_UNIT = 1 << 30
_DEMO_VERSION = 1
_ZIGZAG = ((0, 0), (0, 1), (1, 0), (2, 0), (1, 1), (0, 2), (0, 3), (1, 2), (2, 1), (3, 0))


@cache
def _basis() -> NDArray[np.float64]:
    """Rows of the codec, (16, 8, 8, 3), orthonormal up to their rounding, in units of 2**-30 (integers)."""
    rows = []
    for axis, count in zip(_AXES, _COEFFICIENTS, strict=True):
        color = np.array(axis) / math.sqrt(sum(value * value for value in axis))
        rows += [np.multiply.outer(np.outer(_cosine(v), _cosine(u)), color) for v, u in _ZIGZAG[:count]]
    basis: NDArray[np.float64] = np.rint(np.stack(rows) * _UNIT)
    return basis


def demo_spec(storage_dtype: str = "float16") -> EncoderSpec:
    """Description of the codec; its fingerprint is the hash of its basis."""
    return EncoderSpec(
        family="demo",
        fingerprint=content_hash(_basis().astype("<i8").tobytes()).hex(),
        config=json_hash({"block": _BLOCK, "version": _DEMO_VERSION}).hex(),
        channels=_CHANNELS,
        factor=_BLOCK,
        multiple=_BLOCK,
        storage_dtype=storage_dtype,
    )


class DemoEncoder(_Builtin):
    """Encoder half of the codec.

    Args:
        storage_dtype: float16, bfloat16 or float32.
    """

    def __init__(self, *, storage_dtype: str = "float16") -> None:
        super().__init__(demo_spec(storage_dtype))

    def _values(self, pixels: Pixels) -> NDArray[np.floating]:
        """(B, H, W, 3) as (B, 16, H/8, W/8)."""
        batch, height, width, _ = pixels.shape
        rows, columns = height // _BLOCK, width // _BLOCK
        blocks = pixels.reshape(batch, rows, _BLOCK, columns, _BLOCK, 3).transpose(0, 1, 3, 2, 4, 5)
        whole = blocks.reshape(-1, _BLOCK * _BLOCK * 3).astype(np.float64) * 2 - 255
        sums = whole @ _basis().reshape(_CHANNELS, -1).T
        latents = (sums / (255.0 * _BLOCK * _UNIT)).reshape(batch, rows, columns, _CHANNELS)
        return latents.transpose(0, 3, 1, 2)


def _cosine(frequency: int) -> NDArray[np.float64]:
    """One row of the orthonormal DCT-II of length 8."""
    scale = math.sqrt((1 if frequency == 0 else 2) / _BLOCK)
    return np.array([scale * math.cos(math.pi * (2 * n + 1) * frequency / (2 * _BLOCK)) for n in range(_BLOCK)])
