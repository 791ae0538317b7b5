"""Decode JPEGs with libjpeg-turbo if it gives the same pixels as Pillow.

Guarantee: pixels lost to damage are an error; the same files are rejected if the self-test passes or fails.
"""

from __future__ import annotations

import re
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from latentcache.images.scratch import Scratch

# Warnings of libjpeg after which pixels are wrong; its others (stray bytes, odd versions) are harmless.
_LOSSY = re.compile(r"premature|bad Huffman|bad arithmetic|instead of RST", re.IGNORECASE)


def turbo_pixels(image: Image.Image, data: bytes, scratch: Scratch | None) -> NDArray[np.uint8] | None:
    """RGB pixels (H, W, 3) as stored of a gray or YCbCr JPEG; None for other images.

    Args:
        image: Opened by Pillow.
        data: All bytes of the file.
        scratch: Memory for the pixels.

    Raises:
        ValueError: The data are damaged.
    """
    if image.format not in ("JPEG", "MPO") or image.mode not in ("L", "RGB"):
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        pixels: NDArray[np.uint8] | None = None
        if space in ("Gray", "YCbCr"):
            memory = scratch.memory(3 * height * width) if scratch else None
            pixels = simplejpeg.decode_jpeg(data, "RGB", strict=True, buffer=memory)
    except ValueError as error:
        if _LOSSY.search(str(error)):
            raise
        return None
    usable = pixels is not None and pixels.shape[1::-1] == image.size
    return pixels if usable and jpeg_self_test() else None


@lru_cache(maxsize=1)
def jpeg_self_test() -> bool:
    """True if simplejpeg and Pillow decode three small JPEGs to the same bits; tested once per process."""
    y, x = np.mgrid[0:47, 0:61]
    grain = (x * 37 + y * 101) % 23
    image = Image.fromarray(np.stack([x * 4 + grain, y * 5 + grain, (x * y) % 233], -1).astype(np.uint8))
    options: dict[str, Any] = {"format": "JPEG", "quality": 85, "subsampling": "4:2:0"}
    baseline = _agree(image, **options)
    return baseline and _agree(image, progressive=True, **options) and _agree(image.convert("L"), **options)


def _agree(image: Image.Image, **options: Any) -> bool:
    """True if both decoders give the same pixels for one image saved as JPEG."""
    buffer = BytesIO()
    image.save(buffer, **options)
    try:
        fast = simplejpeg.decode_jpeg(buffer.getvalue(), "RGB")
    except ValueError:
        return False
    return bool(np.array_equal(fast, np.asarray(Image.open(buffer).convert("RGB"))))
