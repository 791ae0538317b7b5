"""From raw latents to what a model trains on: scale and shift, per-channel statistics, or patches.

Computed in float32 and returned in the type asked for, so that a stored float16 latent is rounded once more at
most. The formulas are those of the pipelines in diffusers (``pipeline_flux.py``, ``pipeline_wan.py``,
``pipeline_flux2.py``); the facts come from the manifest, not from a table here. Cost: a few passes over pieces that
stay in the processor's cache; float32 copies of a whole batch would be fresh memory every time, which costs more
than the arithmetic.
"""

from __future__ import annotations

import torch

from latentcache.recipe import Normalisation

#: Values worked on at once: 1 MiB of float32.
_AT_ONCE = 1 << 18


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
    return latents.to(dtype) if facts.kind == "none" else _computed(latents, facts).to(dtype)


def normalise_into(latents: torch.Tensor, facts: Normalisation, out: torch.Tensor) -> torch.Tensor:
    """As :func:`normalise`, into memory that is there.

    Args:
        latents: Raw latents, (B, C, h, w), contiguous.
        facts: What the manifest says.
        out: (B, C, h, w), contiguous, of the type wanted. May be the latents themselves.

    Returns:
        ``out``, in the shape of the result.

    Raises:
        ValueError: A kind this version does not know.
    """
    count = max(1, _AT_ONCE // max(1, latents[:1].numel()))
    shape = latents.shape
    for start in range(0, len(latents), count):
        part = latents[start : start + count]
        made = part if facts.kind == "none" else _computed(part, facts)
        shape = made.shape
        out[start : start + count].view(shape).copy_(made)
    return out.view(len(latents), *shape[1:])


def patchify(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """(B, C, h, w) -> (B, C * p * p, h / p, w / p), channels in the order (c, row, column)."""
    return torch.nn.functional.pixel_unshuffle(latents, patch) if patch > 1 else latents


def _computed(latents: torch.Tensor, facts: Normalisation) -> torch.Tensor:
    """The result in float32, in memory of its own."""
    z = latents.to(torch.float32, copy=True)
    if facts.kind == "scale-shift":
        return z.sub_(facts.shift).mul_(facts.scale)
    if facts.kind == "batch-norm":
        z = patchify(z, facts.patch)
    elif facts.kind != "mean-std":
        raise ValueError(f"unknown normalisation {facts.kind!r}")
    mean, std = _column(facts.mean), _column(facts.std)
    return z.sub_(mean).div_(std).mul_(facts.scale)


def _column(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)
