"""What a picture file says before it is decoded: how big, which way up, and why it cannot be used.

Decides the size that geometry works with (after EXIF orientation), the pixel limit, and the cause word of every
refusal. Guarantee: nothing but ``UnusableSampleError`` comes out of a bad file, no pixel is decoded here, only
the formats in ``FORMATS`` are ever tried (so no Ghostscript, no fonts, no FITS), and Pillow stays silent.
Costs some 100 µs a picture and a read of the first few kilobytes (all of it for WebP and AVIF).

Only the EXIF block counts for orientation, as in browsers: XMP and ImageMagick's text profiles do not.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from typing import BinaryIO, Literal

from PIL import Image, UnidentifiedImageError

from latentcache.errors import LatentcacheError, UnusableSampleError
from latentcache.geometry.sizes import Size
from latentcache.pipeline.settings import MAX_PIXELS
from latentcache.sources.causes import cause_of, hint_for, sniff_cause

#: What Pillow may try. MPO, the multi-picture JPEG of phones, arrives through the JPEG plugin.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "GIF", "TIFF")
#: EXIF orientations that exchange height and width.
SIDEWAYS = frozenset({5, 6, 7, 8})

_TRUNCATED_WORDS = ("truncated", "premature", "broken data stream", "could not create decoder")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ORIENTATION_TAG = 0x0112
_INSIDE_PILLOW = r"PIL\."
_QUIET = ("ignore", None, Warning, re.compile(_INSIDE_PILLOW), 0)
_HEAD_BYTES = 65_536
_TAIL_BYTES = 12
_MAX_BOXES, _FAR = 100, 1 << 48

logging.getLogger("PIL").addHandler(logging.NullHandler())
for _plugin in ("Jpeg", "Mpo", "Png", "WebP", "Avif", "Bmp", "Gif", "Tiff"):
    # Named one by one, so that Pillow never goes and loads all of its plugins, from any thread.
    import_module(f"PIL.{_plugin}ImagePlugin")


def picture_size(source: bytes | BinaryIO, *, max_pixels: int = MAX_PIXELS) -> Size:
    """Size in pixels after EXIF orientation, from the header alone.

    Args:
        source: All bytes of the file, or the file opened for binary reading (its position is moved).
        max_pixels: Largest area that is not refused.

    Raises:
        UnusableSampleError: Not a picture that can be used; ``slug`` is the cause word.
    """
    stream = BytesIO(source) if isinstance(source, bytes) else source
    with refusing(stream):
        picture = opened(stream, max_pixels=max_pixels)
        width, height = picture.size
        sideways = stored_orientation(picture, stream) in SIDEWAYS
        return Size(width, height) if sideways else Size(height, width)


def opened(stream: BinaryIO, *, max_pixels: int) -> Image.Image:
    """The picture, header read and nothing decoded. Call within :func:`refusing`.

    Raises:
        UnusableSampleError: ``too-many-pixels``.
    """
    _hush()
    picture = Image.open(stream, formats=FORMATS)
    width, height = picture.size
    if width * height > max_pixels:
        raise refused("too-many-pixels", f"{height}x{width} = {height * width} pixels, at most {max_pixels} allowed")
    return picture


def stored_orientation(picture: Image.Image, stream: BinaryIO) -> int:
    """EXIF orientation that is still to be applied, 1 to 8; 1 where there is none, or nonsense.

    ``stream`` is the file as the picture sees it; its position is kept.
    """
    if picture.format == "TIFF":
        return 1  # Pillow turns these while loading, and has exchanged the sides already
    exif = picture.info.get("exif")
    if exif is None and picture.format == "PNG":
        exif = _late_exif(stream)
    return exif_orientation(exif) if isinstance(exif, bytes) else 1


def exif_orientation(exif: bytes) -> int:
    """Orientation tag (0x0112) of the first image file directory, 1 to 8; 1 where it cannot be read.

    Layout: TIFF 6.0 section 2, as used by EXIF 2.3. Read here rather than by Pillow because damaged EXIF must
    cost no picture and no warning.
    """
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    order = {b"II": "<", b"MM": ">"}.get(exif[:2], "")
    try:
        return _orientation_tag(exif, order) if order else 1
    except struct.error:
        return 1


def check_png(data: bytes) -> None:
    """Check the CRC of every chunk: a damaged PNG often inflates without an error, to wrong pixels.

    Does nothing for other formats. Bytes after ``IEND`` are not looked at. PNG, third edition, 5.3 and 5.5.

    Raises:
        UnusableSampleError: ``truncated`` or ``decoder-error``.
    """
    if not data.startswith(_PNG_SIGNATURE):
        return
    view = memoryview(data)
    for kind, start, length in _png_chunks(BytesIO(data)):
        end = start + length
        if end + 4 > len(data):
            raise refused("truncated", f"PNG chunk {kind!r} ends at byte {end + 4}, the file at {len(data)}")
        if zlib.crc32(view[start - 4 : end]) != int.from_bytes(view[end : end + 4], "big"):
            raise refused("decoder-error", f"PNG chunk {kind!r} at byte {start - 8} fails its CRC")
        if kind == b"IEND":
            return
    raise refused("truncated", f"PNG without an end chunk, {len(data)} bytes")


@contextmanager
def refusing(stream: BinaryIO) -> Iterator[None]:
    """Turn whatever a picture library raises over ``stream`` into an ``UnusableSampleError`` with a cause.

    Errors of this package and ``MemoryError`` pass through.
    """
    try:
        yield
    except (LatentcacheError, MemoryError):
        raise
    except Exception as error:
        # On damaged files Pillow raises OSError, SyntaxError, RuntimeError, ValueError, struct.error, ...
        raise refused(_cause(error, stream), _detail(error, stream)) from error


def refused(cause: str, detail: str) -> UnusableSampleError:
    """The error for one cause word."""
    return UnusableSampleError(detail, fix=hint_for(cause), slug=cause)


def _hush() -> None:
    """Ignore warnings issued inside Pillow, from now on, in this process.

    ``warnings.catch_warnings`` is not safe in threads; a filter that is put in front and stays there is.
    """
    if list(warnings.filters[:1]) != [_QUIET]:
        warnings.filterwarnings("ignore", module=_INSIDE_PILLOW)


def _orientation_tag(exif: bytes, order: str) -> int:
    """The tag's value in a block of one byte order.

    Raises:
        struct.error: The block ends too soon.
    """
    (directory,) = struct.unpack_from(f"{order}I", exif, 4)
    (count,) = struct.unpack_from(f"{order}H", exif, directory)
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind = struct.unpack_from(f"{order}HH", exif, entry)
        if tag == _ORIENTATION_TAG:
            (value,) = struct.unpack_from(order + {1: "B", 4: "I"}.get(kind, "H"), exif, entry + 8)
            return int(value) if 1 <= value <= 8 else 1
    return 1


def _png_chunks(stream: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """Type, offset of the data and length of the data of every chunk, as the headers claim."""
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
    """The eXIf chunk of a PNG that keeps it behind the pixels, where Pillow sees it only after decoding."""
    before = stream.tell()
    try:
        for kind, start, length in _png_chunks(stream):
            if kind == b"eXIf":
                stream.seek(start)
                return stream.read(length)
        return None
    finally:
        stream.seek(before)


def _cause(error: Exception, stream: BinaryIO) -> str:
    """The cause word for an error that a picture library raised over ``stream``."""
    message = str(error)
    if isinstance(error, Image.DecompressionBombError):
        return "bomb"
    if isinstance(error, OSError) and error.errno:
        return cause_of(error)  # the file system's, not Pillow's
    if "MAX_TEXT_" in message:
        return "png-metadata-too-large"
    if any(word in message.lower() for word in _TRUNCATED_WORDS):
        return "truncated"
    return _cause_of_bytes(stream)


def _detail(error: Exception, stream: BinaryIO) -> str:
    """The message of a picture library, or the first bytes where it is the address of a buffer."""
    if not isinstance(error, UnidentifiedImageError):
        return f"it cannot be decoded: {error or type(error).__name__}"
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    return f"no decoder takes it: it has {size} bytes and begins with {stream.read(_TAIL_BYTES)!r}"


def _cause_of_bytes(stream: BinaryIO) -> str:
    """What the first and last bytes say: ``truncated``, ``decoder-error``, or what it is instead of a picture."""
    stream.seek(0)
    cause = sniff_cause(stream.read(_HEAD_BYTES))
    return "decoder-error" if cause == "truncated" and not _cut_short(stream) else cause


def _cut_short(stream: BinaryIO) -> bool:
    """Whether a picture file lacks its end, as far as its format tells."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(size - _TAIL_BYTES, 0))
    tail = stream.read()
    stream.seek(0)
    head = stream.read(_TAIL_BYTES)
    if size < _TAIL_BYTES:
        return True
    if head.startswith(b"\xff\xd8"):
        return b"\xff\xd9" not in tail
    if head.startswith(_PNG_SIGNATURE):
        return b"IEND" not in tail
    if head.startswith(b"GIF8"):
        return not tail.endswith(b";")
    if head.startswith(b"RIFF"):
        return int.from_bytes(head[4:8], "little") + 8 > size
    if head.startswith(b"BM"):
        return int.from_bytes(head[2:6], "little") > size
    return _tiff_end(stream, head) > size if head.startswith((b"II", b"MM")) else _boxes_end(stream) > size


def _tiff_end(stream: BinaryIO, head: bytes) -> int:
    """Offset behind the first directory of a TIFF, as its header claims."""
    order: Literal["little", "big"] = "little" if head.startswith(b"II") else "big"
    directory = int.from_bytes(head[4:8], order)
    stream.seek(directory)
    return directory + 2 + 12 * int.from_bytes(stream.read(2), order) + 4


def _boxes_end(stream: BinaryIO) -> int:
    """Offset behind the last box of an ISO media file (ISO/IEC 14496-12, 4.2), as the boxes claim."""
    position = 0
    for _ in range(_MAX_BOXES):
        stream.seek(position)
        header = stream.read(16)
        length = int.from_bytes(header[:4], "big")
        if length == 1:
            length = int.from_bytes(header[8:16], "big")
        if len(header) < 8 or length < 8:
            return position + len(header)
        position += length
        if position > _FAR:
            return position
    return position
