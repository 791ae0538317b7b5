"""From a description to an encoder that works, and the proof that it does before a build starts.

Guarantee: the demo and the stub open without torch; a VAE is opened only here. ``check_encoder`` encodes one
fixed picture, so a model that gives nothing usable is an error before the first sample is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.demo import DemoEncoder
from latentcache.encoders.describe import ModelDescription
from latentcache.encoders.protocol import Encoder, Pixels, Precision
from latentcache.encoders.storage import from_bfloat16
from latentcache.encoders.stub import StubEncoder
from latentcache.errors import EncoderError
from latentcache.geometry.sizes import Size

_STEP = 64


def open_encoder(
    description: ModelDescription,
    *,
    device: str = "auto",
    fold: bool = True,
    compiled: frozenset[Size] = frozenset(),
    warn: Callable[[str], None] = lambda _: None,
) -> Encoder:
    """Open what a description names.

    Args:
        description: From :func:`latentcache.encoders.describe.describe_model`.
        device: ``auto``, ``cpu`` or a torch device.
        fold: Do the causal 3D convolutions of clip encoders as 2D ones.
        compiled: Sizes of pictures for which it is compiled.
        warn: Told when the compiler fails.

    Raises:
        EncoderError: The weights do not fit the class, or are damaged.
        DeviceError: The device is not there or failed.
        DeviceMemoryError: The encoder does not fit into its memory.
    """
    storage_dtype = description.spec.storage_dtype
    if description.kind == "demo":
        return DemoEncoder(storage_dtype=storage_dtype)
    if description.kind == "stub":
        return StubEncoder(description.delay_ms, storage_dtype=storage_dtype, posterior=description.spec.posterior)
    # torch and diffusers take seconds to import; the demo and the stub must not pay for them.
    from latentcache.encoders.vae import load_vae

    if not compiled:
        return load_vae(description, device=device, fold=fold)
    from latentcache.encoders.compiling import Compiler

    return load_vae(description, device=device, fold=fold, compiler=Compiler(compiled, warn))


def auto_precision(description: ModelDescription, *, device: str = "auto", fold: bool = True) -> Precision:
    """In which precision a new cache of a model is computed on a device; see ``encoders.precision``.

    Raises:
        DeviceError: The device is not there or failed.
        DeviceMemoryError: The encoder, or one small picture, does not fit.
    """
    from latentcache.encoders import precision  # torch and diffusers, as above

    return precision.auto_precision(description, device, fold=fold)


def matmul_ceiling(encoder: Encoder) -> float:
    """Floating-point operations per second that matrix products reach on an encoder's device, in its precision.

    Measured in half a second on CUDA; 0 elsewhere, where it would say nothing.
    """
    if not encoder.device.startswith("cuda"):
        return 0.0
    from latentcache.encoders import ceiling, vae  # torch, as above

    if not isinstance(encoder, vae.VaeEncoder):
        return 0.0
    return ceiling.matmul_flops(encoder.spec.compute_dtype, device=encoder.torch_device)


def picture_flops(description: ModelDescription, *, fold: bool = True) -> Callable[[Size], float]:
    """Floating-point operations of one picture, by its size; counted without weights. See ``encoders.ceiling``."""
    from latentcache.encoders import ceiling  # torch and diffusers, as above

    return ceiling.PictureFlops(description, fold=fold)


def check_encoder(encoder: Encoder) -> None:
    """Encode one fixed picture and look at the result.

    Raises:
        EncoderError: Latents are not finite in any precision, or are the same everywhere.
        DeviceError: The device failed.
        DeviceMemoryError: One small picture does not fit into its memory.
    """
    picture = sample_picture(math.lcm(_STEP, encoder.spec.multiple))
    batch = encoder.encode(picture)
    family, compute = encoder.spec.family, encoder.spec.compute_dtype
    if not batch.finite.all():
        helped = compute != "float32" and encoder.encode(picture, precise=True).finite.all()
        raise EncoderError(
            f"{family} gives values that are not finite in {compute}",
            where="one test picture, before the build",
            why="it overflows in this precision" if helped else "its weights are damaged, or its range is too wide",
            fix="add --compute-dtype bfloat16 or float32" if helped else "download the weights again",
        )
    if (batch.latents == batch.latents[:, :, :1, :1]).all():
        raise EncoderError(
            f"{family} gives the same latent for every part of a picture",
            where="one test picture, before the build",
            why="the weights are all zero, or not those of this class",
            fix="download the weights again",
        )


def noise_floor(encoder: Encoder) -> tuple[float, float]:
    """How far the latents of the fixed picture, encoded alone, lie from those it has among two others.

    Returns:
        The largest and the mean difference, as parts of the latents' standard deviation.

    Raises:
        DeviceError: The device failed.
        DeviceMemoryError: Three small pictures do not fit into its memory.
    """
    picture = sample_picture(math.lcm(_STEP, encoder.spec.multiple))
    together = np.concatenate([picture, picture[:, ::-1], picture[:, :, ::-1]])
    pair = [_means(encoder, encoder.encode(pixels).latents[0]) for pixels in (picture, together)]
    apart, scale = np.abs(pair[0] - pair[1]), float(pair[0].std())
    return float(apart.max()) / scale, float(apart.mean()) / scale


def _means(encoder: Encoder, latents: NDArray[Any]) -> NDArray[np.float32]:
    """The latent itself, or the means of its moments, as floats."""
    floats = from_bfloat16(latents) if latents.dtype == np.uint16 else latents.astype(np.float32)
    return floats[: encoder.spec.channels]


def sample_picture(side: int) -> Pixels:
    """The fixed picture, (1, side, 2 * side, 3): two ramps and a fine pattern, so no two parts are alike."""
    y, x = np.mgrid[0:side, 0 : 2 * side]
    channels = [255 * x // (2 * side - 1), 255 * y // (side - 1), (7 * x + 13 * y + x * y // 16) % 256]
    return np.ascontiguousarray(np.stack(channels, axis=-1)[None], dtype=np.uint8)
