"""What is stored of an encoder's posterior, a Gaussian with its own mean and variance for every number of a latent.

``mode``: the mean. ``sample``: one draw, ``mean + exp(logvar / 2) * noise``, made here. ``moments``: mean and logvar,
from which a loader draws again in every epoch. The formula and the range of a logvar, [-30, 20], are those of
``DiagonalGaussianDistribution`` in diffusers ``models/autoencoders/vae.py``.
Guarantee: the noise of a draw is named by the pixels and the recipe, so a batch, a device or another file with the
same pixels changes nothing (docs/adr/0011). NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from latentcache.encoders.protocol import EncodedBatch
from latentcache.encoders.storage import stored
from latentcache.errors import UnsupportedModelError
from latentcache.identity.noise import gaussian
from latentcache.recipe import EncoderSpec, Recipe


def encoded_channels(spec: EncoderSpec) -> int:
    """Channels that an encoder gives: a draw is made from its moments, so they are twice those of a latent."""
    return spec.channels * (1 if spec.posterior == "mode" else 2)


def encoded_dtype(spec: EncoderSpec) -> str:
    """Type that an encoder gives: that of storage, but moments that are drawn from are rounded only afterwards."""
    return "float32" if spec.posterior == "sample" else spec.storage_dtype


def drawn(encoded: EncodedBatch, pixel_hashes: Sequence[bytes], recipe: Recipe) -> EncodedBatch:
    """One draw for each picture, in the storage type.

    Args:
        encoded: Moments (B, 2C, h, w) in float32, all means before all logvars.
        pixel_hashes: B hashes of the pixels that were encoded.
        recipe: What is stored.

    Returns:
        (B, C, h, w) in the storage type.
    """
    mean, logvar = np.split(encoded.latents.astype(np.float64), 2, axis=1)
    name = recipe.recipe_id
    noise = np.stack([gaussian(mean[0].size, b"sample", name, pixels) for pixels in pixel_hashes])
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by its flag
        draws = mean + np.exp(logvar / 2) * noise.reshape(mean.shape)
    return stored(draws.astype(np.float32), recipe.encoder.storage_dtype)


def require_posterior(family: str, posterior: str, why: str) -> None:
    """Refuse to take more than the mode from an encoder that has no more.

    Raises:
        UnsupportedModelError: As said.
    """
    if posterior != "mode":
        raise no_posterior(family, posterior, why)


def no_posterior(family: str, posterior: str, why: str) -> UnsupportedModelError:
    """The error for an encoder without a posterior."""
    return UnsupportedModelError(
        f"{family} has no posterior: the only --latents it has is mode",
        where=f"--latents {posterior}",
        why=why,
        fix="--latents mode, or --model with an autoencoder that has one (AutoencoderKL and its like)",
        slug="no-posterior",
    )
