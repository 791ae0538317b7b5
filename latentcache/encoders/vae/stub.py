"""A documented stand-in for a model: 8x8 block means. For tests of everything but models.

Channels are the means of red, green and blue and the mean of all three, each over a block of 8x8 pixels and
mapped from [0, 255] to [-1, 1]: ``sum / (n * 127.5) - 1`` with an exact integer ``sum`` and n of 64 or 192.
Its posterior, for ``--latents sample`` and ``moments``: those values as means, and each logvar is its mean minus 2.
Guarantee: the same picture gives the same bytes in any batch on any machine, because the sums are integers.
``delay_ms`` makes it as slow as a model, per picture. NumPy only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.posterior import encoded_dtype
from latentcache.encoders.protocol import EncodedBatch, Finished, Pixels
from latentcache.encoders.storage import stored
from latentcache.identity.content import json_hash
from latentcache.recipe import EncoderSpec

_BLOCK = 8
_CHANNELS = 4
#: Bumped when the same picture would give other values.
_VERSION = 1


def stub_spec(storage_dtype: str = "float16", posterior: str = "mode") -> EncoderSpec:
    """What the stub is. The delay is no part of it."""
    return EncoderSpec(
        family="stub",
        fingerprint=json_hash({"stub": "block means", "version": _VERSION}).hex(),
        config=json_hash({"block": _BLOCK}).hex(),
        channels=_CHANNELS,
        factor=_BLOCK,
        multiple=_BLOCK,
        storage_dtype=storage_dtype,
        posterior=posterior,
    )


class StubEncoder:
    """Encoder of block means.

    Args:
        delay_ms: Milliseconds to sleep per picture.
        storage_dtype: float16, bfloat16 or float32.
        posterior: mode, sample or moments.
    """

    def __init__(self, delay_ms: int = 0, *, storage_dtype: str = "float16", posterior: str = "mode") -> None:
        self._delay_s = delay_ms / 1000
        self._spec = stub_spec(storage_dtype, posterior)

    @property
    def spec(self) -> EncoderSpec:
        """What this encoder is."""
        return self._spec

    @property
    def device(self) -> str:
        """Where it runs."""
        return "cpu"

    def encode(self, pixels: Pixels, *, precise: bool = False) -> EncodedBatch:
        """Block means of (B, H, W, 3) as (B, 4, H/8, W/8), or 8 channels of moments. ``precise`` changes nothing."""
        batch = len(pixels)
        sums = _block_sums(pixels)
        everything = sums.sum(axis=3, keepdims=True)
        area = _BLOCK * _BLOCK * 127.5
        means = np.concatenate([sums / area - 1, everything / (3 * area) - 1], axis=3)
        time.sleep(self._delay_s * batch)
        values = np.ascontiguousarray(means.transpose(0, 3, 1, 2), dtype=np.float32)
        if self._spec.posterior != "mode":
            values = np.concatenate([values, values - 2], axis=1)
        return stored(values, encoded_dtype(self._spec))

    def submit(self, pictures: Sequence[Pixels], *, precise: bool = False) -> Finished:
        """Encode now: there is no device to wait for."""
        return Finished(self.encode(np.stack(pictures), precise=precise))

    def close(self) -> None:
        """Nothing to give back."""


def _block_sums(pixels: Pixels) -> NDArray[np.int64]:
    """(B, H, W, 3) to sums over blocks, (B, H/8, W/8, 3). 20 times as quick as one sum over two axes."""
    batch, height, width, colours = pixels.shape
    rows = pixels.reshape(-1, _BLOCK, width * colours)
    lines = rows[:, 0].astype(np.uint16)  # a block sums up to 64 * 255 = 16320
    for row in range(1, _BLOCK):
        lines += rows[:, row]
    columns = lines.reshape(-1, _BLOCK, colours)
    sums = columns[:, 0].copy()
    for column in range(1, _BLOCK):
        sums += columns[:, column]
    return sums.reshape(batch, height // _BLOCK, width // _BLOCK, colours).astype(np.int64)
