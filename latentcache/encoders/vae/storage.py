"""Stored bytes of float values without torch: storage type, rounding, finite flags and the draw from a posterior.

Guarantee: one rounding, to nearest even, from float32; a value beyond the range of the storage type counts as not
finite. bfloat16 travels as uint16 (NumPy has no such type).

An encoder's posterior is a Gaussian with its own mean and variance for every number of a latent. ``mode`` stores the
mean; ``sample`` one draw, ``mean + exp(logvar / 2) * noise``, made here; ``moments`` mean and logvar, from which a
loader draws in every epoch. The formula and the range of a logvar, [-30, 20], are those of
``DiagonalGaussianDistribution`` in diffusers ``models/autoencoders/vae.py``. The noise of a draw is named by the
pixels and the recipe, so a batch, a device or another file with the same pixels changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.protocol import EncodedBatch
from latentcache.errors import UnsupportedModelError
from latentcache.fields.latents import EncoderSpec, LatentsRecipe
from latentcache.identity.noise import gaussian

#: Storage types of latents and the NumPy types they travel in.
STORAGE_TYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
}
_BFLOAT16_EXPONENT = 0x7F80


def stored(values: NDArray[np.float32], storage_dtype: str) -> EncodedBatch:
    """Latents (B, C, H, W) in their storage type, with one finite flag per item."""
    if storage_dtype == "bfloat16":
        latents: NDArray[Any] = to_bfloat16(values)
        fine = (latents & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT
    else:
        with np.errstate(over="ignore"):
            latents = values.astype(STORAGE_TYPES[storage_dtype])
        fine = np.isfinite(latents)
    return EncodedBatch(latents=latents, finite=fine.reshape(len(values), -1).all(axis=1))


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Upper half of each float32, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Inverse of :func:`to_bfloat16`, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encoded_channels(spec: EncoderSpec) -> int:
    """Channels of an encoder's result: a draw is made from moments, which have twice the channels of a latent."""
    return spec.channels * (1 if spec.posterior == "mode" else 2)


def encoded_dtype(spec: EncoderSpec) -> str:
    """Type of an encoder's result: the storage type, but moments for a draw are rounded only after the draw."""
    return "float32" if spec.posterior == "sample" else spec.storage_dtype


def drawn(encoded: EncodedBatch, pixel_hashes: Sequence[bytes], recipe: LatentsRecipe) -> EncodedBatch:
    """One draw for each image, in the storage type.

    Args:
        encoded: Moments (B, 2C, h, w) in float32, all means before all logvars.
        pixel_hashes: B hashes of the encoded pixels.
        recipe: Of the cache.

    Returns:
        (B, C, h, w) in the storage type.
    """
    mean, logvar = np.split(encoded.latents.astype(np.float64), 2, axis=1)
    name = recipe.recipe_id
    noise = np.stack([gaussian(mean[0].size, b"sample", name, pixels) for pixels in pixel_hashes])
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are found by their flag
        draws = mean + np.exp(logvar / 2) * noise.reshape(mean.shape)
    return stored(draws.astype(np.float32), recipe.encoder.storage_dtype)


def require_posterior(family: str, posterior: str, why: str) -> None:
    """Check that an encoder without a posterior is asked for its mode.

    Raises:
        UnsupportedModelError: It is asked for more.
    """
    if posterior != "mode":
        raise no_posterior(family, posterior, why)


def no_posterior(family: str, posterior: str, why: str) -> UnsupportedModelError:
    """The error for an encoder without a posterior."""
    return UnsupportedModelError(
        f"--latents {posterior}: {family} has no posterior",
        why=why,
        fix="--latents mode, or --model with an autoencoder that has one (AutoencoderKL and its like)",
        slug="no-posterior",
    )
