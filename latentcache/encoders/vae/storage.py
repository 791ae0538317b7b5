"""Stored bytes of float values without torch, and encoders without a posterior.

Guarantee: one rounding, to nearest even, from float32; a value beyond the range of the storage type counts as not
finite. bfloat16 travels as uint16 (NumPy has no such type).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.protocol import EncodedBatch
from latentcache.errors import UnsupportedModelError
from latentcache.fields.dtypes import finite, stored


def encoded(values: NDArray[np.float32], storage_dtype: str) -> EncodedBatch:
    """Latents (B, C, H, W) in their storage type, with one finite flag per item."""
    latents = stored(values, storage_dtype)
    return EncodedBatch(latents=latents, finite=np.all(finite(latents).reshape(len(values), -1), axis=1))


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
