"""From the bytes of a file to RGB pixels: every policy of the pixel profile, and no second opinion.

Decides how orientation, colour profiles, transparency, 16-bit samples and damage are treated. Guarantee: the
same bytes give the same pixels on every machine, because simplejpeg is used only where a self-test shows that
it agrees with Pillow to the bit; a damaged file gives ``UnusableSampleError``, never another exception.
Costs about 6 ms for a 2 MP JPEG and 35 ms for one of 12 MP on one core; other formats are 2 to 10 times dearer.

Policies: embedded profiles are converted to sRGB with LittleCMS, perceptual intent; a profile that is junk,
above 4 MiB, made for another colour space, or that moves no colour by more than one level is left alone.
Transparency is laid on the profile's colour in 8 bits, after the conversion. CMYK without a profile is
converted by the plain formula. Of animations and multi-page files the first frame is taken.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageColor, ImageFile

from latentcache.errors import RecipeError, UsageError
from latentcache.pipeline.headers import check_png, opened, refused, refusing, stored_orientation
from latentcache.pipeline.jpeg import turbo_pixels
from latentcache.pipeline.scratch import Scratch
from latentcache.pipeline.settings import MAX_PIXELS
from latentcache.recipe import PixelProfile

#: Embedded profiles above this size are ignored; the largest printer profiles have 2 to 3 MiB.
MAX_ICC_BYTES = 4 << 20
#: A profile that moves no probed colour by more levels than this is sRGB for our purposes.
ICC_TOLERANCE = 1

_SPACES = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}
_PROBE_STEPS = {"L": 256, "RGB": 17, "CMYK": 6}
#: Rows that are copied out of a decoded picture at a time.
_STRIP = 256
_BITS_PER_SAMPLE = 258  # TIFF 6.0
_SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")


def decode(
    data: bytes, profile: PixelProfile, *, max_pixels: int = MAX_PIXELS, scratch: Scratch | None = None
) -> NDArray[np.uint8]:
    """RGB pixels (H, W, 3) of one picture, upright, 0 to 255, C-contiguous.

    Args:
        data: All bytes of the file, the same that were hashed.
        profile: Policies for orientation, colour, transparency and depth.
        max_pixels: Largest area that is not refused.
        scratch: Where the pixels may lie; without it they are the caller's own.

    Raises:
        UnusableSampleError: The file cannot be used; ``slug`` is the cause word.
        RecipeError: The profile names a policy that this version does not have.
        UsageError: Some library has told Pillow to accept truncated files.
    """
    ground = _ground(profile)
    _refuse_lenient_pillow()
    check_png(data)
    stream = BytesIO(data)
    with refusing(stream):
        picture = opened(stream, max_pixels=max_pixels)
        orientation = stored_orientation(picture, stream)
        pixels = _pixels(picture, data, scratch, icc=profile.icc == "srgb", ground=ground)
        return upright(pixels, orientation)


def upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Apply an EXIF orientation (1 to 8) to pixels (H, W, 3): an exact transpose, C-contiguous."""
    whole = np.ascontiguousarray(pixels).view("V3")[..., 0]  # three bytes as one item: twice as fast
    turned = {
        2: whole[:, ::-1],
        3: whole[::-1, ::-1],
        4: whole[::-1],
        5: whole.T,
        6: whole[::-1].T,
        7: whole[::-1, ::-1].T,
        8: whole.T[::-1],
    }.get(orientation, whole)
    return np.ascontiguousarray(turned).view(np.uint8).reshape(*turned.shape, 3)


def _pixels(
    picture: Image.Image, data: bytes, scratch: Scratch | None, *, icc: bool, ground: tuple[int, ...]
) -> NDArray[np.uint8]:
    """RGB pixels as stored, before orientation."""
    embedded = _embedded_profile(picture) if icc else b""
    turbo = turbo_pixels(picture, data, scratch)
    if turbo is None:
        colour, alpha = _split(picture, data)
    elif not (embedded and _moves_colours(embedded, picture.mode)):
        return turbo
    else:
        colour, alpha = Image.fromarray(turbo[..., 0] if picture.mode == "L" else turbo), None
    if embedded and _moves_colours(embedded, colour.mode):
        colour = _to_srgb(colour, embedded)
    return _array(_composite(_in_mode(colour, "RGB"), alpha, ground))


def _split(picture: Image.Image, data: bytes) -> tuple[Image.Image, Image.Image | None]:
    """Decode, and part 8-bit colour (L, RGB or CMYK) from transparency (L, 255 is opaque).

    Raises:
        UnusableSampleError: ``float``.
    """
    picture.info.pop("xmp", None)  # Pillow would turn a TIFF by it, and its header has not said so
    picture.load()
    key = picture.info.get("transparency")
    if picture.mode in _SIXTEEN or picture.mode in ("I", "F"):
        return _from_deep(picture, key)
    if picture.mode == "LA" or (picture.mode in ("1", "L") and key is not None):
        picture = picture.convert("LA")
        return picture.getchannel("L"), picture.getchannel("A")
    if picture.mode == "RGB" and isinstance(key, tuple) and data[24:25] == b"\x10":
        picture.info["transparency"] = tuple(value >> 8 for value in key)  # 16-bit PNG, loaded as high bytes
    if picture.has_transparency_data:
        picture = _in_mode(picture, "RGBA")
        return picture.convert("RGB"), picture.getchannel("A")
    if picture.mode in ("1", "L"):
        return _in_mode(picture, "L"), None
    return (picture if picture.mode == "CMYK" else _in_mode(picture, "RGB")), None


