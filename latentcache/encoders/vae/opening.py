"""Open an encoder from its description, and prove with one fixed image that it works before a build starts.

Guarantee: the demo and the stub open without torch; a VAE is opened only here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from latentcache.encoders.protocol import Encoder, Pixels
from latentcache.encoders.vae.builtin import DemoEncoder, StubEncoder
from latentcache.encoders.vae.describe import ModelDescription
from latentcache.errors import DeviceMemoryError, EncoderError
from latentcache.fields.dtypes import as_floats
from latentcache.fields.noise import measured

_STEP = 64


def open_encoder(description: ModelDescription, *, device: str = "auto", fold: bool = True) -> Encoder:
    """Open the encoder of a description.

    Args:
        description: From ``describe.describe_model``.
        device: ``auto``, ``cpu`` or a torch device.
        fold: Rewrite the causal 3D convolutions of clip encoders as 2D ones.

    Raises:
        EncoderError: The weights do not fit the class, or are damaged.
        DeviceError: The device does not exist or failed.
        DeviceMemoryError: The encoder does not fit into its memory.
    """
    spec = description.spec
    if spec.family == "demo":
        return DemoEncoder(storage_dtype=spec.storage_dtype)
    if spec.family == "stub":
        return StubEncoder(description.delay_ms, storage_dtype=spec.storage_dtype, posterior=spec.posterior)
    # torch and diffusers take seconds to import; the demo and the stub must not pay for them.
    from latentcache.encoders.vae.encoder import VaeEncoder, choose_device

    return VaeEncoder(description, choose_device(device), fold=fold)


def checked_noise(encoder: Encoder) -> dict[str, Any]:
    """Encode one fixed image alone and beside two others, and check the result.

    Other sizes run other kernels, so the noise is a lower bound; ``fields.noise.tolerance`` puts a floor under it.

    Returns:
        ``devices``; ``largest`` and ``mean`` difference as fractions of the latents' standard deviation; ``scale``:
        that deviation (``scale_logvar``: of logvars). Empty if three small images do not fit into the device's
        memory.

    Raises:
        EncoderError: Latents are not finite in any precision, or are the same everywhere.
        DeviceError: The device failed.
        DeviceMemoryError: One small image does not fit into its memory.
    """
    image = sample_image(math.lcm(_STEP, encoder.spec.multiple))
    alone = encoder.encode(image)
    family, compute = encoder.spec.family, encoder.spec.compute_dtype
    if not alone.finite.all():
        helped = compute != "float32" and encoder.encode(image, precise=True).finite.all()
        raise EncoderError(
            f"{family} gives values that are not finite in {compute}",
            where="one test image, before the build",
            why="it overflows in this precision" if helped else "its weights are damaged, or its range is too wide",
            fix="add --compute-dtype bfloat16 or float32" if helped else "download the weights again",
        )
    if (alone.latents == alone.latents[:, :, :1, :1]).all():
        raise EncoderError(
            f"{family} gives the same latent for every part of an image",
            where="one test image, before the build",
            why="the weights are all zero, or of another class",
            fix="download the weights again",
        )
    try:
        beside = encoder.encode(np.concatenate([image, image[:, ::-1], image[:, :, ::-1]]))
    except DeviceMemoryError:
        return {}
    pair = [as_floats(batch.latents[0]) for batch in (alone, beside)]
    noise = {"devices": [encoder.device], **measured(*(latents[: encoder.spec.channels] for latents in pair))}
    logvar = pair[0][encoder.spec.channels :]
    return noise | ({"scale_logvar": float(logvar.std())} if len(logvar) else {})


def sample_image(side: int) -> Pixels:
    """The fixed image, (1, side, 2 * side, 3): two ramps and a fine pattern, so no two parts are alike."""
    y, x = np.mgrid[0:side, 0 : 2 * side]
    channels = [255 * x // (2 * side - 1), 255 * y // (side - 1), (7 * x + 13 * y + x * y // 16) % 256]
    return np.ascontiguousarray(np.stack(channels, axis=-1)[None], dtype=np.uint8)
