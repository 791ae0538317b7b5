"""Tell an edit of metadata from a change of the image, without torch.

Decodes as a build does and compares pixel hashes. If the recipe resizes with torch and torch is not loaded, the
answer is None: an import would take seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from latentcache.errors import UnusableSampleError
from latentcache.fields.latents import LatentsRecipe
from latentcache.fields.protocol import Group
from latentcache.geometry.placement import Placement
from latentcache.geometry.sizes import Box, Size
from latentcache.images.cut import cut, encoded_file
from latentcache.images.resize import pixel_hash


def same_input(
    data: bytes, recipe: LatentsRecipe, group: Group, columns: Mapping[str, Any], same: bytes
) -> bool | None:
    """True if a file gives exactly the pixels that one row was encoded from.

    Args:
        data: Bytes of the file now.
        recipe: Of the cache.
        group: Of the row.
        columns: Its ``crop`` and ``resize``; of variant 0.
        same: Hash of its pixels.

    Returns:
        None if only torch could tell.
    """
    bucket = Size(*group.dims[1:])
    (top, left), resize = np.asarray(columns["crop"]).tolist(), Size(*np.asarray(columns["resize"]).tolist())
    placement = Placement(bucket=bucket, resize=resize, crop=Box(top=top, left=left, size=bucket))
    try:
        source = encoded_file(data)
        if source.size != resize and recipe.pixels.resample == "lanczos-u8" and "torch" not in sys.modules:
            return None
        return pixel_hash(cut(source, [placement], group.dims[0], recipe)[placement]) == same
    except (UnusableSampleError, MemoryError):
        return False
