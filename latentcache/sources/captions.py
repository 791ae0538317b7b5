"""Captions: files beside an image, and which texts can be a caption.

``<stem>.txt`` comes before ``<stem>.caption``. UTF-8 with or without BOM, UTF-16 with BOM; nothing is guessed. A
caption is exactly the text of the file (surrounding blanks removed, Windows line ends as Unix ones), or the sample is
rejected with the offset of the fault.
"""

from __future__ import annotations

import re

from latentcache.errors import UnusableSampleError
from latentcache.identity.content import content_hash
from latentcache.identity.stat import StatMemo
from latentcache.sources.causes import hint_for
from latentcache.sources.lines import UTF16_BOMS
from latentcache.sources.reading import read_source

#: Extensions of caption files beside an image; the first one wins.
CAPTION_EXTENSIONS = (".txt", ".caption")
#: Longest caption file, in bytes.
MAX_CAPTION_BYTES = 1 << 20
_NEVER_IN_CAPTIONS = re.compile("[\0\ud800-\udfff]")


def read_caption(root: str, file: str, *, outside: bool = False) -> tuple[str, bytes, StatMemo | None]:
    """Text, content hash and memo of one caption file; a file without bytes is an empty caption without a memo.

    Args:
        root: The data folder.
        file: Name below it.
        outside: True if it is a link to a place outside the data folder.

    Raises:
        UnusableSampleError: ``caption-encoding``, ``caption-unicode``, ``caption-too-large``, ``outside-root``, or a
            reason of ``reading.read_source``; ``what`` names the caption file.
    """
    path = f"{root}/{file}"
    if outside:
        raise _unusable("outside-root", path, "it is a link to a place outside the data folder")
    try:
        data, memo = read_source(path, max_bytes=MAX_CAPTION_BYTES)
    except UnusableSampleError as error:
        if error.slug == "empty":
            return "", content_hash(b""), None
        cause = "caption-too-large" if error.slug == "too-large" else error.slug
        raise _unusable(cause, path, error.what) from error
    return decode_caption(data, path), content_hash(data), memo


def decode_caption(data: bytes, name: str) -> str:
    """Bytes of a caption file to text; ``name`` is for the message.

    Raises:
        UnusableSampleError: ``caption-encoding`` with the byte offset, ``caption-unicode`` with the character.
    """
    encoding = "utf-16" if data.startswith(UTF16_BOMS) else "utf-8"
    try:
        text = data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise _undecodable(data, encoding, error, name) from error
    fault = caption_fault(text)
    if fault:
        raise _unusable("caption-unicode", name, fault)
    return text.strip().replace("\r\n", "\n")


def caption_fault(text: str) -> str:
    """Why a text is not a caption; empty if it is one."""
    found = _NEVER_IN_CAPTIONS.search(text)
    if found is None:
        return ""
    what = "a NUL" if found[0] == "\0" else f"half a surrogate pair (U+{ord(found[0]):04X})"
    return f"{what} at character {found.start()}"


def _undecodable(data: bytes, encoding: str, error: UnicodeDecodeError, name: str) -> UnusableSampleError:
    """Half a surrogate pair that was written out is a fault of the text; anything else one of the encoding."""
    try:
        fault = caption_fault(data.decode(encoding, "surrogatepass"))
    except UnicodeDecodeError:
        fault = ""
    if fault:
        return _unusable("caption-unicode", name, fault)
    found = f"found byte 0x{data[error.start]:02x} at offset {error.start}"
    return _unusable("caption-encoding", name, f"expected {encoding.upper()}, {found}")


def _unusable(cause: str, path: str, what: str) -> UnusableSampleError:
    file = path.rpartition("/")[2]
    return UnusableSampleError(f"caption file {file}: {what}", where=path, fix=hint_for(cause), slug=cause)
