"""Captions: files beside an image, and which texts can be a caption.

Which file is whose is the layout's (``layouts.sets.CaptionRule``). A ``.json`` file holds the caption as ``caption``,
``text`` or ``prompt``, the first of these names; without them it holds none. UTF-8 with or without BOM, UTF-16 with
BOM; nothing is guessed. A caption is exactly the text of the file (surrounding blanks removed, Windows line ends as
Unix ones), or the sample is rejected with the offset of the fault.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.captions import BETWEEN
from latentcache.fields.strings import Strings
from latentcache.fields.table import Input, Rejected
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.identity.stat import StatMemo
from latentcache.sources.causes import as_rejected, unused_lines
from latentcache.sources.known import Known, strings_of, take_rows
from latentcache.sources.layouts.sets import CaptionRule
from latentcache.sources.reading import UTF16_BOMS, parse_json, read_source, shown, unusable
from latentcache.value import Value

#: Names of the caption in a JSON file beside an image, in order.
JSON_NAMES = ("caption", "text", "prompt")
#: Longest caption file, in bytes.
MAX_CAPTION_BYTES = 1 << 20
_BLOCK = 1 << 14
_LINE_END = 2
_EMPTY = np.frombuffer(content_hash(b""), dtype=np.uint8)
#: Values for samples that lack a column of ``Chosen``.
_MISSING = {"focus": -1, "known": -1}
_NEVER_IN_CAPTIONS = re.compile("[\0\ud800-\udfff]")


class Chosen(Value):
    """Samples (n) in the byte order of their names, by positions among the files."""

    image: NDArray[np.integer]
    caption: NDArray[np.integer]
    """(n,) caption files or tables; -1: none."""
    which: NDArray[np.int8]
    """(n,) extension of the caption file among those of its rule; -1: the caption is in no file beside the image."""
    owner: NDArray[np.integer]
    """(n,) sets."""
    repeats: NDArray[np.integer]
    line: NDArray[np.uint32] | None = None
    """(n,) rows of tables, or members of archives; 0: the caption is in none. None: there are none."""
    focus: NDArray[np.float32] | None = None
    """(n, 2) points of focus crops from tables; None: there are none."""
    texts: Sequence[str] = ()
    """Captions from tables and archives, if there are any."""
    member: NDArray[np.uint32] | None = None
    """(n,) members or rows of archives, from 1; 0: the image is the file. None: there are no archives."""
    span: NDArray[np.uint64] | None = None
    """(n, 2) see ``archives.members.SPAN``."""
    own: Sequence[str] = ()
    """Behind the name of the file: ``/000123.jpg``, ``:17``, if there are archives."""
    known: NDArray[np.integer] | None = None
    """(n,) rows of the snapshot of samples in archives that did not change; -1: unknown."""

    def take(self, rows: NDArray[Any]) -> Chosen:
        """Some of them: positions, or True for each."""
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        held = dict[str, Any]()
        for one in fields(self):
            column = getattr(self, one.name)
            is_column = isinstance(column, np.ndarray)
            held[one.name] = column[rows] if is_column else column and [column[row] for row in rows.tolist()]
        return Chosen(**held)

    @classmethod
    def joined(cls, parts: Sequence[Chosen]) -> Chosen:
        """One after the other."""
        made = dict[str, Any]()
        for one in fields(cls):
            pairs = [(getattr(part, one.name), len(part.image)) for part in parts]
            like = next((column for column, _ in pairs if isinstance(column, np.ndarray)), None)
            if like is not None:
                lacking = partial(np.full, fill_value=_MISSING.get(one.name, 0), dtype=like.dtype)
                shape = like.shape[1:]
                each = [lacking((count, *shape)) if column is None else column for column, count in pairs]
                made[one.name] = np.concatenate(each)
            elif one.name in ("texts", "own"):
                made[one.name] = [text for column, count in pairs for text in column or [""] * count]
        return cls(**made)


class CaptionFiles:
    """The captions of samples, from the snapshot, their files, their tables or their sets."""

    def __init__(self, root: Path, names: Strings, held: Known, rules: Sequence[CaptionRule]) -> None:
        self._root, self._names, self._held = os.fspath(root), names, held
        self._rules, self._texts = rules, dict[int, str]()
        self._empty_by_choice = [number for number, rule in enumerate(rules) if rule.is_empty_by_choice]

    def read(self, chosen: Chosen, bad: list[Rejected]) -> NDArray[np.bool_]:
        """Read the caption files that are not known; (n,) False for samples whose caption goes to ``bad``."""
        good, files = np.ones(len(chosen.image), dtype=np.bool_), np.where(chosen.which >= 0, chosen.caption, -1)
        self._known = self._held.rows_of("caption", files)
        if chosen.known is not None:
            self._known = np.maximum(self._known, chosen.known)
        for number in np.flatnonzero((files >= 0) & (self._known < 0)).tolist():
            try:
                file = int(files[number])
                text, content, memo = read_caption(self._root, self._names[file])
                self._texts[file] = self._rules[int(chosen.owner[number])].made(text)
                if memo is not None:
                    self._held.remember(file, content, memo)
            except UnusableSampleError as error:
                good[number] = False
                image = int(chosen.image[number])
                stat = (*self._held.stat[image, :5].view(np.int64).tolist(), 0)
                bad.append(replace(as_rejected(self._names[image], error), stat=stat))
        self._known = self._known[good]
        return good

    def unused_lines(self, chosen: Chosen, texts: Strings) -> Iterator[Rejected]:
        """One note on files of which only the first line is used; only files that are longer than it are read."""
        asked = [number for number, rule in enumerate(self._rules) if rule.lines == "first"]
        added = np.array([len((rule.prefix + rule.suffix).encode()) for rule in self._rules] or [0])
        longer = self._held.stat[chosen.caption, 0] > np.diff(texts.ends, prepend=0) - added[chosen.owner] + _LINE_END
        found = list[tuple[str, int]]()
        for number in np.flatnonzero(longer & (chosen.which >= 0) & np.isin(chosen.owner, asked)).tolist():
            name = self._names[int(chosen.caption[number])]
            with suppress(UnusableSampleError):  # it was read before
                text = read_caption(self._root, name)[0]
                found += [(name, line)] if (line := self._rules[int(chosen.owner[number])].unused_line(text)) else []
        yield from unused_lines(found)

    def column(self, chosen: Chosen) -> Input:
        """The captions of the samples that ``read`` gave."""
        old = self._held.table.inputs["caption"] if (self._known >= 0).any() and self._held.table else None
        file = chosen.caption.astype(np.int32)
        if old is not None and old.text is not None and self._held.is_whole(self._known):
            return Input(content=np.asarray(old.content), file=file, text=old.text)
        content = np.zeros((len(file), HASH_BYTES), dtype=np.uint8)
        content[(file >= 0) | np.isin(chosen.owner, self._empty_by_choice)] = _EMPTY
        known = np.flatnonzero(self._known >= 0)
        if old is not None:
            content[known] = take_rows(old.content, self._known[known])

        with_fallback = [
            (owner, rule)
            for owner, rule in enumerate(self._rules)
            if rule.text or rule.from_name is not None or rule.bare
        ]

        def texts() -> Iterator[list[str]]:
            for start in range(0, len(file), _BLOCK):
                block = slice(start, min(start + _BLOCK, len(file)))
                some = [""] * (block.stop - start)
                for number in np.flatnonzero(file[block] >= 0).tolist() if self._texts else ():
                    some[number] = self._texts.get(int(file[start + number]), "")
                for number in np.flatnonzero(chosen.line[block]).tolist() if chosen.line is not None else []:
                    some[number] = chosen.texts[start + number]
                own = self._known[block] >= 0
                for owner, rule in with_fallback:
                    for number in np.flatnonzero((chosen.owner[block] == owner) & ~own).tolist():
                        some[number] = some[number] or rule.fallback(self._names[int(chosen.image[start + number])])
                made = [number for number, text in enumerate(some) if text] if any(some) else []
                if made:
                    content[start + np.array(made)] = hashes([some[number] for number in made])
                if old is not None and old.text is not None and own.any():
                    rows = self._known[block][own]
                    for number, text in zip(np.flatnonzero(own).tolist(), old.text.take(rows), strict=True):
                        some[number] = text
                yield some

        return Input(text=strings_of(texts()), content=content, file=file, line=chosen.line)


def hashes(texts: Sequence[str]) -> NDArray[np.uint8]:
    """(n, 16) content hashes of captions."""
    joined = b"".join([content_hash(text.encode()) for text in texts])
    return np.frombuffer(bytearray(joined), dtype=np.uint8).reshape(-1, HASH_BYTES)


def read_caption(root: str, file: str) -> tuple[str, bytes, StatMemo | None]:
    """Text, content hash and memo of one caption file; a file without bytes is an empty caption without a memo.

    Raises:
        UnusableSampleError: ``caption-encoding``, ``caption-unicode``, ``caption-too-large``, or a
            reason of ``reading.read_source``; ``what`` names the caption file.
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

    A file whose name ends in ``.json`` is an object with it as ``key``, or as the first one of ``JSON_NAMES``.

    Raises:
        UnusableSampleError: ``caption-encoding``, ``caption-unicode`` or ``caption-json``.
    """
    encoding = "utf-16" if data.startswith(UTF16_BOMS) else "utf-8"
    try:
        text = data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        found = f"found byte 0x{data[error.start]:02x} at offset {error.start}"
        raise unusable_caption("caption-encoding", path, f"expected {encoding.upper()}, {found}") from error
    if fault := caption_fault(text):
        raise unusable_caption("caption-unicode", path, fault)
    text = text.strip().replace("\r\n", "\n")
    return _json_caption(text, path, (key,) if key else JSON_NAMES) if path.lower().endswith(".json") else text


def _json_caption(text: str, path: str, names: Sequence[str]) -> str:
    try:
        found = parse_json(text) if text else {}
    except UnusableSampleError as error:
        raise unusable_caption("caption-json", path, error.what) from error
    held = next((found[name] for name in names if name in found), "") if isinstance(found, dict) else ""
    text, fault = captions_in(held)
    if fault:
        raise unusable_caption("caption-json", path, fault)
    return text


def captions_in(value: Any) -> tuple[str, str]:
    """The caption in a value of JSON or of a table (several are joined by NUL), and why it is none."""
    several = value if isinstance(value, list) and value else [value]
    fault = next((f"expected text, found {shown(one)}" for one in several if not isinstance(one, str)), "")
    fault = fault or next(filter(None, map(caption_fault, several)), "")
    return "" if fault else BETWEEN.join(one.strip().replace("\r\n", "\n") for one in several), fault


def caption_fault(text: str) -> str:
    """Why a text is not a caption; empty if it is one."""
    found = _NEVER_IN_CAPTIONS.search(text)
    if found is None:
        return ""
    what = "a NUL" if found[0] == "\0" else f"half a surrogate pair (U+{ord(found[0]):04X})"
    return f"{what} at character {found.start()}"


def unusable_caption(cause: str, path: str, what: str) -> UnusableSampleError:
    """The error of one caption file, with the hint of its reason."""
    return unusable(cause, path, f"caption file {path.rpartition('/')[2]}: {what}")
