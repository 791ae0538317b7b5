"""Latents back to images, for people: the decoder half of the model that a cache records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.vae.describe import ModelDescription, describe
from latentcache.errors import EncoderError, LatentcacheError
from latentcache.fields.latents import LatentsRecipe, LatentsSettings
from latentcache.fields.protocol import DescribeContext

Frames = list[NDArray[np.uint8]]
"""Images (H, W, 3); one, or those of a clip."""


def decoder(recipe: LatentsRecipe, provenance: Mapping[str, Any]) -> Callable[[NDArray[np.float32]], Frames]:
    """What decodes raw latents (C, F, h, w); the whole model is loaded on the CPU, and nothing is downloaded.

    Raises:
        LatentcacheError: The model is not here, not the one that made the latents, or no folder of diffusers.
    """
    described = describe(LatentsSettings(), DescribeContext(recipe=recipe, provenance=provenance, check=True))
    asked: Any = described.recipe
    if asked.encoder.fingerprint != recipe.encoder.fingerprint:
        raise EncoderError(f"{described.label} is not the model that made these latents", fix="build the cache again")
    description = ModelDescription(**described.producer, spec=recipe.encoder)
    if not description.needs_torch:  # its first channels are means of red, green and blue
        return lambda latent: [_pixels(frame.transpose(1, 2, 0)) for frame in latent[:3].swapaxes(0, 1)]
    import diffusers
    import torch

    folder = Path(description.config_path).parent
    try:
        kind: Any = getattr(diffusers, recipe.encoder.family)
        model = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    except (OSError, ValueError) as error:
        fix = "decoding needs the folder of a diffusers model"
        raise EncoderError(f"{folder} cannot be loaded", why=str(error)[:200], fix=fix) from error

    @torch.inference_mode()
    def decode(latent: NDArray[np.float32]) -> Frames:
        values = torch.from_numpy(np.ascontiguousarray(latent))[None]
        try:
            decoded = model.decode(values if description.frame_step else values[:, :, 0]).sample[0].float().numpy()
        except (RuntimeError, MemoryError) as error:
            raise LatentcacheError("the model cannot decode it", why=str(error)[:200], fix="--decode 0") from error
        frames = decoded.swapaxes(0, 1) if decoded.ndim == 4 else decoded[None]
        return [_pixels(frame.transpose(1, 2, 0)) for frame in frames]

    return decode


def _pixels(values: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """(H, W, 3) from -1 to 1 as bytes."""
    return np.asarray(np.clip((values + 1) * 127.5, 0, 255).round().astype(np.uint8))
