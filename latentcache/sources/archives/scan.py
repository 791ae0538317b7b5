"""The images in archives, in columns: archives are listed, and their headers and captions are read.

If nothing changed since the last snapshot, no archive is opened. Otherwise the headers of all are read again (about
10 us a member); contents in unchanged archives are known by name, and an archive that changed is hashed member by
member if that is asked for, so that images are found again that are as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, UnusableSampleError
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.sources.archives.entries import Entries, Wanted, read_archive
from latentcache.sources.archives.members import SPAN, places
from latentcache.sources.archives.tars import EXTENSIONS, TAR, is_packed, kind_of_archive
from latentcache.sources.captions import Chosen, hashes
from latentcache.sources.causes import as_rejected, rejected, unused_lines
from latentcache.sources.images import CLOSED_RULE, MAX_REPEATS, NO_CAPTION, Found
from latentcache.sources.known import (
    Known,
    Scan,
    Scanned,
    fold_reads,
    match_names,
    memo_row,
    memos_of,
    strings_of,
    take_rows,
)
from latentcache.sources.layouts.sets import CaptionRule, ImageSet, Layout
from latentcache.sources.reading import stat_source
from latentcache.sources.walk import Notes, Walk, in_order

_RULE = 1
_HASH_THREADS, _BLOCK = 4, 1 << 12
_OWN_COLUMNS = frozenset((SPAN, "repeats", "image_set"))


@dataclass(slots=True)
class _Archives:
    """The archives of a layout (F of them), in the byte order of their names."""

    names: list[str] = field(default_factory=list)
    stats: list[NDArray[np.uint64]] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    """The set of each."""

    @classmethod
    def of(cls, layout: Layout, walk: Walk) -> _Archives:
        """Those that a walk finds; others are rejected or noted there."""
        found, has_tars = cls(), any(one.archives == TAR for one in layout.sets)
        for level, start, stop in walk:
            for number in range(start, stop):
                name = level.prefix + level.names[number]
                owner, kind = layout.archive_set(name), kind_of_archive(name)
                if has_tars and is_packed(name):
                    walk.rejected.append(rejected(name, "compressed", f"{name} is compressed"))
                elif owner >= 0:
                    found.names.append(name)
                    found.stats.append(level.stats[number : number + 1])
                    found.owner.append(owner)
                elif kind and name in layout.used:
                    continue
                elif kind:
                    walk.notes.add(rejected(name, "archive-unused", f"{name} is in no set of the layout"))
                else:
                    walk.pass_over(name)
        walk.note_unused()
        for name in () if layout.folders else sorted({name for one in layout.sets for name in one.files}):
            found._look_up(layout, walk, name)
        return found

    def _look_up(self, layout: Layout, walk: Walk, name: str) -> None:
        """Add an archive whose folder is not listed."""
        try:
            memo = stat_source(layout.root / name)
        except UnusableSampleError as error:
            walk.rejected.append(as_rejected(name, error))
            return
        self.names.append(name)
        self.stats.append(memo_row(memo.identity)[None])
        self.owner.append(layout.archive_set(name))


@dataclass(slots=True, kw_only=True)
class _Rows:
    """Samples as they are read: a part for each archive."""

    names: list[Strings] = field(default_factory=list)
    texts: list[Strings] = field(default_factory=list)
    file: list[NDArray[np.int32]] = field(default_factory=list)
    line: list[NDArray[np.uint32]] = field(default_factory=list)
    span: list[NDArray[np.uint64]] = field(default_factory=list)
    has_text: list[NDArray[np.bool_]] = field(default_factory=list)
    """(n,) True if the caption is from the archive."""
    content: list[NDArray[np.uint8]] = field(default_factory=list)
    """(n, 16) of the captions."""


class ArchiveScan(Scan):
    """A scan of images in archives."""

    def __call__(self, layout: Layout) -> Scanned:
        """Every image in the archives of a layout.

        Raises:
            EmptySourceError: There is no image that could be used or rejected.
            SourceAmbiguousError: Several columns may hold the images or the captions.
            SourceError: The folder cannot be listed.
        """
        walk = Walk(layout.root, EXTENSIONS, used=layout.used, folders=layout.folders)
        archives = _Archives.of(layout, walk)
        for note in layout.notes:
            walk.notes.add(note)
        names = Strings.of(archives.names)
        reading = self._reading(layout, archives)
        held = self.held(names, memos_of(archives.stats), reading)
        before, trusted = self._as_before(held, reading), held.all_trusted
        unread, bad = np.zeros(len(names), dtype=np.bool_), list[Rejected]()
        if before is not None:
            samples = before
            bad += _of_archives(self.rejected, archives.names)
            for note in _of_archives(self.notes, archives.names):
                walk.notes.add(note)
        else:
            rows = self._read(layout, archives, unread, bad, walk.notes)
            files = Files(names=names, stat=held.stat, content=held.content, reading=reading)
            samples = self._with_known(layout, held, _table(files, layout, archives.owner, rows))
        found = _found(layout, archives.owner, samples)
        for note in found.notes():
            walk.notes.add(note)
        if not len(samples) and not bad and not walk.rejected and self.part is None:
            raise _nothing(layout, archives, walk)
        return Scanned(
            samples=samples,
            rejected=in_order([*walk.rejected, *bad]),
            notes=walk.notes.all(),
            unread=unread,
            files_unchanged=trusted,
            caption_source=next((word for word in found.captions if word != NO_CAPTION), NO_CAPTION),
            images=found,
        )

    def _rule(self, one: ImageSet) -> CaptionRule:
        return one.captions if self.captions else CLOSED_RULE

    def _reading(self, layout: Layout, archives: _Archives) -> NDArray[np.uint8]:
        """(F, 16) how each archive is read."""
        each = []
        for one in layout.sets:
            rule = self._rule(one)
            said = (_RULE, self._wanted, rule.reading, rule.text, rule.from_name and one.name)
            each.append(content_hash(repr(said).encode()))
        hashed = np.frombuffer(b"".join(each), dtype=np.uint8).reshape(-1, HASH_BYTES)
        return hashed[np.array(archives.owner, dtype=np.intp)]

    @property
    def _wanted(self) -> Wanted:
        return Wanted(image_column=self.image_column, caption_column=self.caption_column, captions=self.captions)

    def _as_before(self, held: Known, reading: NDArray[np.uint8]) -> SampleTable | None:
        """The samples of the snapshot, if no archive is new, gone or changed, and the snapshot has all of them."""
        if self.known is None or not held.all_trusted or any(item.target for item in self.rejected):
            return None
        if self.hash_all and not np.asarray(self.known.inputs["image"].content).any(axis=1).all():
            return None
        loaded = {
            name: replace(one, content=np.asarray(one.content), file=np.asarray(one.file), line=np.asarray(one.line))
            for name, one in self.known.inputs.items()
        }
        files = replace(self.known.files, stat=held.stat, content=held.content, reading=reading)
        columns = {name: np.asarray(column) for name, column in self.known.columns.items()}
        return replace(self.known, files=files, inputs=loaded, columns=columns)

    def _read(
        self, layout: Layout, archives: _Archives, unread: NDArray[np.bool_], bad: list[Rejected], notes: Notes
    ) -> _Rows:
        """The samples of all archives; those that cannot be read go to ``bad``."""
        rows = _Rows()
        for number, name in enumerate(archives.names):
            if self.stopping():
                unread[number] = True
                continue
            try:
                found = read_archive(layout.root, name, kind_of_archive(name), self._wanted)
            except UnusableSampleError as error:
                bad.append(as_rejected(name, error))
                continue
            bad += found.rejected
            for note in found.notes:
                notes.add(note)
            rule = self._rule(layout.sets[archives.owner[number]])
            texts = zip(found.line.tolist(), found.texts, strict=True)
            for note in unused_lines([(name, line) for line, text in texts if rule.unused_line(text)]):
                notes.add(note)
            self._add(rows, number, name, found, rule)
        return rows

    def _add(self, rows: _Rows, number: int, name: str, found: Entries, rule: CaptionRule) -> None:
        names = [name + own for own in found.names]
        texts = [rule.made(text) if text else "" for text in found.texts]
        has_text = np.array([bool(text) for text in texts], dtype=np.bool_)
        for place in np.flatnonzero(~has_text).tolist() if rule.text or rule.from_name else ():
            texts[place] = rule.fallback(names[place])
        kept: NDArray[np.intp] = np.arange(len(names))
        if self.part is not None:
            kept = np.flatnonzero([self.part.holds_name(one) for one in names])
            names, texts = [names[place] for place in kept], [texts[place] for place in kept]
        rows.names.append(Strings.of(names))
        rows.texts.append(Strings.of(texts))
        rows.file.append(np.full(len(kept), number, dtype=np.int32))
        rows.line.append(found.line[kept])
        rows.span.append(found.span[kept])
        rows.has_text.append(has_text[kept])
        content = hashes(texts)
        content[[not text and not rule.is_empty_by_choice for text in texts]] = 0
        rows.content.append(content)

    def _with_known(self, layout: Layout, held: Known, samples: SampleTable) -> SampleTable:
        """The samples with contents and columns that the snapshot knows or hashing finds to be as they were."""
        image = samples.inputs["image"]
        file, content = np.asarray(image.file), np.array(image.content)
        rows = np.full(len(samples), -1, dtype=np.int64)
        before = np.zeros_like(content)
        if self.known is not None:
            rows = match_names(samples.names, self.known.names)
            before = take_rows(self.known.inputs["image"].content, rows)
        trusted = held.place[file] >= 0
        content[trusted] = before[trusted]
        unknown = ~content.any(axis=1)
        asked = unknown if self.hash_all else unknown & (rows >= 0) & self.hash_known
        for done, hashed, memos in self.contents(layout.root, np.flatnonzero(asked), partial(places, samples)):
            content[done] = hashed
            fold_reads(held.stat, file[done], memos)
        same = content.any(axis=1) & (content == before).all(axis=1)
        columns = {n: c for n, c in held.columns(np.where(same, rows, -1)).items() if n not in _OWN_COLUMNS}
        columns.setdefault("original_size", np.zeros((len(samples), 2), dtype=np.uint32))
        inputs = {**samples.inputs, "image": replace(image, content=content)}
        return replace(samples, inputs=inputs, columns={**columns, **samples.columns})


def _table(files: Files, layout: Layout, owner: Sequence[int], rows: _Rows) -> SampleTable:
    """The samples that were read, without contents."""
    file = np.concatenate([np.zeros(0, np.int32), *rows.file])
    line = np.concatenate([np.zeros(0, np.uint32), *rows.line])
    has_text = np.concatenate([np.zeros(0, np.bool_), *rows.has_text])
    caption = Input(
        content=np.concatenate([np.zeros((0, HASH_BYTES), np.uint8), *rows.content]),
        file=np.where(has_text, file, -1).astype(np.int32),
        line=np.where(has_text, line, 0).astype(np.uint32),
        text=strings_of(rows.texts),
    )
    columns: dict[str, NDArray[np.generic]] = {SPAN: np.concatenate([np.zeros((0, 2), np.uint64), *rows.span])}
    own = np.array(owner, dtype=np.uint16)[file]
    repeats = np.array([min(one.repeats, MAX_REPEATS) for one in layout.sets], dtype=np.uint16)
    if (repeats != 1).any():
        columns["repeats"] = repeats[own]
    if len(layout.sets) > 1:
        columns["image_set"] = own
    image = Input(content=np.zeros((len(file), HASH_BYTES), dtype=np.uint8), file=file, line=line)
    return SampleTable(
        names=strings_of(rows.names), files=files, inputs={"image": image, "caption": caption}, columns=columns
    )


def _of_archives(items: Sequence[Rejected], names: Sequence[str]) -> list[Rejected]:
    """What was said of archives and of what is in them."""
    own = frozenset(names)

    def is_in(name: str) -> bool:
        return name in own or any(name[:end] in own for end, letter in enumerate(name) if letter == "/")

    return [item for item in items if item.reason != "no-caption" and is_in(item.name)]


def _found(layout: Layout, owner: Sequence[int], samples: SampleTable) -> Found:
    """Where captions are from, and the samples of each set."""
    caption, found = samples.inputs["caption"], Found()
    assert caption.text is not None
    file = np.asarray(caption.file).astype(np.int64)
    own = np.array(owner, dtype=np.int64)[np.asarray(samples.inputs["image"].file)]
    words = ["tar members" if one.archives == TAR else "column" for one in layout.sets]
    rules = [
        replace(one.captions, extensions=(), shared=(word,)) for one, word in zip(layout.sets, words, strict=True)
    ]
    chosen = Chosen(
        image=np.arange(len(samples)),
        caption=file,
        which=np.where(file >= 0, 0, -1).astype(np.int8),
        owner=own,
        repeats=own,
    )
    found.count(rules, chosen, caption.text, samples.names)
    return found


def _nothing(layout: Layout, archives: _Archives, walk: Walk) -> EmptySourceError:
    notes = "; ".join(note.detail for note in walk.notes.all()[:3])
    return EmptySourceError(
        f"no images in the {len(archives.names)} archives of {layout.root}",
        where=str(layout.root),
        why=notes or "they hold no members or rows",
        fix="say what the images are: --image-column NAME (of a tar: the end of their names, such as jpg)",
    )
