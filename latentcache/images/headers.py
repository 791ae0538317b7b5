"""Headers of image files: size, orientation, and the reason why a file cannot be used.

Guarantee: a bad file raises ``UnusableSampleError`` and nothing else. No pixel is decoded here, and Pillow prints
nothing. Only ``FORMATS`` are tried: no Ghostscript, no fonts, no FITS. Cost: some 100 µs an image and a read of the
first few kilobytes; WebP and AVIF are read whole. Only the EXIF block counts for orientation, as in browsers: XMP and
ImageMagick's text profiles do not.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin, UnidentifiedImageError

from latentcache.errors import LatentcacheError, UnusableSampleError
from latentcache.fields.clips import CLIP
from latentcache.fields.latents import ALTERED, MAX_PIXELS
from latentcache.fields.table import Rejected, SampleTable
from latentcache.geometry.sizes import Size
from latentcache.images.clips import EncodedClip, is_clip, too_many_pixels
from latentcache.sources.causes import as_rejected, cause_of, fault, sniff_cause
from latentcache.sources.locations import Location, open_image, read_each, read_head

#: Formats that Pillow may try. MPO, the multi-image JPEG of phones, arrives through the JPEG plugin.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "GIF", "TIFF")
#: EXIF orientations that exchange height and width.
_SIDEWAYS = frozenset({5, 6, 7, 8})

_TRUNCATED_WORDS = ("truncated", "premature", "broken data stream", "could not create decoder")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ORIENTATION_TAG = 0x0112
_BITS_PER_SAMPLE, _SAMPLE_FORMAT, _FLOAT = 258, 339, 3  # TIFF 6.0
_INSIDE_PILLOW = r"PIL\."
_QUIET = ("ignore", None, Warning, re.compile(_INSIDE_PILLOW), 0)
_HEAD_BYTES = 65_536
_SHOWN_BYTES = 12

logging.getLogger("PIL").addHandler(logging.NullHandler())
for _plugin in ("Jpeg", "Mpo", "Png", "WebP", "Avif", "Bmp", "Gif", "Tiff"):
    # Imported one by one, so that Pillow never loads all of its plugins, from any thread.
    import_module(f"PIL.{_plugin}ImagePlugin")


def fill_sizes(
    root: Path,
    samples: SampleTable,
    rows: NDArray[np.intp],
    *,
    max_pixels: int = MAX_PIXELS,
    stopping: Callable[[], bool] = bool,
) -> tuple[dict[str, NDArray[Any]], NDArray[np.uint64], list[tuple[int, Rejected]]]:
    """Read the headers of the images and videos of some rows of samples, until ``stopping`` gives True.

    Returns:
        Columns: ``original_size``, (n, 2) height and width after EXIF orientation, zeros for rejected images, and
        ``CLIP`` if there are videos, ``ALTERED`` if pixels of some differ from the file. Then (n,) hashes
        of first bytes, and (row, why) of rejected images.
    """
    sizes = np.zeros((len(rows), 2), dtype=np.uint32)
    rejected = list[tuple[int, Rejected]]()
    clips, altered = np.zeros((len(rows), 3), dtype=np.uint32), np.zeros(len(rows), dtype=np.uint8)
    heads = np.zeros(len(rows), dtype=np.uint64)

    def read(location: Location) -> tuple[Size, tuple[int, int, int], int, int]:
        with open_image(root, location) as file:
            head, stream = read_head(file)
            if is_clip(stream):
                video = EncodedClip(stream, max_pixels=max_pixels)
                return video.size, video.clip, 0, head
            image, _, size = header(stream, max_pixels=max_pixels)
            return size, (0, 0, 0), _alterations(image), head

    for number, outcome in read_each(read, samples, rows, "image", stopping, quick=True):
        if isinstance(outcome, UnusableSampleError):
            name, line = samples.where(int(rows[number]))
            rejected.append((int(rows[number]), as_rejected(name, outcome, line=line)))
        else:
            size, clips[number], altered[number], heads[number] = outcome
            sizes[number] = size.height, size.width
    columns: dict[str, NDArray[Any]] = {"original_size": sizes, CLIP: clips, ALTERED: altered}
    return {name: column for name, column in columns.items() if column is sizes or column.any()}, heads, rejected


def _alterations(image: Image.Image) -> int:
    """Bits for ``fields.latents.ALTERATIONS``; the further images of MPO files are previews."""
    try:
        has_frames = image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except Exception:  # noqa: BLE001 - Pillow raises many on a damaged second frame
        has_frames = True
    return has_frames | (image.mode == "CMYK") << 1 | image.has_transparency_data << 2


def header(stream: BinaryIO, *, max_pixels: int = MAX_PIXELS) -> tuple[Image.Image, int, Size]:
    """Open an image without decoding it; gives its EXIF orientation (1 to 8) and its size after that, too.

    Raises:
        UnusableSampleError: The image cannot be used; ``slug`` is the reason.
    """
    with translated_errors(stream):
        # ``warnings.catch_warnings`` is not safe in threads; a filter that is inserted once and stays is.
        if list(warnings.filters[:1]) != [_QUIET]:
            warnings.filterwarnings("ignore", module=_INSIDE_PILLOW)
        image = Image.open(stream, formats=FORMATS)
        width, height = image.size
        if width * height > max_pixels:
            raise too_many_pixels(height, width, max_pixels)
        orientation = _stored_orientation(image, stream)
    return image, orientation, Size(width, height) if orientation in _SIDEWAYS else Size(height, width)


def _stored_orientation(image: Image.Image, stream: BinaryIO) -> int:
    if image.format == "TIFF":
        return 1  # Pillow turns these while loading, and has exchanged the sides already
    exif = image.info.get("exif")
    if exif is None and image.format == "PNG":
        exif = _late_exif(stream)
    return exif_orientation(exif) if isinstance(exif, bytes) else 1


def exif_orientation(exif: bytes) -> int:
    """Orientation tag of an EXIF block, 1 to 8. 1 if it is unreadable: damaged EXIF must not cost an image."""
    block = Image.Exif()
    try:
        block.load(exif)
        value = block.get(_ORIENTATION_TAG, 1)
    except Exception:  # noqa: BLE001 - Pillow raises SyntaxError, struct.error, KeyError, ...
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def check_png(data: bytes) -> None:
    """Check the CRC of every chunk of a PNG: a damaged one often inflates without an error, to wrong pixels.

    Raises ``truncated`` or ``decoder-error``. Bytes after ``IEND`` are not read. PNG, third edition, 5.3 and 5.5.
    """
    if not data.startswith(_PNG_SIGNATURE):
        return
    view = memoryview(data)
    for kind, start, length in _png_chunks(BytesIO(data)):
        end = start + length
        if end + 4 > len(data):
            raise fault("truncated", f"PNG chunk {kind!r} ends at byte {end + 4}, the file at {len(data)}")
        if zlib.crc32(view[start - 4 : end]) != int.from_bytes(view[end : end + 4], "big"):
            raise fault("decoder-error", f"PNG chunk {kind!r} at byte {start - 8} fails its CRC")
        if kind == b"IEND":
            return
    raise fault("truncated", f"PNG without an end chunk, {len(data)} bytes")


@contextmanager
def translated_errors(stream: BinaryIO) -> Iterator[None]:
    """Turn any error of an image library about ``stream`` into an ``UnusableSampleError`` with a reason.

    Errors of this package and ``MemoryError`` pass through.
    """
    try:
        yield
    except (LatentcacheError, MemoryError):
        raise
    except Exception as error:
        # On damaged files Pillow raises OSError, SyntaxError, RuntimeError, ValueError, struct.error, ...
        reason = _reason(error, stream)
        detail = f"decoding failed: {error or type(error).__name__}"
        if isinstance(error, UnidentifiedImageError):  # its message is the address of a buffer
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            detail = f"no decoder accepts its {size} bytes, which begin with {stream.read(_SHOWN_BYTES)!r}"
            if deep := _deep_tiff(stream):
                detail = f"it has {deep} per pixel, whose black and white are not defined"
        raise fault(reason, detail) from error


def _png_chunks(stream: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """(type, offset of the data, length of the data) of every chunk, as the headers claim."""
    position = len(_PNG_SIGNATURE)
    while True:
        stream.seek(position)
        header = stream.read(8)
        if len(header) < 8:
            return
        length = int.from_bytes(header[:4], "big")
        yield header[4:], position + 8, length
        position += 12 + length


def _late_exif(stream: BinaryIO) -> bytes | None:
    """The eXIf chunk of a PNG that keeps it after the pixels; Pillow finds such a chunk only after decoding."""
    before = stream.tell()
    exif = None
    for kind, start, length in _png_chunks(stream):
        if kind == b"eXIf":
            stream.seek(start)
            exif = stream.read(length)
            break
    stream.seek(before)
    return exif


def _reason(error: Exception, stream: BinaryIO) -> str:
    message = str(error)
    if isinstance(error, Image.DecompressionBombError):
        return "bomb"
    if isinstance(error, OSError) and error.errno:
        return cause_of(error)  # of the file system, not of Pillow
    if "MAX_TEXT_" in message:
        return "png-metadata-too-large"
    if any(word in message.lower() for word in _TRUNCATED_WORDS):
        return "truncated"
    if _deep_tiff(stream):
        return "float"
    stream.seek(0)
    return sniff_cause(stream.read(_HEAD_BYTES))


def _deep_tiff(stream: BinaryIO) -> str:
    """Samples of a TIFF that Pillow does not open because of them: ``3 x 32 bits, floats``; empty: another file."""
    stream.seek(0)
    try:
        tags = TiffImagePlugin.ImageFileDirectory_v2(stream.read(8))
        stream.seek(tags.next)
        tags.load(stream)
        bits = tags[_BITS_PER_SAMPLE]
        kinds = tags.get(_SAMPLE_FORMAT, (1,))
    except Exception:  # noqa: BLE001 - no TIFF, or a damaged one
        return ""
    kind = "floats" if _FLOAT in kinds else "integers"
    return f"{len(bits)} x {max(bits)} bits, {kind}" if max(bits) > 16 or _FLOAT in kinds else ""
