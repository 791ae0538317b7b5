"""Folders of images: which files are samples, and their captions, in columns.

A table (``metadata.csv`` or ``metadata.jsonl`` in the folder itself) decides both if there is one; otherwise every
image is a sample, with the caption file beside it. Images are not opened here. Cost: one scandir per folder, one stat
per image and caption file, one read per caption file that is new or may have changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, UnusableSampleError
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.sources.captions import CAPTION_EXTENSIONS, read_caption
from latentcache.sources.causes import as_rejected, rejected
from latentcache.sources.known import Known, Scanned, memo_row, memos_of, strings_of, take_rows
from latentcache.sources.part import Part
from latentcache.sources.reading import read_source
from latentcache.sources.table import find_table, match_rows, read_table
from latentcache.sources.walk import Level, Walk, extension_of, in_order

#: Extensions of the formats that are read, in lower case.
READ_EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
)
#: Extensions that make a file an image; unsupported ones are rejected later, by content.
IMAGE_EXTENSIONS = READ_EXTENSIONS | {".heic", ".heif", ".jxl", ".svg"}
_BOTH = frozenset((*IMAGE_EXTENSIONS, *CAPTION_EXTENSIONS))
_BLOCK = 1 << 14
_HASH_THREADS = 4


class _Found:
    """The files of a walk: images of the part, and caption files that belong to one; others are noted."""

    def __init__(self, walk: Walk, part: Part | None) -> None:
        self.walk, self._part, self._count = walk, part, 0
        self.seconds = dict[int, int]()
        """Image -> its second caption file, by position."""
        self.links_out = set[str]()
        self._stats = list[NDArray[np.uint64]]()
        self._images, self._captions = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        self.names = strings_of(self._walked())
        self.memos = memos_of(self._stats)
        self.images = np.concatenate(self._images)
        """(n,) positions of images among the files, in the byte order of their names."""
        self.beside = np.concatenate(self._captions)
        """(n,) those of their captions; -1: none."""
        walk.note_unused()

    def _walked(self) -> Iterator[Sequence[str]]:
        """The names of the files, folder by folder."""
        for level, start, stop in self.walk:
            if level.mark is None:
                level.mark, names = self._entered(level)
                yield names
            place, caption = level.mark
            some = place[start:stop]
            self._images.append(some[some >= 0])
            self._captions.append(caption[start:stop][some >= 0])

    def _entered(self, level: Level) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], Sequence[str]]:
        """Positions of the image and of its caption for each name of a folder (-1: none), and the names it takes."""
        names, prefix = level.names, level.prefix
        if {ending.lower() for ending in {name[name.rfind(".") :] for name in names}} <= IMAGE_EXTENSIONS:
            is_image = np.ones(len(names), dtype=np.bool_)
        else:
            is_image = np.array([extension_of(name) in IMAGE_EXTENSIONS for name in names], dtype=np.bool_)
        caption, second = np.full(len(names), -1, dtype=np.int64), dict[int, int]()
        kept = is_image.copy()
        if self._part is not None:
            kept &= np.array([self._part.holds_name(prefix + name) for name in names], dtype=np.bool_)
        if not is_image.all():
            used = _beside(names, is_image, caption, second)
            for number in np.flatnonzero(~is_image & ~used).tolist():
                detail = "no image beside it has its name"
                self.walk.notes.add(rejected(prefix + names[number], "caption-unused", detail))
            kept[caption[kept & (caption >= 0)]] = True
            kept[[second[image] for image in second if kept[image]]] = True
        place = np.where(kept, np.cumsum(kept) - 1 + self._count, -1)
        caption = np.where(caption >= 0, place[caption], -1)
        self.seconds |= {int(place[image]): int(place[text]) for image, text in second.items() if kept[image]}
        self.links_out.update(prefix + name for name in level.links_out)
        names = names if kept.all() else [name for name, keep in zip(names, kept.tolist(), strict=True) if keep]
        self._stats.append(level.stats if kept.all() else level.stats[kept])
        self._count += len(names)
        return (np.where(is_image, place, -1), caption), [prefix + name for name in names] if prefix else names


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageScan:
    """What a scan of images is asked for; see ``scan.scan``."""

    captions: bool = True
    part: Part | None = None
    known: SampleTable | None = None
    rejected: Sequence[Rejected] = ()
    reread: NDArray[np.bool_] | None = None
    hash_all: bool = False
    hash_known: bool = False
    stopping: Callable[[], bool] = bool

    def __call__(self, root: Path) -> Scanned:
        """Every image below a folder.

        Raises:
            EmptySourceError: There is no image that could be used or rejected.
            TableError: The table cannot be read.
            SourceError: The folder cannot be listed.
        """
        table = find_table(root)
        walk = Walk(root, _BOTH, loose=frozenset(CAPTION_EXTENSIONS), used=frozenset((table,)))
        found = _Found(walk, None if table else self.part)
        listing = self._of_table(table, found) if table else self._of_folder(found)
        if not len(listing.samples) and not listing.rejected and self.part is None:
            raise _nothing(walk, listing.notes)
        return listing

    def _held(self, names: Strings, memos: NDArray[np.uint64]) -> Known:
        held = Known(self.known, names, memos, self.rejected)
        if self.reread is not None:
            held.distrust((held.place >= 0) & self.reread[held.place])
        return held

    def _of_folder(self, found: _Found) -> Scanned:
        """Samples are the images."""
        walk, names, images = found.walk, found.names, found.images
        held, bad = self._held(names, found.memos), list[Rejected]()
        trusted = held.all_trusted
        beside = found.beside if self.captions else np.full(len(images), -1, dtype=np.int64)
        captions = _Captions(walk.root, names, held, found.links_out)
        good = captions.read(images, beside, bad)
        images, beside = images[good], beside[good]
        if self.captions and found.seconds:
            for item in captions.conflicts(images, beside, found.seconds):
                walk.notes.add(item)
        return Scanned(
            unread=self._hash(walk.root, names, images, held),
            samples=_samples(names, held, images, captions.column(beside)),
            rejected=in_order([*walk.rejected, *bad]),
            notes=walk.notes.all(),
            caption_source="sidecar" if (beside >= 0).any() else "none",
            files_unchanged=trusted,
        )

    def _of_table(self, table: str, found: _Found) -> Scanned:
        """Samples are the rows."""
        walk, listed = found.walk, found.names.take(found.images)
        places = dict(zip(listed, found.images.tolist(), strict=True))
        rows, content, memo, notes = read_table(walk.root, table, places)
        said = {item.name for item in (*walk.rejected, *walk.notes.all())}
        matched = match_rows(table, rows, places, said, walk.root)
        for item in (*notes, *matched.notes, *_unused_sidecars(table, found.names, found.beside)):
            walk.notes.add(item)
        taken = matched.samples
        chosen = [name for name in listed if name in taken and (not self.part or self.part.holds_name(name))]
        files = np.array([places[name] for name in chosen], dtype=np.int64)
        names = strings_of([chosen, [table]])
        held = self._held(names, np.concatenate([found.memos[files], memo_row((*memo.identity, 0))[None]]))
        trusted = held.all_trusted
        held.remember(len(chosen), content, memo)
        own = [taken[name] for name in chosen]
        texts = [row.caption for row in own]
        caption = Input(
            content=_hashes(texts),
            file=np.full(len(own), len(chosen), dtype=np.int32),
            line=np.array([row.line for row in own], dtype=np.uint32),
            text=strings_of([texts]),
        )
        images = np.arange(len(chosen))
        return Scanned(
            unread=self._hash(walk.root, names, images, held),
            samples=_samples(names, held, images, caption),
            rejected=in_order([*walk.rejected, *matched.rejected]),
            notes=walk.notes.all(),
            caption_source=table,
            files_unchanged=trusted,
        )

    def _hash(self, root: Path, names: Strings, images: NDArray[np.int64], held: Known) -> NDArray[np.bool_]:
        """Hash images of unknown content if asked for; (F,) True for those that there was no time for."""
        unread = np.zeros(len(names), dtype=np.bool_)
        touched = images[held.touched[images] >= 0] if self.hash_known else images[:0]
        unknown = images[~held.content[images].any(axis=1)] if self.hash_all else touched

        def read(file: int) -> None:
            if self.stopping():
                unread[file] = True
                return
            try:
                data, memo = read_source(root / names[file])
            except UnusableSampleError:
                return  # whoever encodes it says why
            held.remember(file, content_hash(data), memo)

        if len(unknown):
            with ThreadPoolExecutor(_HASH_THREADS) as pool:
                list(pool.map(read, unknown.tolist()))
        if len(touched):
            held.believe_equal(touched)
        return unread


def holds_images(root: Path) -> bool:
    """True if any file below a folder is an image by its name."""
    return any(stop > start for _, start, stop in Walk(root, IMAGE_EXTENSIONS))


def _beside(
    names: Sequence[str], is_image: NDArray[np.bool_], caption: NDArray[np.int64], second: dict[int, int]
) -> NDArray[np.bool_]:
    """Fill in the caption file of each image, and the second one if there are two; (n,) True for those files."""
    texts = {}
    for number in np.flatnonzero(~is_image).tolist():
        name, dot = names[number], names[number].rfind(".")
        texts[name[:dot] + name[dot:].lower()] = number  # of a.TXT and a.txt the later one wins
    used = np.zeros(len(names), dtype=np.bool_)
    for number in np.flatnonzero(is_image).tolist() if texts else []:
        stem = names[number][: names[number].rfind(".")]
        files = [texts[file] for ending in CAPTION_EXTENSIONS if (file := stem + ending) in texts]
        if files:
            caption[number] = files[0]
            used[files] = True
        if len(files) > 1:
            second[number] = files[1]
    return used


class _Captions:
    """The captions of images, from the snapshot or from their files."""

    def __init__(self, root: Path, names: Strings, held: Known, links_out: AbstractSet[str]) -> None:
        self._root, self._names, self._held, self._links_out = os.fspath(root), names, held, links_out
        self._texts: dict[int, str] = {}

    def read(self, images: NDArray[np.int64], files: NDArray[np.int64], bad: list[Rejected]) -> NDArray[np.bool_]:
        """Read the caption files that are not known; (n,) False for images whose caption is rejected, see ``bad``."""
        good = np.ones(len(images), dtype=np.bool_)
        self._known = self._held.rows_of("caption", files)
        for number in np.flatnonzero((files >= 0) & (self._known < 0)).tolist():
            image = int(images[number])
            try:
                self._open(int(files[number]))
            except UnusableSampleError as error:
                good[number] = False
                stat = (*self._held.stat[image, :5].view(np.int64).tolist(), 0)
                bad.append(replace(as_rejected(self._names[image], error), stat=stat))
        self._known = self._known[good]
        return good

    def conflicts(
        self, images: NDArray[np.int64], files: NDArray[np.int64], seconds: dict[int, int]
    ) -> Iterator[Rejected]:
        """Notes on second caption files that say something else."""
        for number in np.flatnonzero(np.isin(images, list(seconds))).tolist():
            first, second = int(files[number]), seconds[int(images[number])]
            try:
                says = "" if self._open(first) == self._open(second) else "says something else"
            except UnusableSampleError:
                says = "cannot be read"
            if says:
                used, other = self._names.take([first, second])
                yield rejected(other, "caption-conflict", f"{used} is used; {other} {says}")

    def column(self, files: NDArray[np.int64]) -> Input:
        """The captions of the images that ``read`` found good, whose files these are."""
        old = self._held.table.inputs["caption"] if (self._known >= 0).any() and self._held.table else None
        file = files.astype(np.int32)
        if old is not None and old.text is not None and self._held.is_whole(self._known):
            return Input(content=np.asarray(old.content), file=file, text=old.text)
        content = np.tile(np.frombuffer(content_hash(b""), dtype=np.uint8), (len(files), 1))
        known = np.flatnonzero(self._known >= 0)
        if old is not None:
            content[known] = take_rows(old.content, self._known[known])
        read = [number for number in np.flatnonzero(files >= 0).tolist() if int(files[number]) in self._texts]
        content[read] = _hashes([self._texts[int(files[number])] for number in read])

        def texts() -> Iterator[list[str]]:
            for start in range(0, len(files), _BLOCK):
                block = slice(start, start + _BLOCK)
                some = [self._texts.get(place, "") for place in files[block].tolist()]
                own = np.flatnonzero(self._known[block] >= 0)
                if old is not None and old.text is not None and len(own):
                    for number, text in zip(own.tolist(), old.text.take(self._known[block][own]), strict=True):
                        some[number] = text
                yield some

        return Input(content=content, file=file, text=strings_of(texts()))

    def _open(self, file: int) -> str:
        """The text of a caption file."""
        if file not in self._texts:
            name = self._names[file]
            text, content, memo = read_caption(self._root, name, outside=name in self._links_out)
            self._texts[file] = text
            if memo is not None:
                self._held.remember(file, content, memo)
        return self._texts[file]


def _hashes(texts: Sequence[str]) -> NDArray[np.uint8]:
    """(n, 16) content hashes of captions."""
    joined = b"".join([content_hash(text.encode()) for text in texts])
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, HASH_BYTES)


def _samples(names: Strings, held: Known, images: NDArray[np.int64], caption: Input) -> SampleTable:
    """The table of images at these positions among the files."""
    rows = held.rows_of("image", images)
    columns = held.columns(rows)
    columns.setdefault("original_size", np.zeros((len(images), 2), dtype=np.uint32))
    every = len(images) == len(names) and bool((np.diff(images) == 1).all())
    content = held.content if every else held.content[images]
    same = held.table if held.is_whole(rows) else None
    return SampleTable(
        names=names if every else same.names if same else _selected(names, images),
        files=Files(names=names, stat=held.stat, content=held.content),
        inputs={"image": Input(content=content, file=images.astype(np.int32)), "caption": caption},
        columns=columns,
    )


def _selected(names: Strings, places: NDArray[np.int64]) -> Strings:
    return strings_of(names.take(places[start : start + _BLOCK]) for start in range(0, len(places), _BLOCK))


def _unused_sidecars(table: str, names: Strings, beside: NDArray[np.int64]) -> Iterator[Rejected]:
    """One note if caption files are beside the images and a table decides instead."""
    unused = np.unique(beside[beside >= 0])
    if len(unused):
        detail = f"{len(unused)} caption files beside images are not used, the first is {names[int(unused[0])]}"
        yield rejected(table, "sidecar-unused", detail, count=len(unused))


def _nothing(walk: Walk, notes: Sequence[Rejected]) -> EmptySourceError:
    """What was looked for, and what is there instead."""
    parts = [f"looked for {' '.join(sorted(IMAGE_EXTENSIONS))}", _what_is_there(walk.others, notes)]
    counts = Counter[str]()
    for note in notes:
        counts[note.reason] += note.count
    if counts["hidden"]:
        parts.append(f"{counts['hidden']} with names that begin with a dot are not used")
    if counts["cache-folder"] or (walk.root / "CURRENT").is_file():
        parts.append("there is a cache in it, which is not read as data")
    fix = "give the folder that holds the images: `latentcache build FOLDER`"
    return EmptySourceError(f"no images in {walk.root}", where=str(walk.root), why="; ".join(parts), fix=fix)


def _what_is_there(others: Counter[str], notes: Sequence[Rejected]) -> str:
    """How many other files there are, and the commonest endings of them."""
    counts = Counter(others)
    for note in notes:
        counts[extension_of(note.name)] += note.count * (note.reason == "caption-unused")
    total = counts.total()
    if not total:
        return "found no files"
    common = sorted(((name, n) for name, n in counts.items() if n), key=lambda item: (-item[1], item[0]))[:5]
    words = ", ".join(f"{count} {extension or 'without ending'}" for extension, count in common)
    return f"found {total} other file{'s' * (total > 1)} ({words})"
