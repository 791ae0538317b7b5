"""Decode the bytes of a file to RGB pixels by the policies of the pixel profile.

The policies: orientation, color profiles, transparency, 16-bit samples and damage. Guarantee: the same bytes give the
same pixels on every machine; a damaged file gives ``UnusableSampleError``, never another exception. Costs about 6 ms
for a 2 MP JPEG and 35 ms for one of 12 MP on one core. Other formats take 2 to 10 times longer.

Embedded profiles are converted to sRGB with LittleCMS, perceptual intent. Profiles that are damaged, above 4 MiB or
for another color space are ignored, and those that move no color by more than one level. Transparency is laid on the
color of the pixel profile in 8 bits, after the conversion. CMYK without a profile is converted by the plain formula.
Animations and multi-page files give their first frame.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageColor, ImageFile

from latentcache.errors import UsageError
from latentcache.fields.latents import MAX_PIXELS, LatentsRecipe, PixelProfile
from latentcache.geometry.sizes import Placement, Size
from latentcache.images.clips import EncodedClip, is_clip
from latentcache.images.headers import check_png, header, translated_errors
from latentcache.images.resize import resize_crop
from latentcache.sources.causes import fault

#: Embedded profiles above this size are ignored; the largest printer profiles have 2 to 3 MiB.
MAX_ICC_BYTES = 4 << 20
#: A profile that moves no probed color by more levels than this counts as sRGB.
ICC_TOLERANCE = 1

_SPACES = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}
_PROBE_STEPS = {"L": 256, "RGB": 17, "CMYK": 6}
#: Rows that are copied out of a decoded image at a time.
_STRIP = 256
_BITS_PER_SAMPLE = 258  # TIFF 6.0
_SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")

# Warnings of libjpeg after which pixels are wrong; its others (stray bytes, odd versions) are harmless.
_LOSSY = re.compile(r"premature|bad Huffman|bad arithmetic|instead of RST", re.IGNORECASE)


class EncodedImage:
    """One image file in memory: its header is read once, its pixels are decoded when asked for.

    Raises:
        UnusableSampleError: The file cannot be used; ``slug`` is the reason.
    """

    def __init__(self, data: bytes, *, max_pixels: int = MAX_PIXELS) -> None:
        self._data = data
        self._stream = BytesIO(data)
        self._image, self._orientation, self.size = header(self._stream, max_pixels=max_pixels)
        """Pixels, after EXIF orientation."""

    def pixels(self, profile: PixelProfile) -> NDArray[np.uint8]:
        """RGB pixels (H, W, 3), upright, 0 to 255, C-contiguous; to be called once.

        Raises:
            UnusableSampleError: The file is damaged; ``slug`` is the reason.
            UsageError: Some library has set Pillow to accept truncated files.
        """
        ground = ImageColor.getrgb(profile.alpha)[:3]
        with self._strictly():
            pixels = _pixels(self._image, self._data, icc=profile.icc == "srgb", ground=ground)
            turned = upright(pixels, self._orientation)
        decoded = Size(*turned.shape[:2])
        if decoded != self.size:
            raise fault("decoder-error", f"the header says {self.size}, the decoder gives {decoded}")
        return turned

    def opacity(self) -> NDArray[np.uint8]:
        """Opacity (H, W, 3) in all channels, upright, 255 is opaque; in place of :meth:`pixels`, and raises as it."""
        with self._strictly():
            color, alpha = _split(self._image, self._data)
            level = alpha or Image.new("L", color.size, 255)
            return upright(_array(level.convert("RGB")), self._orientation)

    @contextmanager
    def _strictly(self) -> Iterator[None]:
        """Reject a damaged file, and keep half-decoded images with gray rests out of caches."""
        if ImageFile.LOAD_TRUNCATED_IMAGES:
            raise UsageError(
                "Pillow is set to accept truncated images",
                where="PIL.ImageFile.LOAD_TRUNCATED_IMAGES",
                why="some library in this process set it; damaged images would be cached as if they were complete",
                fix="set PIL.ImageFile.LOAD_TRUNCATED_IMAGES = False, or build in a process of its own",
                slug="load-truncated",
            )
        check_png(self._data)
        with translated_errors(self._stream):
            yield


def decode(data: bytes, profile: PixelProfile, *, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """RGB pixels of one image in one step; see :class:`EncodedImage`."""
    return EncodedImage(data, max_pixels=max_pixels).pixels(profile)


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


def _pixels(image: Image.Image, data: bytes, *, icc: bool, ground: tuple[int, ...]) -> NDArray[np.uint8]:
    held = image.info.get("icc_profile") if icc else None
    embedded = held if isinstance(held, bytes) and len(held) <= MAX_ICC_BYTES else b""
    turbo = turbo_pixels(image, data)
    if turbo is None:
        color, alpha = _split(image, data)
    elif not (embedded and _moves_colors(embedded, image.mode)):
        return turbo
    else:
        color = Image.fromarray(turbo[..., 0] if image.mode == "L" else turbo)
        alpha = None
    if embedded and _moves_colors(embedded, color.mode):
        color = _to_srgb(color, embedded)
    color = _in_mode(color, "RGB")
    if alpha is None:
        return _array(color)
    canvas = Image.new("RGB", color.size, ground)
    canvas.paste(color, mask=alpha)  # round((color * alpha + ground * (255 - alpha)) / 255)
    return _array(canvas)


def _split(image: Image.Image, data: bytes) -> tuple[Image.Image, Image.Image | None]:
    """Decode, and part 8-bit color (L, RGB or CMYK) from transparency (L, 255 is opaque)."""
    image.info.pop("xmp", None)  # Pillow would turn a TIFF by it, and its header has not said so
    image.load()
    key = image.info.get("transparency")
    if image.mode in _SIXTEEN or image.mode in ("I", "F"):
        return _from_deep(image, key)
    if image.mode == "LA" or (image.mode in ("1", "L") and key is not None):
        image = image.convert("LA")
        return image.getchannel("L"), image.getchannel("A")
    if image.mode == "RGB" and isinstance(key, tuple) and data[24:25] == b"\x10":
        image.info["transparency"] = tuple(value >> 8 for value in key)  # 16-bit PNG, loaded as high bytes
    if image.has_transparency_data:
        image = _in_mode(image, "RGBA")
        return image.convert("RGB"), image.getchannel("A")
    if image.mode in ("1", "L"):
        return _in_mode(image, "L"), None
    return (image if image.mode == "CMYK" else _in_mode(image, "RGB")), None


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    return image if image.mode == mode else image.convert(mode)


def _array(image: Image.Image) -> NDArray[np.uint8]:
    """The samples of an RGB image, (H, W, 3), strip by strip: at once they would take three times the memory."""
    width, height = image.size
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    for top in range(0, height, _STRIP):
        bottom = min(top + _STRIP, height)
        pixels[top:bottom] = np.asarray(image.crop((0, top, width, bottom)))
    return pixels


def _from_deep(image: Image.Image, key: object) -> tuple[Image.Image, Image.Image | None]:
    """High bytes of 16-bit gray, with the transparency that one gray value may mean."""
    values = np.asarray(image)
    if image.mode in ("I", "F"):
        kind = "floats" if image.mode == "F" else "32-bit integers"
        raise fault("float", f"{kind} from {values.min()} to {values.max()}, whose black and white are not defined")
    bits = 12 if getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE) == (12,) else 16  # 12: scanners, microscopes
    alpha = None
    if isinstance(key, int):
        alpha = Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
    return Image.fromarray((values >> bits - 8).astype(np.uint8)), alpha


@lru_cache(maxsize=16)
def _moves_colors(icc: bytes, mode: str) -> bool:
    """True if a profile is for this mode and differs from sRGB; measured, because profile names are unreliable."""
    steps = _PROBE_STEPS[mode]
    channels = len(mode)
    levels = np.linspace(0, 255, steps).round().astype(np.uint8)
    grid = levels[np.indices((steps,) * channels).reshape(channels, -1).T]
    probe = Image.frombytes(mode, (1, len(grid)), grid.tobytes())
    try:
        if ImageCms.ImageCmsProfile(BytesIO(icc)).profile.xcolor_space.strip() != _SPACES[mode]:
            return False
        converted = np.asarray(_to_srgb(probe, icc), np.int16)
    except (OSError, ImageCms.PyCMSError):
        return False
    return int(np.abs(converted - np.asarray(probe.convert("RGB"), np.int16)).max()) > ICC_TOLERANCE


def _to_srgb(image: Image.Image, icc: bytes) -> Image.Image:
    intent = ImageCms.Intent.PERCEPTUAL
    profile = ImageCms.ImageCmsProfile(BytesIO(icc))
    converted = ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), intent, "RGB")
    return converted if converted is not None else image


def turbo_pixels(image: Image.Image, data: bytes) -> NDArray[np.uint8] | None:
    """RGB pixels (H, W, 3) as stored of a gray or YCbCr JPEG, by libjpeg-turbo; None for other images.

    Pixels lost to damage are a ValueError, which Pillow does not report.
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


