"""The samples in archives: which members or rows are images, and their captions.

Archives that did not change are taken from the snapshot. Tar: members belong together if their names are equal up to
the first dot of the base name. This is the rule of WebDataset 1.0 (``webdataset/tariterators.py``,
``base_plus_ext``). The text after the dot, in lower case, is the kind of the member. Members of one key need not be
neighbors here. Parquet and Arrow: a column holds the images, another one the captions. Images are not read here.
Cost: about 10 us a member.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.identity.content import StatMemo, content_hash
from latentcache.sources.captions import MAX_CAPTION_BYTES, caption_of, captions_in, unusable_caption
from latentcache.sources.causes import Findings, Notes, fault, rejected
from latentcache.sources.formats.archives import TAR, Member, kind_of_archive, open_rows, tar_members
from latentcache.sources.formats.files import check_not_packed, listed, open_source, stat_source
from latentcache.sources.inventory import IMAGE_EXTENSIONS, extension_of
from latentcache.sources.known import KnownFiles, Scan, Units
from latentcache.sources.layout import CAPTION_COLUMNS, ImageSet, Layout, above, choose_column, named
from latentcache.sources.locations import SPAN
from latentcache.sources.splits import missing_shards

_RULE = 2
_CAPTIONS = ("txt", "caption", "json")
#: Members that are looked at to see if a tar holds images.
_LOOKED_AT = 256
_IMAGES = frozenset(ending[1:] for ending in IMAGE_EXTENSIONS)


class Entry(NamedTuple):
    """One image in an archive."""

    tail: str
    """Its name behind that of the archive: ``/000123.jpg``, ``:17``."""
    line: int
    """Number of the member or row, from 1."""
    span: tuple[int, int]
    """See ``locations.SPAN``."""
    text: str | None
    """Its caption; None: it has none."""


def open_archives(layout: Layout, findings: Findings) -> dict[str, tuple[ImageSet, StatMemo]]:
    """The set and the memo of each archive of a layout, in the byte order of names; missing ones are rejected."""
    owners = {name: image_set for image_set in layout.sets for name in image_set.files}
    findings.notes.add(*missing_shards(owners if layout.folders else ()))  # not beside a file that was named alone
    archives = dict[str, tuple[ImageSet, StatMemo]]()
    for name in sorted(owners, key=os.fsencode):
        try:
            archives[name] = owners[name], stat_source(layout.root / name)
        except UnusableSampleError as error:
            findings.reject(name, error)
    return archives


def read_archives(request: Scan, layout: Layout, archives: Sequence[ImageSet], held: KnownFiles) -> Units:
    """All images in the archives, which are the first files; what cannot be read is rejected."""
    parts = list[Units]()
    findings = request.findings

    def read(file: int) -> None:
        name = held.names[file]
        entries = _Archive(layout.root, name, archives[file], findings).entries()
        if (part := request.options.part) is not None:
            entries = [entry for entry in entries if part.holds_name(name + entry.tail)]
        member = np.array([entry.line for entry in entries], dtype=np.uint32)
        rule = archives[file].captions
        units = Units(
            image=np.full(len(entries), file, dtype=np.int64),
            line=member * np.array([entry.text is not None for entry in entries], dtype=np.bool_),
            member=member,
            span=np.array([entry.span for entry in entries], dtype=np.uint64).reshape(-1, 2),
            text=np.array([rule.formatted(entry.text or "") for entry in entries], dtype=object),
            tail=np.array([entry.tail for entry in entries], dtype=object),
        )
        parts.append(units)

    known = request.contained(held, len(archives), "image", read)
    unchanged = set(held.names.take(known))
    before = (note for note in request.notes if note.reason != "no-caption")
    findings.notes.add(*(note for note in before if unchanged.intersection(above(note.name))))
    units = Units.joined([*parts, _known_units(held, known)])
    file = units["image"]
    units.columns["owner"] = np.array([layout.sets.index(image_set) for image_set in archives], dtype=np.int32)[file]
    units.columns["repeats"] = np.array([image_set.repeats for image_set in archives], dtype=np.int32)[file]
    units.columns["caption"] = np.where(units["line"] > 0, file, -1)
    return units


def archive_reading(image_set: ImageSet) -> bytes:
    """Hash of all that an archive's samples depend on beside the file."""
    rule = image_set.captions
    columns = rule.image_column, rule.caption_column
    return content_hash(repr((_RULE, columns, rule.reading, rule.text, rule.from_name and image_set.name)).encode())


def _known_units(held: KnownFiles, files: NDArray[np.intp]) -> Units:
    """The samples of the snapshot in archives that did not change."""
    rows, file = held.rows_in("image", files)
    if held.table is None or not len(rows):
        return Units(image=files[:0], line=np.zeros(0, np.uint32))
    caption = held.table.inputs["caption"]
    names = held.names.take(file)
    line = np.asarray(caption.file) >= 0 if caption.line is None else np.asarray(caption.line)
    labels = zip(held.table.names.take(rows), names, strict=True)
    return Units(
        image=file,
        line=line[rows].astype(np.uint32),
        member=np.asarray(held.table.inputs["image"].line)[rows],
        span=np.asarray(held.table.columns[SPAN])[rows],
        tail=np.array([label[len(name) :] for label, name in labels], dtype=object),
        known=rows,
    )


