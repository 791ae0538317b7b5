"""Decode JPEGs with libjpeg-turbo. Guarantee: pixels lost to damage are an error, which Pillow does not report."""

from __future__ import annotations

import re

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

# Warnings of libjpeg after which pixels are wrong; its others (stray bytes, odd versions) are harmless.
_LOSSY = re.compile(r"premature|bad Huffman|bad arithmetic|instead of RST", re.IGNORECASE)


def turbo_pixels(image: Image.Image, data: bytes) -> NDArray[np.uint8] | None:
    """RGB pixels (H, W, 3) as stored of a gray or YCbCr JPEG; None for other images.

    Args:
        image: Opened by Pillow.
        data: All bytes of the file.

    Raises:
        ValueError: The data are damaged.
    """
    if image.format not in ("JPEG", "MPO") or image.mode not in ("L", "RGB"):
        return None
    try:
        *_, space, _ = simplejpeg.decode_jpeg_header(data)
        if space not in ("Gray", "YCbCr"):
            return None
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", strict=True)
    except ValueError as error:
        if _LOSSY.search(str(error)):
            raise
        return None
    return pixels if pixels.shape[1::-1] == image.size else None
