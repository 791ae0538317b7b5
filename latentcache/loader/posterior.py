"""Latents from stored moments: a draw that is new in every epoch, or the mean.

Decides what a cache of moments serves. Guarantee: the draw of an entry depends on (seed, epoch, key) alone, so it is
the same on every rank, in every worker, for any batch size and after a resume, and another in the next epoch; an
entry that is served twice in an epoch is the same twice. Entries are drawn one by one, because vectorised
arithmetic may round the same number in another way at another place of a larger batch.
Cost: 1.5 ms for 262144 numbers (512 KiB of latents in float16) on one core, most of it noise.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.identity.noise import gaussian

Draw = Literal["sample", "mode"]


def draw(moments: torch.Tensor, keys: NDArray[np.uint8], *, seed: int, epoch: int) -> torch.Tensor:
    """One draw for each entry: ``mean + exp(logvar / 2) * noise`` (diffusers ``DiagonalGaussianDistribution``).

    Args:
        moments: (B, 2C, h, w), all means before all logvars, raw.
        keys: (B, 32) entry keys.
        seed: That of the loader.
        epoch: Number of the epoch.

    Returns:
        (B, C, h, w) in float32, raw.
    """
    batch, channels, height, width = moments.shape
    drawn = torch.empty((batch, channels // 2, height, width), dtype=torch.float32)
    for key, item, out in zip(keys, moments, drawn, strict=True):
        mean, logvar = item.to(torch.float32).chunk(2)
        noise = torch.from_numpy(gaussian(out.numel(), b"read", seed, epoch, key.tobytes())).view_as(out)
        torch.addcmul(mean, torch.exp(logvar * 0.5), noise, out=out)
    return drawn


def mean_of(moments: torch.Tensor) -> torch.Tensor:
    """(B, C, h, w), the mode of (B, 2C, h, w), in memory of its own."""
    return moments[:, : moments.shape[1] // 2].contiguous()


def checked_draw(asked: str | None, posterior: str) -> str | None:
    """What to make of each entry: ``sample`` or ``mode`` of moments, None for what is served as it is stored.

    Raises:
        UsageError: No such draw, or one that this cache cannot give.
    """
    if asked is not None and asked not in get_args(Draw):
        raise UsageError(f"latents={asked!r}", why="no such draw", fix=f"use one of {', '.join(get_args(Draw))}")
    if posterior == "moments":
        return asked or "sample"
    if asked is not None and asked != posterior:
        raise UsageError(
            f"latents={asked!r} of a cache that holds the {posterior} of each posterior",
            why="only moments can give both",
            fix="leave latents out, or build with --latents moments (encodes everything again)",
            slug="no-moments",
        )
    return None
