"""Tell an edit of metadata from a change of the image, without torch.

Decodes as a build does and compares pixel hashes. If the recipe resizes with torch and torch is not loaded, the
answer is None: an import would take seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from latentcache.errors import UnusableSampleError
from latentcache.fields.latents import LatentsRecipe
from latentcache.geometry.placement import Placement
from latentcache.geometry.sizes import Size
from latentcache.images.decode import decode
from latentcache.images.resize import pixel_hash, resize_crop


def same_pixels(
    data: bytes, recipe: LatentsRecipe, size: Size, wanted: Sequence[tuple[Placement, bytes]]
) -> bool | None:
    """True if a file gives exactly the pixels that were hashed at encoding.

    Args:
        data: Bytes of the file now.
        recipe: Of the cache.
        size: Of the encoded image, after EXIF orientation.
        wanted: Each upright placement with the hash of its pixels.

    Returns:
        None if only torch could tell.
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
