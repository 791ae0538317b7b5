import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_images import IMAGE, PIXELS, X, Y, chunk, image_size, saved
from PIL import Image, ImageCms, ImageFile, ImageOps

from latentcache.errors import UnusableSampleError, UsageError
from latentcache.fields.latents import PixelProfile
from latentcache.images.decode import decode

PROFILE = PixelProfile()
ALPHA = ((X * 9 + Y * 5) % 256).astype(np.uint8)


def png(samples, *, depth, kind, extra=b""):
    """A PNG from (H, W, C) samples; kind 0 grey, 2 RGB, 4 grey and alpha, 6 RGBA."""

    height, width = samples.shape[:2]
    rows = samples.astype(">u2" if depth == 16 else "u1").reshape(height, -1)
    body = b"".join(b"\0" + row.tobytes() for row in rows)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    between = chunk(b"tRNS", extra) if extra else b""
    return b"\x89PNG\r\n\x1a\n" + header + between + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def on_white(color, alpha):
    a = alpha[..., None].astype(float)
    return np.rint((color * a + 255.0 * (255 - a)) / 255).astype(np.uint8)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations(name, orientation):
    info = Image.Exif()
    info[0x0112] = orientation
    data = saved(IMAGE, format=name, exif=info)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")
    pixels = decode(data, PROFILE)
    assert np.array_equal(pixels, expected)
    assert pixels.flags.c_contiguous
    size = image_size(data)
    assert pixels.shape[:2] == (size.height, size.width)


def test_cmyk_palette_and_bilevel():
    for image, options in (
        (IMAGE.convert("CMYK"), {"format": "JPEG", "quality": 95}),
        (IMAGE.convert("CMYK"), {"format": "TIFF"}),
        (IMAGE.quantize(31), {"format": "PNG"}),
        (IMAGE.convert("1"), {"format": "PNG"}),
        (IMAGE.convert("1"), {"format": "TIFF"}),
        (IMAGE, {"format": "JPEG", "keep_rgb": True}),
    ):
        data = saved(image, **options)
        assert np.array_equal(decode(data, PROFILE), Image.open(BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("name", ["PNG", "TIFF", "WEBP"])
def test_rgba_is_blended_on_a_profile_background(name):
    image = IMAGE.copy()
    image.putalpha(Image.fromarray(ALPHA))
    options = {"lossless": True, "exact": True} if name == "WEBP" else {}
    data = saved(image, format=name, **options)
    assert np.array_equal(decode(data, PROFILE), on_white(PIXELS, ALPHA))
    hidden = decode(data, PixelProfile(alpha="#102030"))
    assert tuple(hidden[0, 0]) == (0x10, 0x20, 0x30)


def test_palette_with_transparency():
    indices = Image.fromarray((X % 4).astype(np.uint8)).convert("P")
    indices.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 255, 0, 0])
    for key, alphas in ((2, (255, 255, 0, 255)), (bytes([255, 128, 0, 255]), (255, 128, 0, 255))):
        pixels = decode(saved(indices, format="PNG", transparency=key), PROFILE)
        palette = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90], [255, 0, 0]])
        assert np.array_equal(pixels[0, :4], on_white(palette[None], np.array([alphas]))[0])


def test_one_transparent_color():
    rgb = PIXELS.copy()
    rgb[:, ::2] = (9, 8, 7)
    pixels = decode(png(rgb, depth=8, kind=2, extra=struct.pack(">HHH", 9, 8, 7)), PROFILE)
    assert np.all(pixels[:, ::2] == 255)
    assert np.array_equal(pixels[:, 1::2], rgb[:, 1::2])
    grey = np.where(X % 2, 77, 200)
    pixels = decode(png(grey, depth=8, kind=0, extra=struct.pack(">H", 77)), PROFILE)
    assert np.array_equal(pixels[..., 0], np.where(X % 2, 255, 200))


def test_one_transparent_color_in_16_bits():
    grey = np.where(X % 2, 0x1234, 0x1235)
    pixels = decode(png(grey, depth=16, kind=0, extra=struct.pack(">H", 0x1234)), PROFILE)
    assert np.array_equal(pixels[..., 0], np.where(X % 2, 255, 0x12))
    rgb = np.repeat(np.where(X % 2, 0x1200, 0x3400)[..., None], 3, 2)
    pixels = decode(png(rgb, depth=16, kind=2, extra=struct.pack(">HHH", *[0x1200] * 3)), PROFILE)
    assert np.array_equal(pixels[..., 1], np.where(X % 2, 255, 0x34))


