"""JPEGs by simplejpeg: the pixels that Pillow gives, and what is rejected."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from latentcache.errors import UnusableSampleError
from latentcache.fields.latents import PixelProfile
from latentcache.images.decode import decode

PROFILE = PixelProfile()
Y, X = np.mgrid[0:37, 0:53]
PIXELS = np.stack([X * 4, Y * 6, (X * Y) % 256], -1).astype(np.uint8)
IMAGE = Image.fromarray(PIXELS)


def saved(image, **options):
    buffer = BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize(
    "options", [{"quality": 30}, {"quality": 96, "progressive": True}, {"restart_marker_blocks": 2}]
)
def test_a_jpeg_has_the_bits_that_pillow_decodes(mode, subsampling, options):
    data = saved(IMAGE.convert(mode), format="JPEG", subsampling=subsampling, **options)
    assert np.array_equal(decode(data, PROFILE), Image.open(BytesIO(data)).convert("RGB"))


def test_lost_pixels_are_rejected():
    data = saved(IMAGE, format="JPEG", restart_marker_blocks=1)
    cut = data.index(b"\xff\xd2")
    lost = data[: cut - 30] + data[cut:]
    for damaged in (data[:-2], lost):
        with pytest.raises(UnusableSampleError) as caught:
            decode(damaged, PROFILE)
        assert caught.value.slug in ("truncated", "decoder-error")


def test_stray_bytes_in_a_jpeg_are_harmless():
    data = saved(IMAGE, format="JPEG")
    stray = data[:-2] + b"\x11\x22" + data[-2:] + b"trailer"
    assert np.array_equal(decode(stray, PROFILE), decode(data, PROFILE))
