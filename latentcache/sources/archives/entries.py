"""The samples in one archive: which members or rows are images, and their captions.

Tar: members belong together if their names are equal up to the first dot of the base name (WebDataset 1.0,
``webdataset/tariterators.py``, ``base_plus_ext``); what follows the dot, in lower case, is the kind of the member.
Members of one key need not be neighbors here. Parquet and Arrow: a column holds the images, another one the captions.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import SourceAmbiguousError, UnusableSampleError
from latentcache.fields.table import Rejected
from latentcache.sources.archives.rows import Columns, opened
from latentcache.sources.archives.tars import ARROW, TAR, Member, tar_members
from latentcache.sources.captions import MAX_CAPTION_BYTES, caption_of, captions_in, unusable_caption
from latentcache.sources.causes import as_rejected, counted, rejected
from latentcache.sources.known import Scan
from latentcache.sources.lines import listed, refuse_packed
from latentcache.sources.reading import MAX_SOURCE_BYTES, open_source, unusable
from latentcache.sources.table import CAPTION_COLUMNS
from latentcache.sources.walk import IMAGE_EXTENSIONS

_CAPTIONS = ("txt", "caption", "json")
_IMAGES = frozenset(ending[1:] for ending in IMAGE_EXTENSIONS)
#: Members that are looked at to see if a tar holds images.
_LOOKED_AT = 256


@dataclass(slots=True, kw_only=True)
class Entries:
    """The n samples in one archive."""

    names: list[str]
    """Behind the name of the archive: ``/000123.jpg``, ``:17``."""
    line: NDArray[np.uint32]
    """(n,) number of the member or row, from 1."""
    span: NDArray[np.uint64]
    """(n, 2) see ``members.SPAN``."""
    texts: list[str]
    """Captions; empty: none."""
    rejected: list[Rejected] = field(default_factory=list)
    notes: list[Rejected] = field(default_factory=list)


def read_archive(root: Path, name: str, kind: str, asked: Scan) -> Entries:
    """The samples in one archive; images are not read.

    Raises:
        UnusableSampleError: It cannot be read at all.
        SourceAmbiguousError: Several columns may be meant.
    """
    return _Tar(root, name, asked).entries() if kind == TAR else _table(root, name, kind, asked)


def shows_images(path: Path, kind: str) -> bool:
    """True if an archive holds images, by its first members or its columns.

    Raises:
        UnusableSampleError: It cannot be read.
    """
    if kind != TAR:
        with opened(path, kind) as table:
            return bool(table.columns().images)
    with open_source(path) as file:
        endings = (member.name.rpartition(".")[2].lower() for member in islice(tar_members(file), _LOOKED_AT))
        return any(ending in _IMAGES for ending in endings)


class _Tar:
    """A tar while it is read."""

    def __init__(self, root: Path, name: str, asked: Scan) -> None:
        self._path, self._name, self._asked = root / name, name, asked
        ending = asked.image_column.lower().removeprefix(".")
        self._image_endings = frozenset((ending,)) if ending else _IMAGES
        self._images, self._texts = dict[str, list[Member]](), defaultdict[str, dict[str, Member]](dict)
        self._others = dict[str, list[str]]()
        self._rejected, self._notes = list[Rejected](), list[Rejected]()

    def entries(self) -> Entries:
        with open_source(self._path) as file:
            refuse_packed(os.pread(file.fileno(), 6, 0), self._path)
            try:
                for member in tar_members(file):
                    self._sort_in(member)
            except UnusableSampleError as error:
                self._rejected.append(as_rejected(self._name, error))
            chosen = list(self._chosen(file.fileno()))
        self._note_unused()
        return Entries(
            names=[f"/{member.name}" for member, _ in chosen],
            line=np.array([member.number for member, _ in chosen], dtype=np.uint32),
            span=np.array([(member.offset, member.size) for member, _ in chosen], dtype=np.uint64).reshape(-1, 2),
            texts=[text for _, text in chosen],
            rejected=self._rejected,
            notes=self._notes,
        )

    def _sort_in(self, member: Member) -> None:
        base = member.name.rfind("/") + 1
        dot = member.name.find(".", base)
        key, ending = member.name[: max(dot, 0)], member.name[dot + 1 :].lower()
        if dot > base and ending in self._image_endings:
            self._images.setdefault(key, []).append(member)
        elif dot > base and ending in _CAPTIONS:
            self._texts[key][ending] = member
        else:
            words = f"ending in .{ending.rpartition('.')[2]}" if dot > base else "without a key"
            self._others.setdefault(words, []).append(member.name)

    def _chosen(self, descriptor: int) -> Iterator[tuple[Member, str]]:
        """The image and the caption of each key that has one image."""
        for key, images in self._images.items():
            image, texts = images[0], self._texts.pop(key, {})
            try:
                path = f"{self._path}/{image.name}"
                if len(images) > 1:
                    names = " and ".join(one.name for one in images[:3])
                    raise unusable("two-images", path, f"{names} have one key, {key}: expected one image for each")
                if not image.size:
                    raise unusable("empty", path, "it has 0 bytes")
                if image.size > MAX_SOURCE_BYTES:
                    raise unusable(
                        "too-large", path, f"it has {image.size} bytes, at most {MAX_SOURCE_BYTES} are read"
                    )
                text = self._caption(descriptor, texts) if texts else ""
            except UnusableSampleError as error:
                self._rejected.append(as_rejected(f"{self._name}/{image.name}", error))
                continue
            yield image, text

    def _caption(self, descriptor: int, texts: dict[str, Member]) -> str:
        """The text of the first caption member that has one; a second one that differs is noted."""
        found, source = "", ""
        for ending in ("json",) if self._asked.caption_column else _CAPTIONS:
            if ending not in texts or (found and ending == "json"):
                continue
            member = texts[ending]
            path = f"{self._path}/{member.name}"
            if member.size > MAX_CAPTION_BYTES:
                raise unusable_caption("caption-too-large", path, f"it has {member.size} bytes")
            data = os.pread(descriptor, member.size, member.offset)
            text = caption_of(data, path, self._asked.caption_column)
            if found and text != found:
                detail = f"{source} is used; {member.name} says something else"
                self._notes.append(rejected(f"{self._name}/{member.name}", "caption-conflict", detail))
            elif text:
                found, source = text, member.name
        return found

    def _note_unused(self) -> None:
        """One note for each kind of member that is not used."""
        orphans = [one.name for texts in self._texts.values() for one in texts.values()]
        notes = [("caption-unused", "caption members have no image of their key", orphans)]
        notes += [("member-unused", f"members {words}", names) for words, names in self._others.items()]
        for cause, words, names in notes:
            if names:
                place = f"{self._name}/{names[0]}"
                self._notes.append(counted(place, cause, len(names), words, first=names[0]))


def _table(root: Path, name: str, kind: str, asked: Scan) -> Entries:
    """The rows of a parquet or Arrow file."""
    path, bad, notes = root / name, list[Rejected](), list[Rejected]()
    good, texts = list[int](), list[str]()
    with opened(path, kind) as table:
        columns = table.columns()
        span = table.spans(_image_column(path, columns, asked.image_column))
        caption = _caption_column(path, name, columns, asked.caption_column, notes)
        values = (one for batch in table.batches([caption]) for one in batch.column(0).to_pylist()) if caption else ()
        for row, value in zip_longest(range(len(span)), values):
            text, fault = captions_in(value or "")
            if fault:
                error = unusable("caption-unicode", path, f"{caption}: {fault}")
            elif kind == ARROW and not span[row, 1]:
                error = unusable("no-image", path, "the row holds no bytes of an image")
            else:
                good.append(row)
                texts.append(text)
                continue
            bad.append(replace(as_rejected(name, error), line=row + 1))
    line = np.array(good, dtype=np.uint32) + 1
    names = [f":{number}" for number in line.tolist()]
    return Entries(names=names, line=line, span=span[good], texts=texts, rejected=bad, notes=notes)


def _image_column(path: Path, columns: Columns, asked: str) -> str:
    """The column that holds the images; raises UnusableSampleError if there is none."""
    if asked and asked not in columns.binary:
        raise unusable("no-image-column", path, f"it has no binary column {asked}; it has {listed(columns.names)}")
    if not asked and not columns.images:
        raise unusable("no-image-column", path, f"no column holds images; it has {listed(columns.names)}")
    return asked or _only(path, "images", columns.images, "--image-column")


def _caption_column(path: Path, name: str, columns: Columns, asked: str, notes: list[Rejected]) -> str:
    """The column that holds the captions; empty: there is none."""
    if asked and asked not in columns.texts:
        what = f"it has no column {asked} of texts; it has {listed(columns.names)}"
        raise unusable("no-caption-column", path, what)
    found = [column for column in columns.texts if column.strip().lower() in CAPTION_COLUMNS]
    if not asked and not found and columns.texts:
        detail = f"no column of {name} is called {', '.join(CAPTION_COLUMNS)}; texts are in {listed(columns.texts)}"
        notes.append(rejected(name, "text-column", detail))
    return asked or (_only(path, "captions", found, "--caption-column") if found else "")


def _only(path: Path, what: str, found: Sequence[str], flag: str) -> str:
    if len(found) == 1:
        return found[0]
    raise SourceAmbiguousError(
        f"{len(found)} columns of {path.name} may hold the {what}: {listed(found)}",
        where=str(path),
        why="expected one",
        fix=f"name it: {flag} {found[0]}",
    )
