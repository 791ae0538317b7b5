"""What a data folder holds: the only place that guesses.

Decides what DATA is and where its captions come from: a table when there is one, files beside the pictures
otherwise. Guarantee: every picture file is in exactly one of samples, refused and notes; samples are in the byte
order of their names; a folder with nothing to encode is an error that says what was found instead.
Cost: one scandir per folder, one stat per picture, one open per caption file that is there.
"""

from __future__ import annotations

import shlex
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import (
    EmptySourceError,
    SourceError,
    SourceNotFoundError,
    UnusableSampleError,
    UsageError,
)
from latentcache.sources.captions import Caption, read_caption, sidecars
from latentcache.sources.causes import as_refusal, refusal
from latentcache.sources.listing import use_table
from latentcache.sources.reading import kind_of
from latentcache.sources.sample import Refusal, SampleColumns, Scan, unpack_identity
from latentcache.sources.sorting import PICTURE_EXTENSIONS
from latentcache.sources.table import find_table, read_table
from latentcache.sources.walk import Pictures, PictureWalk, Walk, check_listable, in_order, walk_pictures

#: Data formats that people point at and that this version does not read.
_NOT_READ = frozenset((".tar", ".parquet", ".jsonl", ".json", ".csv", ".arrow", ".zip", ".mp4", ".tfrecord"))
_NO_CAPTION = Caption(text="")
#: Samples that are given at once, as a rule: those of one folder are not parted.
_TOGETHER = 1 << 13
_NO_STATS = np.empty((0, 5), dtype=np.uint64)


def scan(data: Path, *, captions: bool = True) -> Scan:
    """Everything that is known about a data folder without decoding a picture.

    Args:
        data: The folder.
        captions: False leaves caption files closed: captions are empty, and no sample is refused for its caption.
            A table is read in any case, because it says which pictures are used.

    Raises:
        SourceNotFoundError: There is no such folder.
        UsageError: It is a file.
        EmptySourceError: There is no picture below it that could be used or refused.
        TableError: Its table cannot be read.
        SourceError: The folder cannot be listed.
    """
    found = Listing(data, captions=captions)
    several = list(found.parts())
    samples = several[0] if len(several) == 1 else SampleColumns.joined(several)
    return Scan(
        root=data,
        samples=samples,
        refused=found.refused,
        notes=found.notes,
        caption_source=found.caption_source,
    )


class Listing:
    """The same, some samples at a time, in the byte order of their names: to be gone through once.

    ``refused``, ``notes`` and ``caption_source`` are known when it was gone through. Memory: the names in one folder
    and those above it; where there is a table, all of it.

    Raises:
        SourceNotFoundError: There is no such folder.
        UsageError: It is a file.
    """

    def __init__(self, data: Path, *, captions: bool = True) -> None:
        _check_folder(data)
        self.root = data
        self.refused: tuple[Refusal, ...] = ()
        self.notes: tuple[Refusal, ...] = ()
        self.caption_source = "none"
        self._captions = captions
        self._others: Mapping[str, int] = {}

    def parts(self) -> Iterator[SampleColumns]:
        """Samples in columns, a few thousand at a time.

        Raises:
            EmptySourceError: There is no picture that could be used or refused.
            TableError: The table cannot be read.
            SourceError: The folder cannot be listed.
        """
        check_listable(self.root)
        table = find_table(self.root)
        any_samples = False
        for part in self._of_table(table) if table else self._of_pictures():
            any_samples = any_samples or len(part) > 0
            yield part
        if not any_samples and not self.refused:
            raise _nothing(self._others, self.root, self.notes)

    def _of_table(self, table: str) -> Iterator[SampleColumns]:
        """Samples are the rows."""
        walk = walk_pictures(self.root)
        found, self._others = _by_table(table, walk), walk.others
        self.refused, self.notes, self.caption_source = found.refused, found.notes, found.caption_source
        yield SampleColumns.of(found.samples)

    def _of_pictures(self) -> Iterator[SampleColumns]:
        """Samples are the pictures."""
        walk, taken = PictureWalk(self.root), _Taken()
        self._others = walk.others
        for some in walk:
            taken.add(some, captions=self._captions)
            if len(taken.names) >= _TOGETHER:
                yield taken.columns()
        yield taken.columns()
        self.refused = in_order([*walk.refused, *taken.refused])
        self.notes = in_order([*walk.notes, *taken.notes])
        self.caption_source = "sidecar" if taken.has_captions else "none"


def _by_table(table: str, walk: Walk) -> Scan:
    """Samples are the rows."""
    rows, notes = read_table(walk.root, table, set(walk.names))
    listed = use_table(table, rows, walk)
    by_name = {sample.name: sample for sample in listed.samples}
    return Scan(
        root=walk.root,
        samples=tuple(by_name[name] for name in walk.names if name in by_name),
        refused=in_order([*walk.refused, *listed.refused]),
        notes=in_order([*walk.notes, *notes, *listed.notes, *_unused_sidecars(table, walk)]),
        caption_source=table,
    )


