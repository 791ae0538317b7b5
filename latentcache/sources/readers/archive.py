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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.table import Rejected
from latentcache.identity.content import content_hash
from latentcache.identity.stat import StatMemo
from latentcache.sources.captions import MAX_CAPTION_BYTES, caption_of, captions_in, unusable_caption
from latentcache.sources.causes import Notes, as_rejected, counted, fault, rejected, unused_lines
from latentcache.sources.columns import CAPTION_COLUMNS, choose_column, named
from latentcache.sources.formats import ARROW, TAR
from latentcache.sources.formats.files import MAX_SOURCE_BYTES, check_not_packed, listed, open_source, stat_source
from latentcache.sources.formats.rows import opened
from latentcache.sources.formats.tar import Member, tar_members
from latentcache.sources.inventory import IMAGE_EXTENSIONS
from latentcache.sources.known import KnownFiles, above, hash_rows
from latentcache.sources.layout import Layout
from latentcache.sources.places import SPAN
from latentcache.sources.splits import missing_shards
from latentcache.sources.units import Scan, Units

_RULE = 2
_CAPTIONS = ("txt", "caption", "json")
_IMAGES = frozenset(ending[1:] for ending in IMAGE_EXTENSIONS)
_NOT_PLAIN = "members are links or no plain files"


