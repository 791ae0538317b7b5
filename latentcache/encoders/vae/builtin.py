"""Encoders of images as producers see them: uint8 pixels in, latents of the storage type out; and one without torch.

A batch is submitted and fetched later, so that copies and the work of the host overlap the computation.

``stub`` for tests and ``demo`` for trying the tool are one encoder under two names, NumPy only. Latents are 8x8 block
means: of red, green and blue, and of all three, mapped from [0, 255] to [-1, 1]. They are ``sum / (n * 127.5) - 1``
with an exact integer ``sum`` and n of 64 or 192. With ``--latents moments`` these values are the means, and each
logvar is its mean minus 2. ``delay_ms`` makes it as slow as a model, per image. The same image gives the same bytes
in any batch on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.dtypes import stored
from latentcache.fields.latents import EncoderSpec
from latentcache.identity.content import json_hash

if TYPE_CHECKING:  # a check that compares recipes decodes no image
    from latentcache.encoders.pixels import Pixels

#: Frames of a latent frame: the first of each is encoded, as an image.
FRAME_STEP = 4
_BLOCK = 8
_CHANNELS = 4
#: Increased if the same image gives other values.
_VERSION = 1


class Pending(Future[Any]):
    """A batch that is on the device. ``done`` is true if ``result`` would return at once."""

    def __init__(self, result: Callable[[], Any], done: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._result_now, self._done_now = result, done

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the device; raises as encoding does."""
        return self._result_now()

    def done(self) -> bool:
        """True if the device is done."""
        return self._done_now()


class Encoder:
    """Turns pixels into raw (unscaled) latents."""

    spec: EncoderSpec
    """Description of this encoder."""
    device: str = "cpu"
    """Device that it runs on: ``cpu``, or kind and name of a device. Other devices may round otherwise."""

    def submit(self, images: Sequence[Pixels], *, precise: bool = False) -> Pending:
        """Begin to encode B images (H, W, 3) or clips (F, H, W, 3) of one size.

        The result is one array of its own memory, in the storage type (bfloat16 as uint16): (B, C, H/f, W/f). Moments
        have 2C channels, all means before all logvars. ``precise``: in float32 throughout. Raises DeviceMemoryError
        (nothing of the batch is left on the device), DeviceError, or EncoderError if the size does not fit the model.
        """
        raise NotImplementedError

    def encode(self, images: Pixels | Sequence[Pixels], *, precise: bool = False) -> NDArray[Any]:
        """Encode one batch and wait for it."""
        latents: NDArray[Any] = self.submit(list(images), precise=precise).result()
        return latents

    def close(self) -> None:
        """Free the memory of the device."""


def builtin_spec(family: str = "stub", storage_dtype: str = "float16", posterior: str = "mode") -> EncoderSpec:
    """Describe the encoder; the delay is not part of it."""
    return EncoderSpec(
        family=family,
        fingerprint=json_hash({"stub": "block means", "version": _VERSION}).hex(),
        config=json_hash({"block": _BLOCK}).hex(),
        channels=_CHANNELS,
        factor=_BLOCK,
        multiple=_BLOCK,
        storage_dtype=storage_dtype,
        posterior=posterior,
    )


class StubEncoder(Encoder):
    """Encoder of block means; it computes in the call, and sleeps ``delay_ms`` per image."""

    def __init__(self, spec: EncoderSpec, delay_ms: int = 0) -> None:
        self.spec = spec
        self._delay_s = delay_ms / 1000

    def submit(self, images: Sequence[Pixels], *, precise: bool = False) -> Pending:
        """Encode now; ``precise`` changes nothing."""
        pixels = np.stack(images)
        if pixels.ndim == 4:
            values = self._values(pixels)
        else:
            clips = pixels[:, ::FRAME_STEP]
            frames = self._values(np.ascontiguousarray(clips).reshape(-1, *clips.shape[2:]))
            values = np.stack(np.split(frames, len(clips))).swapaxes(1, 2)
        latents = stored(np.ascontiguousarray(values), self.spec.storage_dtype)
        return Pending(lambda: latents)

    def _values(self, pixels: Pixels) -> NDArray[np.float32]:
        """Block means of (B, H, W, 3) as (B, 4, H/8, W/8), or 8 channels of moments."""
        sums = _block_sums(pixels)
        everything = sums.sum(axis=3, keepdims=True)
        area = _BLOCK * _BLOCK * 127.5
        means = np.concatenate([sums / area - 1, everything / (3 * area) - 1], axis=3)
        time.sleep(self._delay_s * len(pixels))
        values = means.transpose(0, 3, 1, 2).astype(np.float32)
        return values if self.spec.posterior == "mode" else np.concatenate([values, values - 2], axis=1)


def _block_sums(pixels: Pixels) -> NDArray[np.int64]:
    """Sum blocks of (B, H, W, 3), (B, H/8, W/8, 3); 20 times as quick as one sum over two axes."""
    batch, height, width, colors = pixels.shape
    # A block sums up to 64 * 255 = 16320.
    columns = pixels.reshape(-1, _BLOCK, width * colors).sum(axis=1, dtype=np.uint16).reshape(-1, _BLOCK, colors)
    sums = np.asarray(sum(columns[:, column] for column in range(_BLOCK)), dtype=np.int64)
    return sums.reshape(batch, height // _BLOCK, width // _BLOCK, colors)