def encoded_file(data: bytes, *, max_pixels: int = MAX_PIXELS) -> EncodedImage | EncodedClip:
    """An image or a video, as its first bytes say; raises ``UnusableSampleError``."""
    return (EncodedClip if is_clip(BytesIO(data)) else EncodedImage)(data, max_pixels=max_pixels)


def cut(
    source: EncodedImage | EncodedClip,
    placements: Iterable[Placement],
    frames: int,
    recipe: LatentsRecipe,
    pixels: NDArray[np.uint8] | None = None,
) -> dict[Placement, NDArray[np.uint8]]:
    """Decode once; gives pixels (H, W, 3) of each placement, or (frames, H, W, 3) if the recipe has clips.

    ``source`` is to be used once; ``pixels`` are those of an image that is decoded already.

    Raises:
        UnusableSampleError: The file is damaged, or a video if the recipe has no clips.
    """
    resample = recipe.pixels.resample
    clips = recipe.geometry.clips
    if isinstance(source, EncodedClip):
        if clips is None:
            raise fault("no-frame-count", "it is a video, and an image is wanted here")
        crops = {
            placement: np.empty((frames, placement.bucket.height, placement.bucket.width, 3), dtype=np.uint8)
            for placement in placements
        }
        for number, frame in enumerate(source.pixels(frames, clips)):
            for placement, held in crops.items():
                held[number] = resize_crop(frame, placement, resample)
        return crops
    pixels = source.pixels(recipe.pixels) if pixels is None else pixels
    crops = {placement: resize_crop(pixels, placement, resample) for placement in placements}
    return crops if clips is None else {placement: crop[None] for placement, crop in crops.items()}
