"""Causes of inputs that are not used, each with its fix and the reason words of programs. Words are stable."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from latentcache.errors import UnusableSampleError, count_of
from latentcache.fields.table import Rejected


class Cause(NamedTuple):
    """One cause, the reason words that mean it, and what the user can do: one line."""

    name: str
    words: tuple[str, ...]
    fix: str


#: Each cause with its reason words, and below it the fix. Every word that this package puts on a file or a record is
#: here; the detail of an item says the rest.
_TABLE = """
damaged file: truncated empty zeros decoder-error no-video frames-missing tar-truncated tar-damaged rows-damaged
    download, export or save the file again, or move it elsewhere
web page with the name of an image: html
    download the image itself
Git LFS pointer: git-lfs
    run `git lfs pull` in the data folder
unsupported image format: svg heic-needs-plugin jxl-needs-plugin eps pdf unknown float
    convert it to PNG or JPEG with 8 or 16 bits
unsupported kind of file: unused table-unused unread-form compressed
    if you need it, unpack it, or save it as PNG, JPEG, JSON lines or parquet
size that is not allowed: too-small too-few-pixels extreme-aspect too-many-pixels bomb
    resize or crop it, or change --min-pixels, --max-pixels or --bucket
too large: too-large caption-too-large line-too-long text-too-large png-metadata-too-large
    make it smaller or split it; --text-lines reads each line as a text
too large for the memory: out-of-memory
    use smaller images or records, a smaller --resolution, or more memory with --host-memory
no regular file, or nothing there: not-regular symlink-loop not-found
    put the file there, or take the name out of DATA
outside DATA: outside-root
    copy it into DATA and name it relative to DATA, or follow the link with --follow-links
not readable: permission io-error
    give yourself read permission (`chmod -R u+rX`), check the disk, and run again
changed while it was read: changing
    run again when no program writes the file
unclear column or member: two-images no-image no-image-column no-caption-column text-column member-unused
    name it with --image-column or --caption-column; members of one sample are KEY.jpg and KEY.txt
text with wrong characters: caption-encoding caption-unicode not-utf8 record-unicode reserved-character
    save it as UTF-8 (`iconv -t UTF-8 -f WINDOWS-1252`), without NUL, half surrogate pairs, U+FDD0 to U+FDD2
wrong line or field: caption-json table-row duplicate-row no-json record-field record-empty role-order no-answer
    correct this line or field, or leave it out
no data for training: not-records not-for-sft
    write one JSON object per line: text, messages, or a prompt with its completion
data elsewhere: shard-missing
    download it (`hf download --repo-type dataset NAME --local-dir FOLDER`), or save a script's output
chat template that does not fit: template template-rewrites no-template not-rendered
    give another one with --chat-template FILE: trl.chat_template_utils.get_training_chat_template has one
PyAV is not installed: needs-pyav
    `pip install 'latentcache[video]'` reads videos
frames of a video: no-frame-count too-few-frames
    give --frames N to encode videos, or a smaller N; control images are of images only
values that cannot be stored: non-finite storage-overflow prompt-not-stored
    use --storage-dtype bfloat16 or --compute-dtype float32, or leave the input out
ends the process that reads it: decoder-crash encoder-crash
    save it again, or move it elsewhere; --retry-failed tries it once more
hidden or set aside: hidden cache-folder nested-link
    rename it to use it; names that begin with a dot, and caches, are not data
caption that is not used: caption-conflict caption-unused sidecar-unused
    keep one caption for each image, with its name; a metadata table decides alone
lines of captions that are not used: caption-lines
    give --caption-lines all to use each line as a caption, or first to leave the others out
image without a caption: no-caption
    write a caption file for it, or give --default-caption TEXT
caption that is cut or left out: caption-cut captions-left
    shorten it, or raise --text-length or --caption-variants
other split: split-unused split-read
    choose the split that is read with --split NAME
no row in a table: unlisted nested-table
    add a row to the table to use it, or give --layout imagefolder to read the table
mask or control image: mask control mask-scaled control-scaled
    give both images one name and one size, or leave them out with --masks none or --controls none
not in exactly one set: outside-sets in-two-sets reg-unused
    move it into one of the sets, or give --layout folder; more repeats use more regularization images
setting of a configuration: config config-ignored
    change it in the file, or give the option of `latentcache build`; settings of training have no effect here
texts beside records: text-unused
    give the text files a folder of their own to use them
