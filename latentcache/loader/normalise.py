"""From raw latents to what a model trains on: scale and shift, per-channel statistics, or patches.

Computed in float32 and returned in the type asked for, so that a stored float16 latent is rounded once more at
most. The formulas are those of the pipelines in diffusers (``pipeline_flux.py``, ``pipeline_wan.py``,
``pipeline_flux2.py``); the facts come from the manifest, not from a table here.
"""

from __future__ import annotations

import torch

from latentcache.recipe import Normalisation


def normalise(latents: torch.Tensor, facts: Normalisation, dtype: torch.dtype) -> torch.Tensor:
    """Apply a cache's normalisation.

    Args:
        latents: Raw latents, (B, C, h, w).
        facts: What the manifest says.
        dtype: Type of the result.

    Returns:
        (B, C, h, w); for ``batch-norm`` (B, C * patch * patch, h / patch, w / patch).

    Raises:
        ValueError: A kind this version does not know.
    """
    if facts.kind == "none":
        return latents.to(dtype)
    z = latents.to(torch.float32)
    if facts.kind == "scale-shift":
        return ((z - facts.shift) * facts.scale).to(dtype)
    if facts.kind == "batch-norm":
        z = patchify(z, facts.patch)
    elif facts.kind != "mean-std":
        raise ValueError(f"unknown normalisation {facts.kind!r}")
    mean, std = _column(facts.mean), _column(facts.std)
    return ((z - mean) / std * facts.scale).to(dtype)


def patchify(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """(B, C, h, w) -> (B, C * p * p, h / p, w / p), channels in the order (c, row, column)."""
    return torch.nn.functional.pixel_unshuffle(latents, patch) if patch > 1 else latents


def _column(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)