def _in_mode(picture: Image.Image, mode: str) -> Image.Image:
    """The picture in a mode; where it is in it already, without the copy that ``convert`` makes."""
    return picture if picture.mode == mode else picture.convert(mode)


def _array(picture: Image.Image) -> NDArray[np.uint8]:
    """The samples of an RGB picture, (H, W, 3), strip by strip: at once they would be there three times."""
    width, height = picture.size
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    for top in range(0, height, _STRIP):
        bottom = min(top + _STRIP, height)
        pixels[top:bottom] = np.asarray(picture.crop((0, top, width, bottom)))
    return pixels


def _from_deep(picture: Image.Image, key: object) -> tuple[Image.Image, Image.Image | None]:
    """High bytes of 16-bit grey, with the transparency that one grey value may stand for.

    Raises:
        UnusableSampleError: ``float``: floats, or integers beyond 16 bits.
    """
    if picture.mode == "F":
        raise refused("float", "floats, whose black and white are not defined")
    values = np.asarray(picture)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 0xFFFF:
        raise refused("float", f"integers from {low} to {high}, whose black and white are not defined")
    shift = 0 if picture.mode == "I" and high <= 0xFF else _deep_bits(picture) - 8
    alpha = None
    if isinstance(key, int):
        alpha = Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
    return Image.fromarray((values >> shift).astype(np.uint8)), alpha


def _deep_bits(picture: Image.Image) -> int:
    """Bits of a deep sample: 12 for the TIFFs of some scanners and microscopes, 16 otherwise."""
    tags = getattr(picture, "tag_v2", {})
    return 12 if tags.get(_BITS_PER_SAMPLE) == (12,) else 16


def _composite(colour: Image.Image, alpha: Image.Image | None, ground: tuple[int, ...]) -> Image.Image:
    """``round((colour * alpha + ground * (255 - alpha)) / 255)`` for every sample, as Pillow's paste does."""
    if alpha is None:
        return colour
    canvas = Image.new("RGB", colour.size, ground)
    canvas.paste(colour, mask=alpha)
    return canvas


def _embedded_profile(picture: Image.Image) -> bytes:
    """The ICC profile, or nothing where there is none that will be looked at."""
    icc = picture.info.get("icc_profile")
    return icc if isinstance(icc, bytes) and len(icc) <= MAX_ICC_BYTES else b""


@lru_cache(maxsize=16)
def _moves_colours(icc: bytes, mode: str) -> bool:
    """Whether a profile is one for this mode and differs from sRGB; measured, because names are not facts."""
    steps, channels = _PROBE_STEPS[mode], len(mode)
    levels = np.linspace(0, 255, steps).round().astype(np.uint8)
    grid = levels[np.indices((steps,) * channels).reshape(channels, -1).T]
    probe = Image.frombytes(mode, (1, len(grid)), grid.tobytes())
    try:
        if _profile(icc).profile.xcolor_space.strip() != _SPACES[mode]:
            return False
        converted = np.asarray(_to_srgb(probe, icc), np.int16)
    except (OSError, ImageCms.PyCMSError):
        return False
    return int(np.abs(converted - np.asarray(probe.convert("RGB"), np.int16)).max()) > ICC_TOLERANCE


def _to_srgb(picture: Image.Image, icc: bytes) -> Image.Image:
    """Convert 8-bit L, RGB or CMYK to sRGB.

    Raises:
        OSError: The profile cannot be read.
        ImageCms.PyCMSError: It cannot be used.
    """
    intent = ImageCms.Intent.PERCEPTUAL
    converted = ImageCms.profileToProfile(picture, _profile(icc), ImageCms.createProfile("sRGB"), intent, "RGB")
    return converted if converted is not None else picture


def _profile(icc: bytes) -> ImageCms.ImageCmsProfile:
    """Open a profile.

    Raises:
        OSError: It cannot be read.
    """
    return ImageCms.ImageCmsProfile(BytesIO(icc))


@lru_cache(maxsize=16)
def _ground(profile: PixelProfile) -> tuple[int, ...]:
    """The colour below transparent pixels, after a look at the other policies.

    Raises:
        RecipeError: A policy this version does not have.
    """
    known = {
        "decoder": ("libjpeg-turbo",),
        "orientation": ("exif",),
        "icc": ("srgb", "ignore"),
        "deep": ("high-byte",),
    }
    for name, values in known.items():
        if getattr(profile, name) not in values:
            raise RecipeError(
                f"pixel policy {name}={getattr(profile, name)!r} is not known",
                fix=f"use one of: {', '.join(values)}",
            )
    try:
        return ImageColor.getrgb(profile.alpha)[:3]
    except ValueError as error:
        raise RecipeError(f"{profile.alpha!r} is no colour", why=str(error), fix="write #rrggbb") from error


def _refuse_lenient_pillow() -> None:
    """Half a picture with the rest grey must never enter a cache.

    Raises:
        UsageError: ``PIL.ImageFile.LOAD_TRUNCATED_IMAGES`` is set.
    """
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise UsageError(
            "Pillow has been told to accept truncated pictures",
            where="PIL.ImageFile.LOAD_TRUNCATED_IMAGES",
            why="some library in this process set it; damaged pictures would be cached as if they were whole",
            fix="set PIL.ImageFile.LOAD_TRUNCATED_IMAGES = False, or build in a process of its own",
            slug="load-truncated",
        )