def _unused_sidecars(table: str, walk: Walk) -> Iterator[Refusal]:
    """One note when caption files lie beside the pictures and a table speaks instead."""
    unused = [file for name in walk.names for file in sidecars(name, walk)]
    if unused:
        detail = f"{len(unused)} caption files beside pictures are not used, the first is {unused[0]}"
        yield refusal(table, "sidecar-unused", detail)


@dataclass(slots=True)
class _Taken:
    """Samples with their captions that were not given yet, and words on the rest."""

    names: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    stats: list[NDArray[np.uint64]] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    notes: list[Refusal] = field(default_factory=list)
    has_captions: bool = False

    def add(self, some: Pictures, *, captions: bool) -> None:
        """The pictures whose captions can be used; all of them where there is no caption file beside them."""
        if not some.texts:
            self.names += some.names
            self.captions += [""] * len(some.names)
            self.stats.append(some.stats)
            return
        kept = []
        for number, name in enumerate(some.names):
            files = sidecars(name, some)
            self.has_captions = self.has_captions or bool(files)
            caption = self._caption(number, files if captions else (), some)
            if caption is not None:
                kept.append(number)
                self.names.append(name)
                self.captions.append(caption)
        self.stats.append(some.stats[kept])

    def columns(self) -> SampleColumns:
        """What was not given yet."""
        stats = self.stats[0] if len(self.stats) == 1 else np.concatenate([_NO_STATS, *self.stats])
        given = SampleColumns(self.names, self.captions, stats)
        self.names, self.captions, self.stats = [], [], []
        return given

    def _caption(self, number: int, files: tuple[str, ...], some: Pictures) -> str | None:
        """The caption of one picture; None where it is refused for it."""
        try:
            caption = read_caption(files, some) if files else _NO_CAPTION
        except UnusableSampleError as error:
            stat = unpack_identity(some.stats[number].tolist())
            self.refused.append(as_refusal(some.names[number], error, stat=stat))
            return None
        if caption.note:
            self.notes.append(caption.note)
        return caption.text


def _check_folder(data: Path) -> None:
    """Refuse what is no folder.

    Raises:
        SourceNotFoundError: Nothing is there.
        UsageError: It is something else.
        SourceError: The system does not say.
    """
    try:
        mode = data.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        fix = "check the path; `latentcache build DATA` takes a folder of pictures"
        raise SourceNotFoundError(
            f"no such folder: {data}", where=str(data), why=str(error.strerror), fix=fix
        ) from error
    except OSError as error:
        fix = f"check it with `ls -ld {shlex.quote(str(data))}`"
        raise SourceError(
            f"the data folder cannot be used: {data}", where=str(data), why=str(error.strerror), fix=fix
        ) from error
    if not stat.S_ISDIR(mode):
        parent = shlex.quote(str(data.parent))
        why = f"expected a folder of pictures, found {'a file' if stat.S_ISREG(mode) else kind_of(mode)}"
        fix = f"give the folder that holds the pictures: `latentcache build {parent}`"
        raise UsageError(f"DATA is no folder: {data}", where=str(data), why=why, fix=fix)


def _nothing(others: Mapping[str, int], root: Path, notes: Sequence[Refusal]) -> EmptySourceError:
    """What was looked for, and what is there instead."""
    parts = [f"looked for {' '.join(sorted(PICTURE_EXTENSIONS))}", _what_is_there(others)]
    unread = sorted(_NOT_READ & others.keys())
    if unread:
        parts.append(f"this version does not read {' '.join(unread)}")
    parts.extend(_noted(root, notes))
    fix = "give the folder that holds the pictures: `latentcache build FOLDER`"
    return EmptySourceError(f"no pictures in {root}", where=str(root), why="; ".join(parts), fix=fix)


def _what_is_there(others: Mapping[str, int]) -> str:
    """How many other files there are, and the commonest endings of them."""
    total = sum(others.values())
    if not total:
        return "found no files"
    common = sorted(others.items(), key=lambda item: (-item[1], item[0]))[:5]
    words = ", ".join(f"{count} {extension or 'without ending'}" for extension, count in common)
    return f"found {total} other file{'s' * (total > 1)} ({words})"


def _noted(root: Path, notes: Sequence[Refusal]) -> Iterator[str]:
    """What was passed over on purpose: that may be where the pictures are."""
    counts = Counter(note.cause for note in notes)
    if counts["hidden"]:
        yield f"{counts['hidden']} with names that begin with a dot are not used"
    if counts["cache-folder"] or (root / "CURRENT").is_file():
        yield "there is a cache in it, which is not read as data"
