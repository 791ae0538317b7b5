"""The pixels of one file, image or video, as an encoder gets them: decoded, resized and cropped."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.latents import MAX_PIXELS, LatentsRecipe
from latentcache.geometry.placement import Placement
from latentcache.images.clips import EncodedClip, is_clip
from latentcache.images.decode import EncodedImage
from latentcache.images.resize import resize_crop
from latentcache.sources.causes import rejection


def encoded_file(data: bytes, *, max_pixels: int = MAX_PIXELS) -> EncodedImage | EncodedClip:
    """An image or a video, as its first bytes say; raises ``UnusableSampleError``."""
    return (EncodedClip if is_clip(BytesIO(data)) else EncodedImage)(data, max_pixels=max_pixels)


def cut(
    source: EncodedImage | EncodedClip,
    places: Iterable[Placement],
    frames: int,
    recipe: LatentsRecipe,
    pixels: NDArray[np.uint8] | None = None,
) -> dict[Placement, NDArray[np.uint8]]:
    """The pixels of some placements; the file is decoded once.

    Args:
        source: To be used once.
        places: Of the crops.
        frames: Of the clip; 1 for an image.
        recipe: Says how pixels are made, and which frames of a video are used.
        pixels: (H, W, 3) of an image that is decoded already.

    Returns:
        (H, W, 3) for each placement; (frames, H, W, 3) if the recipe has clips.

    Raises:
        UnusableSampleError: The file is damaged, or a video if the recipe has no clips.
    """
    resample, clips = recipe.pixels.resample, recipe.geometry.clips
    if isinstance(source, EncodedClip):
        if clips is None:
            raise rejection("no-frame-count", "it is a video, and an image is wanted here")
        made = {one: np.empty((frames, one.bucket.height, one.bucket.width, 3), dtype=np.uint8) for one in places}
        for number, frame in enumerate(source.pixels(frames, clips)):
            for place, held in made.items():
                held[number] = resize_crop(frame, place, resample)
        return made
    pixels = source.pixels(recipe.pixels) if pixels is None else pixels
    crops = {place: resize_crop(pixels, place, resample) for place in places}
    return crops if clips is None else {place: crop[None] for place, crop in crops.items()}
