"""Captions: files beside an image, and which texts can be a caption.

The layout says which file belongs to which image (``layout.CaptionRule``). A ``.json`` file holds the caption
as ``caption``, ``text`` or ``prompt``: the first of these names counts. Files are UTF-8 with or without BOM, or
UTF-16 with BOM; no encoding is guessed. A caption is exactly the text of the file, without surrounding blanks and
with Unix line ends. If it cannot be decoded, the sample is rejected with the offset of the fault.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
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


class CaptionFiles:
    """The captions of samples, from the snapshot, their files, their tables or their sets."""

    def __init__(self, root: Path, held: KnownFiles, rules: Sequence[CaptionRule]) -> None:
        self._root, self._held, self._rules = os.fspath(root), held, rules

    def read(self, units: Units, findings: Findings) -> NDArray[np.bool_]:
        """Read the caption files that are not known; (n,) False for samples whose caption is rejected.

        Adds what was read to ``text`` of the units, and the rows of captions that are known as ``caption_known``.
        """
        good, files = np.ones(len(units), dtype=np.bool_), np.where(units["which"] >= 0, units["caption"], -1)
        known = np.maximum(self._held.rows_of("caption", files), units["known"])
        unknown = np.flatnonzero((files >= 0) & (known < 0)).tolist()
        texts = np.array(units["text"]) if unknown else units["text"]
        names = chain.from_iterable(
            self._held.names.take(files[unknown[start : start + _BLOCK]]) for start in range(0, len(unknown), _BLOCK)
        )
        for number, name in zip(unknown, names, strict=True):
            try:
                file = int(files[number])
                text, content, memo = read_caption(self._root, name)
                texts[number] = self._rules[units["owner"][number]].formatted(text)
                if memo is not None:
                    self._held.remember(file, content, memo)
            except UnusableSampleError as error:
                good[number] = False
                findings.reject(self._held.names[int(units["image"][number])], error)
        units.columns |= {"text": texts, "caption_known": known}
        return good

    def longer_files(self, units: Units, texts: Strings) -> list[str]:
        """Caption files that are longer than the first line, which alone is used; none of them is read."""
        added = np.array([len((rule.prefix + rule.suffix).encode()) for rule in self._rules] or [0])
        first = np.array([rule.lines == "first" for rule in self._rules] or [False])
        owner = units["owner"]
        sizes = self._held.stat[units["caption"], 0]
        longer = sizes > np.diff(texts.ends, prepend=0) - added[owner] + _LINE_END
        return self._held.names.take(units["caption"][longer & (units["which"] >= 0) & first[owner]])

    def column(self, units: Units) -> Input:
        """The captions of the samples that ``read`` gave."""
        known, table = units["caption_known"], self._held.table
        old = table.inputs["caption"] if table is not None and (known >= 0).any() else None
        file, line = units["caption"].astype(np.int32), units["line"]
        lines = line if line.any() else None
        if old is not None and old.text is not None and self._held.is_whole(known):
            return Input(content=np.asarray(old.content), file=file, text=old.text, line=lines)
        content = np.zeros((len(file), HASH_BYTES), dtype=np.uint8)
        by_choice = [number for number, rule in enumerate(self._rules) if rule.is_empty_by_choice]
        json_at = [(*rule.extensions, ".json").index(".json") for rule in self._rules] or [0]
        is_json = units["which"] == np.array(json_at)[units["owner"]]  # it may hold other things alone
        content[((file >= 0) & ~is_json) | np.isin(units["owner"], by_choice)] = _EMPTY
        if old is not None:
            content[known >= 0] = take_rows(old.content, known[known >= 0])
        with_fallback = [at for at, rule in enumerate(self._rules) if rule.text or rule.from_name or rule.bare]

        def texts() -> Iterator[list[str]]:
            for start in range(0, len(file), _BLOCK):
                block = slice(start, start + _BLOCK)
                some, is_known = units["text"][block].tolist(), known[block] >= 0
                for owner in with_fallback:
                    for number in np.flatnonzero((units["owner"][block] == owner) & ~is_known).tolist():
                        name = self._held.names[int(units["image"][start + number])]
                        some[number] = some[number] or self._rules[owner].fallback(name)
                new = {start + at: text.encode() for at, text in enumerate(some) if text} if any(some) else {}
                if new:
                    content[list(new)] = hash_rows(map(content_hash, new.values()))
                if old is not None and old.text is not None and is_known.any():
                    before = old.text.take(known[block][is_known])
                    for number, text in zip(np.flatnonzero(is_known).tolist(), before, strict=True):
                        some[number] = text
                yield some

        return Input(text=Strings.of(chain.from_iterable(texts())), content=content, file=file, line=lines)


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