class _Archive:
    """One archive of a set; its faults go to ``findings``."""

    def __init__(self, root: Path, name: str, image_set: ImageSet, findings: Findings) -> None:
        self._path, self._name, self._findings, self._notes = root / name, name, findings, Notes()
        self._kind, self._rule = image_set.archives, image_set.captions
        self._caption_column = self._rule.caption_column

    def entries(self) -> list[Entry]:
        """Its images with a usable caption; raises UnusableSampleError if there is none before a fault."""
        entries = list[Entry]()
        count = len(self._findings.rejected)
        try:
            entries += self._of_tar() if self._kind == TAR else self._of_rows()
        except UnusableSampleError as error:
            if not entries:
                raise
            error.what = f"rest unread: {error.what}"
            self._findings.reject(self._name, error, line=entries[-1].line + 1)
        if not entries and len(self._findings.rejected) == count:
            self._notes.add(rejected(self._name, "unused", "it holds no images"))
        self._findings.notes.add(*self._notes.all())
        return entries

    def _of_tar(self) -> list[Entry]:
        entries = list[Entry]()
        with open_source(self._path) as file:
            check_not_packed(os.pread(file.fileno(), 6, 0), self._path)
            images, texts = self._members(file)
            for key, members in images.items():
                image = members[0]
                beside = texts.pop(key, {})
                try:
                    if len(members) > 1:
                        names = " and ".join(member.name for member in members[:3])
                        raise fault("two-images", f"{names} have one key, {key}: expected one image for each")
                    if not image.size:
                        raise fault("empty", "it has 0 bytes")
                    text = self._caption(file.fileno(), beside) if beside else None
                except UnusableSampleError as error:
                    self._findings.reject(f"{self._name}/{image.name}", error)
                    continue
                entries.append(Entry(f"/{image.name}", image.number, (image.offset, image.size), text))
        for members_of_key in texts.values():
            self._count("caption-unused", "caption members have no image of their key", *members_of_key.values())
        if self._caption_column and entries and all(entry.text is None for entry in entries):
            problem = f"no JSON member of an image has a caption called {self._caption_column}"
            raise fault("no-caption-column", problem, self._path)
        return entries

    def _members(self, file: BinaryIO) -> tuple[dict[str, list[Member]], dict[str, dict[str, Member]]]:
        """Key -> its images, and key -> ending -> its captions; other members are noted."""
        suffix = self._rule.image_column.lower().removeprefix(".")
        wanted = frozenset((suffix,)) if suffix else _IMAGES
        images, texts = defaultdict[str, list[Member]](list), defaultdict[str, dict[str, Member]](dict)
        try:
            for member in tar_members(file):
                base = member.name.rfind("/") + 1
                dot = member.name.find(".", base)
                key = member.name[: max(dot, 0)]
                ending = member.name[dot + 1 :].lower()
                if member.size < 0:
                    self._count("unused", "members are links or no plain files", member)
                elif dot <= base:
                    self._count("member-unused", "members without a key", member)
                elif ending in wanted:
                    images[key].append(member)
                elif ending in (("json",) if self._caption_column else _CAPTIONS):
                    texts[key][ending] = member
                else:
                    self._count("member-unused", f"members ending in .{ending.rpartition('.')[2]}", member)
        except UnusableSampleError as error:
            self._findings.reject(self._name, error)
        return images, texts

    def _count(self, cause: str, words: str, *members: Member) -> None:
        self._notes.count(cause, words, (f"{self._name}/{member.name}" for member in members))

    def _caption(self, descriptor: int, members: dict[str, Member]) -> str | None:
        """The text of the first caption member that has one. None: JSON alone that has none."""
        several = [members[ending] for ending in _CAPTIONS if ending in members]
        for member in several:
            path = f"{self._path}/{member.name}"
            if member.size > MAX_CAPTION_BYTES:
                raise unusable_caption("caption-too-large", path, f"it has {member.size} bytes")
            text = caption_of(os.pread(descriptor, member.size, member.offset), path, self._caption_column)
            if text:
                if member is members.get("txt") and "caption" in members:
                    self._count("caption-conflict", "caption members are beside one that is used", members["caption"])
                return text
        return None if self._caption_column or members.keys() == {"json"} else ""

    def _of_rows(self) -> Iterator[Entry]:
        with open_rows(self._path, self._kind) as table:
            if table.is_empty:  # what it would hold need not be known
                return
            texts = table.texts
            asked = self._caption_column
            image = choose_column(self._path, "image", table.binary, table.images(), self._rule.image_column)
            caption = choose_column(self._path, "caption", texts, named(texts, CAPTION_COLUMNS), asked)
            others = [name for name in table.schema.names if name != image]
            if not caption and others:
                detail = f"it has no column of captions; other columns: {listed(others)}"
                self._notes.add(rejected(self._name, "text-column", detail))
            span = table.schema.names.index(image), 0
            for row, value in enumerate(table.values(caption), start=1):
                try:
                    text = captions_in(value or "")
                except UnusableSampleError as error:
                    self._findings.reject(self._name, error, line=row)
                else:
                    yield Entry(f":{row}", row, span, text or None)


def hold_images(root: Path, names: Sequence[str], *, unread: bool = False) -> bool:
    """True if one of some archives holds images, by its first members or its columns.

    ``unread``: the answer if there are some and none can be read, so that somebody says why.
    """
    unread = unread and bool(names)
    for name in names:
        try:
            if _holds_images(root / name):
                return True
            unread = False
        except ImportError:  # without pyarrow
            return False
        except UnusableSampleError:
            continue
    return unread


def _holds_images(path: Path) -> bool:
    if (kind := kind_of_archive(path.name)) != TAR:
        with open_rows(path, kind) as table:
            return bool(table.images())
    with open_source(path) as file:
        return any(extension_of(member.name) in IMAGE_EXTENSIONS for member in islice(tar_members(file), _LOOKED_AT))
