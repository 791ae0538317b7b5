"""JPEGs by simplejpeg against Pillow: the same pixels, the same rejections, wherever the pixels lie."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from latentcache.errors import UnusableSampleError
from latentcache.fields.latents import PixelProfile
from latentcache.images import jpeg
from latentcache.images.decode import decode
from latentcache.images.jpeg import jpeg_self_test
from latentcache.images.scratch import Scratch

PROFILE = PixelProfile()
Y, X = np.mgrid[0:37, 0:53]
PIXELS = np.stack([X * 4, Y * 6, (X * Y) % 256], -1).astype(np.uint8)
IMAGE = Image.fromarray(PIXELS)


def saved(image, **options):
    buffer = BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()


def through_pillow(monkeypatch, data):
    with monkeypatch.context() as patch:
        patch.setattr(jpeg, "jpeg_self_test", lambda: False)
        return decode(data, PROFILE)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize(
    "options", [{"quality": 30}, {"quality": 96, "progressive": True}, {"restart_marker_blocks": 2}]
)
def test_both_jpeg_decoders_give_the_same_bits(monkeypatch, mode, subsampling, options):
    data = saved(IMAGE.convert(mode), format="JPEG", subsampling=subsampling, **options)
    assert jpeg_self_test()
    assert np.array_equal(decode(data, PROFILE), through_pillow(monkeypatch, data))
    assert np.array_equal(decode(data, PROFILE), Image.open(BytesIO(data)).convert("RGB"))


def test_both_jpeg_decoders_reject_the_same(monkeypatch):
    data = saved(IMAGE, format="JPEG", restart_marker_blocks=1)
    cut = data.index(b"\xff\xd2")
    lost = data[: cut - 30] + data[cut:]
    for damaged in (data[:-2], lost):
        with pytest.raises(UnusableSampleError) as caught:
            decode(damaged, PROFILE)
        assert caught.value.slug in ("truncated", "decoder-error")
        with pytest.raises(UnusableSampleError):
            through_pillow(monkeypatch, damaged)


def test_pillow_decodes_when_the_self_test_fails(monkeypatch):
    data = saved(IMAGE, format="JPEG")
    assert jpeg_self_test()  # asked before, so that it is not asked of the other one
    monkeypatch.setattr(jpeg.simplejpeg, "decode_jpeg", lambda data, space, **_: 255 - PIXELS)
    assert np.array_equal(decode(data, PROFILE), 255 - PIXELS)
    assert np.array_equal(through_pillow(monkeypatch, data), Image.open(BytesIO(data)))


def test_stray_bytes_in_a_jpeg_are_harmless():
    data = saved(IMAGE, format="JPEG")
    stray = data[:-2] + b"\x11\x22" + data[-2:] + b"trailer"
    assert np.array_equal(decode(stray, PROFILE), decode(data, PROFILE))


def test_self_test_sees_a_decoder_that_differs(monkeypatch):
    monkeypatch.setattr(jpeg.simplejpeg, "decode_jpeg", lambda data, space: np.zeros((47, 61, 3), np.uint8))
    jpeg_self_test.cache_clear()
    assert not jpeg_self_test()
    monkeypatch.undo()
    jpeg_self_test.cache_clear()
    assert jpeg_self_test()


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("orientation", [1, 2, 6])
def test_pixels_are_the_same_in_memory_that_held_another_image(mode, orientation):
    info = Image.Exif()
    info[0x0112] = orientation
    scratch = Scratch(1 << 20)
    for size in ((53, 37), (20, 31), (97, 64), (8, 8)):
        data = saved(IMAGE.resize(size).convert(mode), format="JPEG", exif=info)
        assert np.array_equal(decode(data, PROFILE, scratch=scratch), decode(data, PROFILE))


def test_pixels_lie_in_the_scratch_or_in_memory_of_their_own():
    data = saved(IMAGE, format="JPEG")
    enough, little = Scratch(3 * 37 * 53), Scratch(3 * 37 * 53 - 1)
    assert np.may_share_memory(decode(data, PROFILE, scratch=enough), enough.memory(1))
    first = decode(data, PROFILE, scratch=little)
    decode(saved(IMAGE.rotate(180), format="JPEG"), PROFILE, scratch=little)
    assert np.array_equal(first, decode(data, PROFILE))


def test_what_is_damaged_is_rejected_in_a_scratch_too():
    scratch = Scratch(1 << 20)
    decode(saved(IMAGE, format="JPEG"), PROFILE, scratch=scratch)
    with pytest.raises(UnusableSampleError):
        decode(saved(IMAGE, format="JPEG")[:-300], PROFILE, scratch=scratch)
