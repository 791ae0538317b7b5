"""Captions: files beside an image, and which texts can be a caption.

The layout says which file belongs to which image (``layout.CaptionRule``). A ``.json`` file holds the caption
as ``caption``, ``text`` or ``prompt``: the first of these names counts. Files are UTF-8 with or without BOM, or
UTF-16 with BOM; no encoding is guessed. A caption is exactly the text of the file, without surrounding blanks and
with Unix line ends. If it cannot be decoded, the sample is rejected with the offset of the fault.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.captions import BETWEEN
from latentcache.fields.strings import Strings
from latentcache.fields.table import Input
from latentcache.identity.content import HASH_BYTES, StatMemo, content_hash
from latentcache.sources.causes import Findings, fault
from latentcache.sources.formats.files import UTF16_BOMS, parse_json, read_source, shown
from latentcache.sources.known import KnownFiles, Units, hash_rows, take_rows
from latentcache.sources.layout import CAPTION_COLUMNS, CaptionRule

#: Longest caption file, in bytes.
MAX_CAPTION_BYTES = 1 << 20
_BLOCK = 1 << 14
_LINE_END = 2
_EMPTY = np.frombuffer(content_hash(b""), dtype=np.uint8)
_NEVER_IN_CAPTIONS = re.compile("[\0\ud800-\udfff]")


def read_captions(
    root: Path, held: KnownFiles, rules: Sequence[CaptionRule], units: Units, findings: Findings
) -> tuple[Input, NDArray[np.bool_]]:
    """The captions of samples, from the snapshot, their files, their tables or their sets.

    Returns:
        The captions of usable samples, and (n,) False for the others: they are rejected for their caption files.
    """
    file, owner, lines = units["caption"].astype(np.int32), units["owner"], units["line"]
    beside = np.where(units["which"] >= 0, file, -1)
    known = np.maximum(held.rows_of("caption", beside), units["known"])
    good = np.ones(len(file), dtype=np.bool_)
    old = held.table.inputs["caption"] if held.table is not None and (known >= 0).any() else None
    line = lines if lines.any() else None
    if old is not None and old.text is not None and held.is_whole(known):
        return Input(content=np.asarray(old.content), file=file, text=old.text, line=line), good
    content = _contents_without_text(rules, units)
    if old is not None:
        content[known >= 0] = take_rows(old.content, known[known >= 0])
    with_fallback = [number for number, rule in enumerate(rules) if rule.text or rule.from_name or rule.bare]

    def texts_of(start: int) -> list[str]:
        block = slice(start, start + _BLOCK)
        texts = list[str](units["text"][block].tolist())
        is_new = known[block] < 0
        unread = start + np.flatnonzero(is_new & (beside[block] >= 0))
        for number, name in zip(unread.tolist(), held.names.take(beside[unread]), strict=True):
            try:
                text, digest, memo = read_caption(os.fspath(root), name)
                texts[number - start] = rules[owner[number]].formatted(text)
                if memo is not None:
                    held.remember(int(file[number]), digest, memo)
            except UnusableSampleError as error:
                good[number] = False
                findings.reject(held.names[int(units["image"][number])], error)
        for at in with_fallback:
            for number in np.flatnonzero((owner[block] == at) & is_new).tolist():
                image = held.names[int(units["image"][start + number])]
                texts[number] = texts[number] or rules[at].fallback(image)
        new = {start + at: text.encode() for at, text in enumerate(texts) if text}
        content[list(new)] = hash_rows(map(content_hash, new.values()))
        if old is not None and old.text is not None and not is_new.all():
            at_known = np.flatnonzero(~is_new)
            for number, text in zip(at_known.tolist(), old.text.take(known[block][at_known]), strict=True):
                texts[number] = text
        return texts

    text = Strings.of(chain.from_iterable(map(texts_of, range(0, len(file), _BLOCK))))
    if not good.all():
        rows = np.flatnonzero(good)
        line = None if line is None else line[good]
        content = content[rows]
        file = file[rows]
        text = text.select(rows)
    return Input(text=text, content=content, file=file, line=line), good


def _contents_without_text(rules: Sequence[CaptionRule], units: Units) -> NDArray[np.uint8]:
    """(n, 16) content of captions if they have no text: the empty caption, or zeros for no caption."""
    content = np.zeros((len(units), HASH_BYTES), dtype=np.uint8)
    by_choice = [number for number, rule in enumerate(rules) if rule.is_empty_by_choice]
    json_at = [(*rule.extensions, ".json").index(".json") for rule in rules] or [0]
    is_json = units["which"] == np.array(json_at)[units["owner"]]  # it may hold other things alone
    content[((units["caption"] >= 0) & ~is_json) | np.isin(units["owner"], by_choice)] = _EMPTY
    return content


def longer_files(held: KnownFiles, rules: Sequence[CaptionRule], units: Units, texts: Strings) -> list[str]:
    """Caption files that are longer than the first line, which alone is used; none of them is read."""
    added = np.array([len((rule.prefix + rule.suffix).encode()) for rule in rules] or [0])
    first = np.array([rule.lines == "first" for rule in rules] or [False])
    owner = units["owner"]
    longer = held.stat[units["caption"], 0] > np.diff(texts.ends, prepend=0) - added[owner] + _LINE_END
    return held.names.take(units["caption"][longer & (units["which"] >= 0) & first[owner]])


def read_caption(root: str, file: str) -> tuple[str, bytes, StatMemo | None]:
    """Text, content hash and memo of one caption file; a file without bytes is an empty caption without a memo.

    Raises:
        UnusableSampleError: ``caption-encoding``, ``caption-unicode``, ``caption-too-large``, or a
            reason of ``files.read_source``; ``what`` names the caption file.
    """
    path = f"{root}/{file}"
    try:
        data, memo = read_source(path, max_bytes=MAX_CAPTION_BYTES)
    except UnusableSampleError as error:
        if error.slug == "empty":
            return "", content_hash(b""), None
        cause = "caption-too-large" if error.slug == "too-large" else error.slug
        raise unusable_caption(cause, path, error.what) from error
    return caption_of(data, path), content_hash(data), memo


def caption_of(data: bytes, path: str, key: str = "") -> str:
    """The caption in the bytes of a file; empty if it has none.

    A ``.json`` file is an object that holds it under ``key``, or under the first name of ``CAPTION_COLUMNS`` in it.

    Raises:
        UnusableSampleError: ``caption-encoding``, ``caption-unicode`` or ``caption-json``.
    """
    encoding = "utf-16" if data.startswith(UTF16_BOMS) else "utf-8"
    try:
        text = data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        difference = f"found byte 0x{data[error.start]:02x} at offset {error.start}"
        raise unusable_caption("caption-encoding", path, f"expected {encoding.upper()}, {difference}") from error
    if problem := caption_fault(text):
        raise unusable_caption("caption-unicode", path, problem)
    text = _stripped(text)
    if not path.lower().endswith(".json"):
        return text
    try:
        value = parse_json(text) if text else {}
    except UnusableSampleError as error:
        raise unusable_caption("caption-json", path, error.what) from error
    names = [name for name in ((key,) if key else CAPTION_COLUMNS) if isinstance(value, dict) and name in value]
    try:
        return captions_in(value[names[0]] if names else "")
    except UnusableSampleError as error:
        raise unusable_caption("caption-json", path, error.what) from error


def captions_in(value: Any, *, strip: bool = True) -> str:
    """The caption in a value of JSON or of a table; several captions are joined by NUL.

    Raises:
        UnusableSampleError: ``table-row`` for values other than text, ``caption-unicode``.
    """
    several = value if isinstance(value, list) and value else [value]
    for text in several:
        if not isinstance(text, str):
            raise fault("table-row", f"expected text as the caption, found {shown(text)}")
        if problem := caption_fault(text):
            raise fault("caption-unicode", f"the caption has {problem}")
    return BETWEEN.join(map(_stripped, several) if strip else several)


def _stripped(text: str) -> str:
    return text.strip().replace("\r\n", "\n")


def caption_fault(text: str) -> str:
    """Describe the fault of a text as a caption; empty if there is none."""
    match = _NEVER_IN_CAPTIONS.search(text)
    if match is None:
        return ""
    problem = "a NUL" if match[0] == "\0" else f"half a surrogate pair (U+{ord(match[0]):04X})"
    return f"{problem} at character {match.start()}"


def unusable_caption(cause: str, path: str, problem: str) -> UnusableSampleError:
    """The error of one caption file, with the hint of its reason."""
    return fault(cause, f"caption file {path.rpartition('/')[2]}: {problem}", path)