class Archives:
    """The archives of a layout, in the byte order of their names, at the end of the files.

    Args:
        scan: The scan.
        layout: Its sets name the archives.
        bad: Archives, members and rows that cannot be read are appended to it.
        notes: Of the scan.
    """

    def __init__(self, scan: Scan, layout: Layout, bad: list[Rejected], notes: Notes) -> None:
        self._scan, self._bad, self._notes, self._sets, self._root = scan, bad, notes, layout.sets, layout.root
        self._options = scan.options
        self.names, self.memos, self.first = list[str](), list[StatMemo](), 0
        """Their names and stats, and the position of the first one among the files."""
        owners, owner = {name: at for at, one in enumerate(layout.sets) for name in one.files}, []
        notes.add(*missing_shards(owners if layout.folders else ()))  # not beside a file that was named alone
        for name in sorted(owners, key=os.fsencode):
            try:
                self.memos.append(stat_source(layout.root / name))
            except UnusableSampleError as error:
                bad.append(as_rejected(name, error))
                continue
            self.names.append(name)
            owner.append(owners[name])
        self._owner = np.array(owner, dtype=np.int32)
        self._captions = ("json",) if scan.options.caption_column else _CAPTIONS

    def readings(self) -> NDArray[np.uint8]:
        """(n, 16) how each is read."""
        columns = self._options.image_column, self._options.caption_column
        rules = [
            (_RULE, columns, rule.reading, rule.text, rule.from_name and one.name)
            for one, rule in ((one, one.captions) for one in self._sets)
        ]
        return hash_rows(content_hash(repr(rules[owner]).encode()) for owner in self._owner.tolist())

    def units(self, held: KnownFiles) -> Units:
        """All images in the archives."""
        parts, files = list[Units](), np.arange(self.first, self.first + len(self.names))
        kept = self._scan.contained(held, files, "image", self._bad, lambda one: parts.append(self._read(one)))
        rows, file = held.rows_in("image", kept)
        own = set(held.names.take(files[held.place[files] >= 0]))
        old = (note for note in self._scan.notes if note.reason != "no-caption")
        self._notes.add(*(note for note in old if own.intersection(above(note.name))))
        if held.table is not None and len(rows):
            caption, names = held.table.inputs["caption"], held.names.take(file)
            line = np.asarray(caption.file) >= 0 if caption.line is None else np.asarray(caption.line)
            labels = zip(held.table.names.take(rows), names, strict=True)
            known = self._units(
                file,
                line=line[rows].astype(np.uint32),
                member=np.asarray(held.table.inputs["image"].line)[rows],
                span=np.asarray(held.table.columns[SPAN])[rows],
                own=np.array([label[len(name) :] for label, name in labels], dtype=object),
                known=rows,
            )
            parts.append(known)
        return Units.joined(parts) if parts else Units(image=files[:0])

    def _read(self, file: int) -> Units:
        number, part, bad = file - self.first, self._options.part, len(self._bad)
        name, one = self.names[number], self._sets[self._owner[number]]
        found, rule = list[ArchiveSample](), one.captions
        try:
            found += self._of_tar(name) if one.archives == TAR else self._of_rows(name, one.archives)
        except UnusableSampleError as error:
            if not found:
                raise
            error.what = f"rest unread: {error.what}"
            self._bad.append(as_rejected(name, error, line=found[-1].line + 1))
        if not found and len(self._bad) == bad:
            self._notes.add(rejected(name, "unused", "it holds no images"))
        lines = [(name, entry.line) for entry in found if entry.text and rule.unused_line(entry.text)]
        self._notes.add(*unused_lines(lines))
        found = [entry for entry in found if part is None or part.holds_name(name + entry.own)]
        texts = [rule.made(entry.text or "") for entry in found]
        member = np.array([entry.line for entry in found], dtype=np.uint32)
        return self._units(
            np.full(len(found), file, dtype=np.int64),
            line=member * np.array([entry.text is not None for entry in found], dtype=np.bool_),
            member=member,
            span=np.array([entry.span for entry in found], dtype=np.uint64).reshape(-1, 2),
            text=np.array(texts, dtype=object),
            own=np.array([entry.own for entry in found], dtype=object),
        )

    def _units(self, file: NDArray[np.int64], line: NDArray[np.uint32], **columns: NDArray[Any]) -> Units:
        """Images in archives; ``line``: members or rows with their captions, 0: they have none."""
        owner = self._owner[file - self.first]
        repeats = np.array([one.repeats for one in self._sets], dtype=np.int32)[owner]
        caption = np.where(line > 0, file, -1)
        return Units(image=file, caption=caption, owner=owner, repeats=repeats, line=line, **columns)

    def _of_tar(self, name: str) -> Iterator[ArchiveSample]:
        path, suffix = self._root / name, self._options.image_column.lower().removeprefix(".")
        wanted, captions = frozenset((suffix,)) if suffix else _IMAGES, self._captions
        images, others = defaultdict[str, list[Member]](list), defaultdict[str, list[str]](list)
        texts = defaultdict[str, dict[str, Member]](dict)
        with open_source(path) as file:
            check_not_packed(os.pread(file.fileno(), 6, 0), path)
            try:
                for member in tar_members(file):
                    base = member.name.rfind("/") + 1
                    dot = member.name.find(".", base)
                    key, ending = member.name[: max(dot, 0)], member.name[dot + 1 :].lower()
                    if member.size < 0:
                        others[_NOT_PLAIN].append(member.name)
                    elif dot > base and ending in wanted:
                        images[key].append(member)
                    elif dot > base and ending in captions:
                        texts[key][ending] = member
                    else:
                        words = f"ending in .{ending.rpartition('.')[2]}" if dot > base else "without a key"
                        others[f"members {words}"].append(member.name)
            except UnusableSampleError as error:
                self._bad.append(as_rejected(name, error))
            found = list[ArchiveSample]()
            for key, several in images.items():
                image, beside = several[0], texts.pop(key, {})
                try:
                    _check(f"{path}/{image.name}", key, several)
                    text = self._caption(file.fileno(), name, beside) if beside else None
                except UnusableSampleError as error:
                    self._bad.append(as_rejected(f"{name}/{image.name}", error))
                    continue
                found.append(ArchiveSample(f"/{image.name}", image.number, (image.offset, image.size), text))
        column = self._options.caption_column
        if column and found and all(entry.text is None for entry in found):
            raise fault("no-caption-column", f"no JSON member of an image has a caption called {column}", path)
        yield from found
        orphans = [one.name for members in texts.values() for one in members.values()]
        for words, names in {"caption members have no image of their key": orphans, **others}.items():
            if names:
                cause = "caption-unused" if names is orphans else "unused" if words == _NOT_PLAIN else "member-unused"
                self._notes.add(counted(f"{name}/{names[0]}", cause, len(names), words, first=names[0]))

    def _caption(self, descriptor: int, name: str, texts: dict[str, Member]) -> str | None:
        """The text of the first caption member that has one; a second one that differs is noted. None: JSON alone."""
        found, source, key = "", "", self._options.caption_column
        for ending in self._captions:
            if ending not in texts or (found and ending == "json"):
                continue
            member = texts[ending]
            path = f"{self._root / name}/{member.name}"
            if member.size > MAX_CAPTION_BYTES:
                raise unusable_caption("caption-too-large", path, f"it has {member.size} bytes")
            text = caption_of(os.pread(descriptor, member.size, member.offset), path, key)
            if found and text != found:
                detail = f"{source} is used; {member.name} says something else"
                self._notes.add(rejected(f"{name}/{member.name}", "caption-conflict", detail))
            elif text:
                found, source = text, member.name
        return found or (None if key or texts.keys() == {"json"} else "")

    def _of_rows(self, name: str, kind: str) -> Iterator[ArchiveSample]:
        path, given = self._root / name, self._options
        with opened(path, kind) as table:
            if table.is_empty:  # what it would hold need not be known
                return
            image = choose_column(path, "image", table.binary, table.images(), given.image_column)
            texts = table.texts
            caption = choose_column(path, "caption", texts, named(texts, CAPTION_COLUMNS), given.caption_column)
            odd = [
                f"{field.name} of {name} holds {field.type}"
                for field in table.schema
                if named([field.name], CAPTION_COLUMNS)
            ]
            if not caption and (odd or table.texts):
                called = f"no column of {name} is called {', '.join(CAPTION_COLUMNS)}"
                detail = f"{(*odd, called)[0]}; texts are in {listed(table.texts) or 'no column'}"
                self._notes.add(rejected(name, "text-column", detail))
            for row, (span, value) in enumerate(table.samples(image, caption), start=1):
                text, why = captions_in(value or "")
                if why:
                    cause = "table-row" if why.startswith("expected") else "caption-unicode"
                    error = fault(cause, f"{caption}: {why}", path)
                elif kind == ARROW and not span[1]:
                    error = fault("no-image", "the row holds no bytes of an image", path)
                else:
                    yield ArchiveSample(f":{row}", row, span, text or None)
                    continue
                self._bad.append(as_rejected(name, error, line=row))


class ArchiveSample(NamedTuple):
    """One sample in an archive."""

    own: str
    """Behind the name of the archive: ``/000123.jpg``, ``:17``."""
    line: int
    """Number of the member or row, from 1."""
    span: tuple[int, int]
    """See ``places.SPAN``."""
    text: str | None
    """Its caption; None: it has none."""


def _check(path: str, key: str, images: Sequence[Member]) -> None:
    if len(images) > 1:
        names = " and ".join(image.name for image in images[:3])
        raise fault("two-images", f"{names} have one key, {key}: expected one image for each", path)
    if not images[0].size:
        raise fault("empty", "it has 0 bytes", path)
    if images[0].size > MAX_SOURCE_BYTES:
        raise fault("too-large", f"it has {images[0].size} bytes, at most {MAX_SOURCE_BYTES} are read", path)
