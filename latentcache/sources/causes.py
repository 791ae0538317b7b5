"""Table of reason words for inputs that are not used, each with a hint on what to do about it.

Every word that the package puts on a file or a record is in :data:`HINTS`. Words are stable; hints may get better.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentcache.errors import UnusableSampleError, count_of
from latentcache.fields.table import Rejected

#: Reason word -> what the user can do, one line.
HINTS: Mapping[str, str] = {
    # the bytes are not an image that can be read
    "truncated": "the file is cut short or damaged: download or export it again",
    "empty": "the file has no bytes: download or export it again, or remove it",
    "zeros": "the file holds only zero bytes, as after a failed copy: copy or download it again",
    "html": "this is a web page with the name of an image: download the image itself",
    "git-lfs": "this is a Git LFS pointer, not the image: run `git lfs pull` in the data folder",
    "svg": "vector images have no pixels: export it as PNG",
    "heic-needs-plugin": "HEIC is not supported: convert it to JPEG or PNG, e.g. `heif-convert in.heic out.png`",
    "jxl-needs-plugin": "JPEG XL is not supported: convert it, e.g. `djxl in.jxl out.png`",
    "eps": "PostScript is a program and is not run: export it as PNG",
    "pdf": "PDF is not an image format: export its pages as PNG",
    "unknown": "unknown image format: convert it to PNG or JPEG, or remove it",
    # an image that cannot be trained on as it is
    "float": "scale the values to 0..255 and save it as an 8-bit or 16-bit image",
    "too-small": "use a larger image, or remove it",
    "too-few-pixels": "use a larger image, or a smaller --min-pixels",
    "extreme-aspect": "crop it nearer to a square, or add a --bucket of its shape",
    "too-many-pixels": "make it smaller, or raise --max-pixels",
    "bomb": "its header claims too many pixels to be trusted: make it smaller, or remove it",
    "too-large": "the file is larger than 1 GiB: make it smaller, or remove it",
    "png-metadata-too-large": "strip its metadata, e.g. `exiftool -all= FILE`, or save it again",
    # the file system
    "not-regular": "this is not a regular file (a pipe, socket, device or folder): remove it from the data folder",
    "symlink-loop": "the link leads back to itself or to a folder above it: remove the link",
    "not-found": "put the file there, or remove what points to it",
    "outside-root": "copy it into the data folder and name it relative to it, or follow the link with --follow-links",
    "permission": "give yourself read permission, e.g. with `chmod -R u+rX`",
    "io-error": "the file system cannot read it: check the path and the disk, then run again",
    "changing": "another program is writing the file: run again when it has finished",
    # archives
    **dict.fromkeys(("tar-truncated", "tar-damaged"), "members from there on are lost: write the tar again"),
    "rows-damaged": "download or export the file again",
    "arrow-compressed": "save it again with `datasets`: Dataset.from_file(FILE).save_to_disk(FOLDER)",
    "two-images": "say which one is the image, e.g. --image-column jpg, or give each a key of its own",
    "no-image": "remove the row, or save the data set with its images inside, as save_to_disk and push_to_hub do",
    "no-image-column": "name the column of images: --image-column NAME",
    "no-caption-column": "name a column of texts: --caption-column NAME",
    # captions
    "caption-encoding": "save the caption as UTF-8, e.g. `iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW`",
    "caption-unicode": "remove the NUL or the half surrogate pair from the caption",
    "caption-json": "correct the JSON file beside the image, or remove it",
    "caption-too-large": "a caption has at most 1 MiB: shorten it, or remove the file",
    "table-row": "correct this row of the table",
    # records
    "no-json": "correct or remove it",
    "not-utf8": "save it as UTF-8, e.g. with `iconv -t UTF-8 -f WINDOWS-1252`, or -f UTF-16",
    "line-too-long": "a record has at most 64 MiB: split it into several",
    "text-too-large": "a text has at most 64 MiB: use --text-lines for one document per line, or split the file",
    "record-field": "correct this field, or remove the record",
    "record-empty": "the record has no content: remove it",
    "record-unicode": "remove the half surrogate pair from the text",
    "role-order": "put the turns into the order of the conversation, or remove the record",
    "no-answer": "end the conversation with a turn of the assistant, or remove the record",
    "compressed": "unpack it first, e.g. with `gunzip -k` or `zstd -d`",
    "not-records": "expected one JSON object per line, or one list of objects",
    "hub-dataset": "download it, e.g. `hf download --repo-type dataset NAME --local-dir FOLDER`, and give its folder",
    "script-dataset": "scripts are not run: save the output as JSON lines and name that file as file_name",
    "unread-form": "save it as JSON lines or parquet, and name that file in dataset_info.json",
    "not-for-sft": "this form of data is not supported: leave it out, or write it as prompts with answers",
    # tokenization
    "template": "correct the record, or give another template with --chat-template FILE, such as that of "
    "trl.chat_template_utils.get_training_chat_template(tokenizer)",
    "template-rewrites": "give a template that marks loss tokens with {% generation %}: --chat-template FILE; "
    "trl.chat_template_utils.get_training_chat_template(tokenizer) has one for many models",
    "no-template": "give a template with --chat-template FILE",
    "reserved-character": "remove the characters U+FDD0 to U+FDD2 from the text: Unicode keeps them for programs",
    "record-too-large": "split the record into several, or give more memory with --host-memory",
    "tokenizer-crash": "it ends the process that tokenizes it: remove the record; --retry-failed tries it once more",
    # videos
    "needs-pyav": "PyAV reads videos: `pip install 'latentcache[video]'`",
    "no-video": "the file has no video frames: replace it, or remove it",
    "no-frame-count": "give --frames N to encode videos too; control images are of images only",
    "too-few-frames": "use a longer video, or add a smaller --frames",
    "frames-missing": "write the video again, e.g. `ffmpeg -i IN -c:v libx264 -crf 15 OUT.mp4`",
    # the encoder
    "non-finite": "the model gives NaN or infinity for it, also in float32: remove the image",
    "storage-overflow": "its latents do not fit the storage type: use --storage-dtype bfloat16 or float32",
    "out-of-memory": "it does not fit into memory alone: use a smaller image or --resolution",
    "decoder-crash": "it ends the process that decodes it: save it again; --retry-failed tries it once more",
    "encoder-crash": "it ends the process that encodes it: remove it; --retry-failed tries it once more",
    "decoder-error": "the decoder failed on it: open it in an editor and save it again",
    # notes: nothing is rejected
    "not-rendered": "give a template that writes it: --chat-template FILE; the tokens lack it",
    "hidden": "names that begin with a dot are not used: rename it to use it",
    "cache-folder": "a cache inside the data folder is not read as data",
    "nested-link": "links inside a linked folder are not followed: the files are used under their own names",
    "caption-conflict": "remove one of the two caption files",
    "caption-lines": "give --caption-lines all to use each line as a caption, or first to leave the others out",
    "caption-unused": "no image beside it has this name: rename it, or remove it",
    "shard-missing": "the names say that there are more files: download the missing ones",
    "split-unused": "read another split with --split NAME",
    "member-unused": "members are read by what follows the first dot of their names: name them KEY.jpg, KEY.txt",
    "text-column": "name the column of captions to use it: --caption-column NAME",
    "caption-cut": "shorten the caption; --text-length N raises the limit of a pipeline that has no fixed length",
    "captions-left": "a larger --caption-variants stores all of them",
    "prompt-not-stored": "add --text-compute-dtype float32, or give another prompt",
    "unlisted": "add a row to the table to use it",
    "nested-table": "give --layout imagefolder to read it, or remove it",
    "reg-unused": "raise the repeats of the training images to use more of them",
    "no-caption": "write a caption file for it, or give --default-caption TEXT",
    "mask-scaled": "nothing, if image and mask show the same; else save it in the size of its image",
    "control-scaled": "nothing, if both images show the same; else save it in the size of its image",
    "mask": "name it as its image, or leave masks out with --masks none",
    "control": "name it as its image, or leave control images out with --controls none",
    "outside-sets": "move it into one of the sets to use it, or give --layout folder",
    "config": "change it in the file, or take it as it is here",
    "config-ignored": "nothing: they are for training, or for the trainer's own cache",
    "config-asks": "give the option that is named, if the entries are to be made so",
    "in-two-sets": "keep it in one set, or give both sets the same captions",
    "duplicate-row": "remove one of the rows",
    "sidecar-unused": "the table decides the captions: remove it to use the files beside the images",
    "text-unused": "the folder has records in JSON or parquet: give the text files their own folder to use them",
    "table-unused": "this format is not supported: save it as JSON lines or parquet",
    "all-samples": "num_samples draws at random and is not followed: all records are used",
    "unused": "no reader takes these files: convert them if they are data",
}
#: Notes of one reason that are given one by one; the rest is one note with a count.
_NOTES_EACH = 100
_GENERIC = "look at the file; replace or remove it"

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
    """The reason word of an error of the operating system; ``io-error`` if there is no better one."""
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


def counted(name: str, cause: str, count: int, what: str, *, first: str = "") -> Rejected:
    """A note on several files: ``what`` is said of ``count`` of them, and the first is ``first``, or ``name``."""
    return rejected(name, cause, f"{count_of(count, what)}, the first is {first or name}", count=count)


def unused_lines(found: Sequence[tuple[str, int]]) -> Iterator[Rejected]:
    """One note on captions (file, first line that is not used) of which only the first line is used."""
    if found:
        name, line = found[0]
        words = "captions have lines that are not used"
        note = counted(name, "caption-lines", len(found), words, first=f"{name}:{line}")
        yield replace(note, line=line)


def as_rejected(name: str, error: UnusableSampleError, **more: Any) -> Rejected:
    """The same, from the exception that a read or a decode raised; ``more``: see ``Rejected``."""
    detail = "; ".join(part for part in (error.what, error.why) if part)
    return Rejected(name=name, reason=error.slug, detail=detail, hint=error.fix, **more)


def in_order(items: Sequence[Rejected]) -> tuple[Rejected, ...]:
    """In the byte order of names."""
    return tuple(sorted(items, key=lambda item: os.fsencode(item.name)))


class Notes:
    """Notes, or rejections, by reason: the first ones one by one, the rest counted."""

    def __init__(self, each: int = _NOTES_EACH) -> None:
        self._each = each
        self._first: dict[str, list[Rejected]] = defaultdict(list)
        self._more: dict[str, tuple[Rejected, int]] = {}

    def add(self, *items: Rejected) -> None:
        """Further notes."""
        for item in items:
            if len(kept := self._first[item.reason]) < self._each:
                kept.append(item)
            else:
                first, count = self._more.get(item.reason, (item, 0))
                self._more[item.reason] = first, count + item.count

    def all(self) -> tuple[Rejected, ...]:
        """In the byte order of names; those that were only counted at the end."""
        more = [
            replace(first, detail=f"{count} more, such as {first.label}: {first.detail}", count=count)
            for first, count in self._more.values()
        ]
        return (*in_order([item for kept in self._first.values() for item in kept]), *more)


class Findings:
    """What a scan rejects and notes."""

    def __init__(self) -> None:
        self.rejected, self.notes = list[Rejected](), Notes()

    def reject(self, name: str, error: UnusableSampleError, **more: Any) -> None:
        """Reject a file or a part of it; ``more``: see ``Rejected``."""
        self.rejected.append(as_rejected(name, error, **more))

    def names(self) -> set[str]:
        """Names that are rejected or noted so far."""
        return {item.name for item in (*self.rejected, *self.notes.all())}
