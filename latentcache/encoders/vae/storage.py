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

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.protocol import EncodedBatch
from latentcache.errors import UnsupportedModelError
from latentcache.fields.dtypes import finite, stored
from latentcache.fields.latents import EncoderSpec, LatentsRecipe
from latentcache.identity.noise import gaussian


def encoded(values: NDArray[np.float32], storage_dtype: str) -> EncodedBatch:
    """Latents (B, C, H, W) in their storage type, with one finite flag per item."""
    latents = stored(values, storage_dtype)
    return EncodedBatch(latents=latents, finite=np.all(finite(latents).reshape(len(values), -1), axis=1))


def encoded_channels(spec: EncoderSpec) -> int:
    """Channels of an encoder's result: a draw is made from moments, which have twice the channels of a latent."""
    return spec.channels * (1 if spec.posterior == "mode" else 2)


def encoded_dtype(spec: EncoderSpec) -> str:
    """Type of an encoder's result: the storage type, but moments for a draw are rounded only after the draw."""
    return "float32" if spec.posterior == "sample" else spec.storage_dtype


def drawn(batch: EncodedBatch, pixel_hashes: Sequence[bytes], recipe: LatentsRecipe) -> EncodedBatch:
    """One draw for each image, in the storage type.

    Args:
        batch: Moments (B, 2C, h, w) in float32, all means before all logvars.
        pixel_hashes: B hashes of the encoded pixels.
        recipe: Of the cache.

    Returns:
        (B, C, h, w) in the storage type.
    """
    mean, logvar = np.split(batch.latents.astype(np.float64), 2, axis=1)
    name = recipe.recipe_id
    noise = np.stack([gaussian(mean[0].size, b"sample", name, pixels) for pixels in pixel_hashes])
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are found by their flag
        draws = mean + np.exp(logvar / 2) * noise.reshape(mean.shape)
    return encoded(draws.astype(np.float32), recipe.encoder.storage_dtype)


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
