"""Has a file the pixels that were encoded? Tells an edit of metadata from a change of the picture, without torch.

Decides nothing: it decodes as a build would and compares pixel hashes. Where the recipe resizes with torch, and torch
is not loaded already, it says that it cannot tell rather than spend seconds on importing it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from latentcache.errors import UnusableSampleError
from latentcache.geometry.placement import Placement
from latentcache.geometry.sizes import Size
from latentcache.pipeline.decode import decode
from latentcache.pipeline.resize import pixel_hash, resize_crop
from latentcache.recipe import Recipe


def same_pixels(data: bytes, recipe: Recipe, size: Size, wanted: Sequence[tuple[Placement, bytes]]) -> bool | None:
    """Whether a file gives exactly the pixels that were hashed when it was encoded.

    Args:
        data: The file as it is now.
        recipe: Whose pixel profile was followed.
        size: Of the picture that was encoded.
        wanted: Each placement with the hash of its pixels.

    Returns:
        None where that cannot be told without torch.
    """
    resample = recipe.pixels.resample
    needs_torch = resample == "lanczos-u8" and any(placement.resize != size for placement, _ in wanted)
    try:
        pixels = decode(data, recipe.pixels)
    except (UnusableSampleError, MemoryError):
        return False
    if Size(pixels.shape[0], pixels.shape[1]) != size:
        return False
    if needs_torch and "torch" not in sys.modules:
        return None
    return all(pixel_hash(resize_crop(pixels, placement, resample)) == expected for placement, expected in wanted)