"""
CAUSES = tuple(
    Cause(head.partition(": ")[0], tuple(head.partition(": ")[2].split()), fix.strip())
    for head, fix in zip(*[iter(_TABLE.strip().splitlines())] * 2, strict=True)
)
#: Reason word -> the fix of its cause.
HINTS: Mapping[str, str] = {word: cause.fix for cause in CAUSES for word in cause.words}
#: Notes of one reason that are given one by one; the rest is one note with a count.
_NOTES_EACH = 100
_GENERIC = "look at the file; replace it, or move it elsewhere"

_ERRNO_CAUSES: Mapping[int, str] = {
    errno.ENOENT: "not-found",
    errno.ENOTDIR: "not-found",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.ELOOP: "symlink-loop",
    errno.ENXIO: "not-regular",
    errno.ENODEV: "not-regular",
    errno.EISDIR: "not-regular",
}
_AVIF_BRANDS = frozenset((b"avif", b"avis"))
_HEIF_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"))
#: Major brands of ISO media files that are images; others are videos.
IMAGE_BRANDS = _HEIF_BRANDS | _AVIF_BRANDS
#: First bytes -> reason, for formats that are not supported. JPEG XL has a bare and a boxed form (ISO/IEC 18181-2).
_MAGIC: Mapping[bytes, str] = {
    b"version https://git-lfs": "git-lfs",
    b"\xff\x0a": "jxl-needs-plugin",
    b"\x00\x00\x00\x0cJXL \r\n\x87\n": "jxl-needs-plugin",
    b"%!PS": "eps",
    b"\xc5\xd0\xd3\xc6": "eps",
}
#: First bytes of supported formats: a file that begins so and cannot be decoded is damaged.
_READ_MAGIC = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")


def hint_for(cause: str) -> str:
    """Return the hint for a reason, one line; a general sentence for a word that is not in the table."""
    return HINTS.get(cause, _GENERIC)


def cause_of(error: OSError) -> str:
    """The reason word of an operating system error, by default ``io-error``."""
    return _ERRNO_CAUSES.get(error.errno or 0, "io-error")


def sniff_cause(data: bytes) -> str:
    """Find the reason word for bytes that no decoder took.

    ``truncated`` means that they begin like a supported format; ``unknown`` that they begin like nothing known.
    """
    if not data:
        return "empty"
    if data[0] == 0 and not data.strip(b"\0"):
        return "zeros"
    for magic, cause in _MAGIC.items():
        if data.startswith(magic):
            return cause
    if data[4:8] == b"ftyp":  # ISO/IEC 14496-12: brands of four bytes after major and version
        brands = {data[8:12], *(data[i : i + 4] for i in range(16, min(int.from_bytes(data[:4], "big"), 256), 4))}
        other = "heic-needs-plugin" if brands & _HEIF_BRANDS else "unknown"
        return "truncated" if brands & _AVIF_BRANDS else other
    if data.startswith(_READ_MAGIC) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        return "truncated"
    if b"%PDF-" in data[:1024]:
        return "pdf"
    head = data[:4096].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if head.startswith((b"<!doctype html", b"<head", b"<body")) or (head.startswith(b"<") and b"<html" in head):
        return "html"
    return "svg" if head.startswith(b"<") and (b"<svg" in head or b"<!doctype svg" in head) else "unknown"


def fault(cause: str, detail: str, where: Path | str = "") -> UnusableSampleError:
    """The error of one file or record, with the hint of its reason; ``where`` is the file, or the field."""
    return UnusableSampleError(detail, where=str(where), fix=hint_for(cause), slug=cause)


def rejected(name: str, cause: str, detail: str = "", *, count: int = 1) -> Rejected:
    """A rejected file, or a note, with the hint of its reason."""
    return Rejected(name=name, reason=cause, detail=detail, hint=hint_for(cause), count=count)


def counted(name: str, cause: str, count: int, words: str, *, first: str = "") -> Rejected:
    """A note that counts files: ``words`` is a plural such as ``images have no caption``; it names the ``first``."""
    return rejected(name, cause, f"{count_of(count, words)}, the first is {first or name}", count=count)


def as_rejected(name: str, error: UnusableSampleError, **more: Any) -> Rejected:
    """The same, from the exception that a read or a decode raised; ``more``: see ``Rejected``."""
    detail = "; ".join(part for part in (error.what, error.why) if part)
    return Rejected(name=name, reason=error.slug, detail=detail, hint=error.fix, **more)


def in_order(items: Sequence[Rejected]) -> tuple[Rejected, ...]:
    """In the byte order of names, then by line."""
    return tuple(sorted(items, key=lambda item: (os.fsencode(item.name), item.line)))


class Notes:
    """Notes, or rejections, by reason: the first ones one by one, the rest counted."""

    def __init__(self, most: int = _NOTES_EACH) -> None:
        self._most = most
        self._first: dict[str, list[Rejected]] = defaultdict(list)
        self._more: dict[str, tuple[Rejected, int]] = {}
        self._counts: dict[tuple[str, str], tuple[str, int]] = {}

    def add(self, *items: Rejected) -> None:
        """Further notes."""
        for item in items:
            if len(kept := self._first[item.reason]) < self._most:
                kept.append(item)
            else:
                first, count = self._more.get(item.reason, (item, 0))
                self._more[item.reason] = first, count + item.count

    def count(self, cause: str, words: str, names: Iterable[str]) -> None:
        """Count files in one note for each cause and its words."""
        for name in names:
            first, count = self._counts.get((cause, words), (name, 0))
            self._counts[cause, words] = first, count + 1

    def all(self) -> tuple[Rejected, ...]:
        """In the byte order of names; those that were only counted at the end."""
        notes = [item for kept in self._first.values() for item in kept]
        notes += [counted(first, cause, count, words) for (cause, words), (first, count) in self._counts.items()]
        more = [
            replace(first, detail=f"{count} more, such as {first.label}: {first.detail}", count=count)
            for first, count in self._more.values()
        ]
        return (*in_order(notes), *more)


class Findings:
    """Rejections and notes of a scan."""

    def __init__(self) -> None:
        self.rejected = list[Rejected]()
        self.notes = Notes()

    def reject(self, name: str, error: UnusableSampleError, **more: Any) -> None:
        """Reject a file or a part of it; ``more``: see ``Rejected``."""
        self.rejected.append(as_rejected(name, error, **more))

    def names(self) -> set[str]:
        """Names that are rejected or noted so far."""
        return {item.name for item in (*self.rejected, *self.notes.all())}
