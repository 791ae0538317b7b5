"""An image of every channel, and files of it."""

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image

from latentcache.geometry.sizes import Size
from latentcache.images.headers import header

Y, X = np.mgrid[0:37, 0:53]
PIXELS = np.stack([X * 4, Y * 6, (X * Y) % 256], -1).astype(np.uint8)
IMAGE = Image.fromarray(PIXELS)


def saved(image, **options):
    buffer = BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def image_size(data: bytes, **limits: int) -> Size:
    return header(BytesIO(data), **limits)[2]