def test_16_bit_samples_keep_their_high_byte():
    deep = (np.arange(37 * 53).reshape(37, 53) * 33 % 65_536).astype(np.uint16)
    expected = np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, 2)
    assert np.array_equal(decode(png(deep, depth=16, kind=0), PROFILE), expected)
    assert np.array_equal(decode(saved(Image.fromarray(deep), format="TIFF"), PROFILE), expected)
    rgb = np.stack([deep, deep[::-1], deep[:, ::-1]], -1)
    assert np.array_equal(decode(png(rgb, depth=16, kind=2), PROFILE), (rgb >> 8).astype(np.uint8))


@pytest.mark.parametrize("most", [255, 65_535, 70_000])
def test_the_range_of_32_bit_samples_is_not_guessed(most):
    wide = np.linspace(0, most, 37 * 53).reshape(37, 53).astype(np.int32)
    with pytest.raises(UnusableSampleError, match=f"32-bit integers from 0 to {most}") as caught:
        decode(saved(Image.fromarray(wide), format="TIFF"), PROFILE)
    assert caught.value.slug == "float"


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_first_frame(name):
    frames = [Image.new("RGB", (32, 24), color) for color in ("#ff0000", "#00ff00", "#0000ff")]
    options = {"lossless": True} if name == "WEBP" else {}
    pixels = decode(saved(frames[0], format=name, save_all=True, append_images=frames[1:], **options), PROFILE)
    assert pixels.shape == (24, 32, 3)
    assert np.abs(pixels.astype(int) - (255, 0, 0)).max() <= 2


def srgb(**swap):
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for first, second in swap.items():
        a, b = (data.index(name.encode(), 132) + 4 for name in (first, second))
        data[a : a + 8], data[b : b + 8] = data[b : b + 8], data[a : a + 8]
    return bytes(data)


@pytest.mark.parametrize("name", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_profiles_are_converted_by_content(name):
    icc = srgb(rXYZ="gXYZ")  # red and green exchanged, still named sRGB
    options = {"lossless": True} if name == "WEBP" else {"subsampling": "4:4:4", "quality": 97}
    data = saved(IMAGE, format=name, icc_profile=icc, **options)
    stored = np.asarray(Image.open(BytesIO(data)).convert("RGB"))
    assert np.array_equal(decode(data, PixelProfile(icc="ignore")), stored)
    assert np.abs(decode(data, PROFILE).astype(int) - stored[..., [1, 0, 2]]).max() <= 2


@pytest.mark.parametrize("icc", [srgb(), b"junk" * 50, srgb()[:200], srgb(rXYZ="gXYZ") + bytes(5 << 20), b"\0" * 128])
def test_profiles_that_change_nothing(icc):
    for name in ("TIFF", "JPEG"):
        data = saved(IMAGE, format=name, icc_profile=icc)
        assert np.array_equal(decode(data, PROFILE), Image.open(BytesIO(data)).convert("RGB"))


FILES = {
    "jpeg": saved(IMAGE, format="JPEG"),
    "progressive": saved(IMAGE, format="JPEG", progressive=True),
    "png": saved(IMAGE, format="PNG"),
    "webp": saved(IMAGE, format="WEBP", lossless=True),
    "tiff": saved(IMAGE, format="TIFF"),
    "tiff-lzw": saved(IMAGE, format="TIFF", compression="tiff_lzw"),
    "gif": saved(IMAGE, format="GIF"),
    "bmp": saved(IMAGE, format="BMP"),
    "avif": saved(IMAGE, format="AVIF"),
    "rgba": saved(IMAGE.convert("RGBA"), format="PNG", icc_profile=srgb(rXYZ="gXYZ")),
}


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(FILES)),
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=12),
    cut=st.floats(0.3, 1),
)
def test_damaged_files_are_rejected_or_decoded(name, edits, cut, capsys):
    data = bytearray(FILES[name][: max(int(len(FILES[name]) * cut), 1)])
    for offset, value in edits:
        data[int(offset * (len(data) - 1))] = value
    error_found, pixels = None, PIXELS
    try:
        pixels = decode(bytes(data), PROFILE, max_pixels=1_000_000)
    except UnusableSampleError as error:
        error_found = error
    assert error_found is None or (error_found.slug and error_found.what and error_found.fix)
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.flags.c_contiguous
    assert capsys.readouterr() == ("", "")


def test_truncated_image_mode_of_pillow_is_rejected(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(UsageError, match="truncated") as caught:
        decode(FILES["png"], PROFILE)
    assert "LOAD_TRUNCATED_IMAGES = False" in caught.value.fix


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
