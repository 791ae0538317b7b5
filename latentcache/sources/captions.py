"""What a picture is called: captions in files beside it, and when a text can be a caption.

Decides the order ``<stem>.txt`` before ``<stem>.caption`` and the decoding: UTF-8 with or without BOM, UTF-16
with BOM, nothing guessed. Guarantee: a caption is either exactly what the file says (without surrounding blanks,
Windows line ends as Unix ones) or the sample is refused with the offset of what is wrong; no caption file means
no caption.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from latentcache.errors import UnusableSampleError
from latentcache.sources.causes import hint_for, refusal
from latentcache.sources.reading import read_source
from latentcache.sources.sample import Refusal
from latentcache.sources.sorting import CAPTION_EXTENSIONS
from latentcache.sources.walk import Pictures, Walk

#: Longest caption file, in bytes.
MAX_CAPTION_BYTES = 1 << 20
_UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NEVER_IN_CAPTIONS = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """The text of a caption file, and a note when another file says something else."""

    text: str
    note: Refusal | None = None


def sidecars(picture: str, walk: Walk | Pictures) -> tuple[str, ...]:
    """The caption files beside a picture, in the order in which they count; ``picture`` is its name."""
    stem = picture[: picture.rfind(".")]
    texts = walk.texts
    return tuple([texts[stem + ending] for ending in CAPTION_EXTENSIONS if stem + ending in texts])


def read_caption(files: tuple[str, ...], walk: Walk | Pictures) -> Caption:
    """The caption in the first of these files.

    Args:
        files: Of one picture, as :func:`sidecars` gives them; none means an empty caption.
        walk: The walk they are from, or the part of it.

    Raises:
        UnusableSampleError: ``caption-encoding``, ``caption-unicode``, ``caption-too-large``, ``outside-root``, or
            a cause of ``reading.read_source``; ``what`` names the caption file.
    """
    if not files:
        return Caption(text="")
    text = _read(files[0], walk)
    if len(files) == 1:
        return Caption(text=text)
    return Caption(text=text, note=_conflict(files, text, walk))


def decode_caption(data: bytes, name: str) -> str:
    """Bytes of a caption file to text.

    Args:
        data: All bytes of the file.
        name: For the message.

    Raises:
        UnusableSampleError: ``caption-encoding`` with the byte offset, ``caption-unicode`` with the character.
    """
    encoding = "utf-16" if data.startswith(_UTF16_BOMS) else "utf-8"
    try:
        text = data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise _undecodable(data, encoding, error, name) from error
    fault = caption_fault(text)
    if fault:
        raise _refused("caption-unicode", name, fault)
    return text.strip().replace("\r\n", "\n")


def caption_fault(text: str) -> str:
    """What keeps a text from being a caption, in words; empty when nothing does."""
    found = _NEVER_IN_CAPTIONS.search(text)
    if found is None:
        return ""
    what = "a NUL" if found[0] == "\0" else f"half a surrogate pair (U+{ord(found[0]):04X})"
    return f"{what} at character {found.start()}"


def _read(file: str, walk: Walk | Pictures) -> str:
    """One caption file, decoded. A file without bytes is an empty caption."""
    path = f"{walk.root}/{file}"
    if file in walk.outside_texts:
        raise _refused("outside-root", path, "it is a link to a place outside the data folder")
    try:
        data, _ = read_source(path, max_bytes=MAX_CAPTION_BYTES)
    except UnusableSampleError as error:
        if error.slug == "empty":
            return ""
        cause = "caption-too-large" if error.slug == "too-large" else error.slug
        raise _refused(cause, path, error.what) from error
    return decode_caption(data, path)


def _conflict(files: tuple[str, ...], text: str, walk: Walk | Pictures) -> Refusal | None:
    """A note on the second caption file when it is not the same."""
    try:
        other: str | None = _read(files[1], walk)
    except UnusableSampleError:
        other = None
    if other == text:
        return None
    says = "cannot be read" if other is None else "says something else"
    return refusal(files[1], "caption-conflict", f"{files[0]} is used; {files[1]} {says}")


def _undecodable(data: bytes, encoding: str, error: UnicodeDecodeError, name: str) -> UnusableSampleError:
    """Half a surrogate pair that was written out is a fault of the text; anything else one of the encoding."""
    try:
        fault = caption_fault(data.decode(encoding, "surrogatepass"))
    except UnicodeDecodeError:
        fault = ""
    if fault:
        return _refused("caption-unicode", name, fault)
    found = f"found byte 0x{data[error.start]:02x} at offset {error.start}"
    return _refused("caption-encoding", name, f"expected {encoding.upper()}, {found}")


def _refused(cause: str, path: str, what: str) -> UnusableSampleError:
    file = path.rpartition("/")[2]
    return UnusableSampleError(f"caption file {file}: {what}", where=path, fix=hint_for(cause), slug=cause)
