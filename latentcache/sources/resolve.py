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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
from latentcache.sources.table import find_table, read_table
from latentcache.sources.walk import PICTURE_EXTENSIONS, Walk, in_order, walk_pictures

#: Data formats that people point at and that this version does not read.
_NOT_READ = frozenset((".tar", ".parquet", ".jsonl", ".json", ".csv", ".arrow", ".zip", ".mp4", ".tfrecord"))
_NO_CAPTION = Caption(text="")


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
    _check_folder(data)
    walk = walk_pictures(data)
    table = find_table(data)
    result = _by_table(table, walk) if table else _by_sidecars(walk, captions)
    if not result.samples and not result.refused:
        raise _nothing(walk)
    return result


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
    """Captions and words on the rest, so far."""

    kept: list[int] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    notes: list[Refusal] = field(default_factory=list)


def _by_sidecars(walk: Walk, captions: bool) -> Scan:
    """Samples are the pictures."""
    taken, has_captions = _Taken(), False
    for number, name in enumerate(walk.names) if walk.texts else ():
        files = sidecars(name, walk)
        has_captions = has_captions or bool(files)
        _take(number, files if captions else (), walk, taken)
    return Scan(
        root=walk.root,
        samples=_samples(walk, taken),
        refused=in_order([*walk.refused, *taken.refused]),
        notes=in_order([*walk.notes, *taken.notes]),
        caption_source="sidecar" if has_captions else "none",
    )


def _samples(walk: Walk, taken: _Taken) -> SampleColumns:
    """The pictures whose captions can be used; all of them where there is no caption file at all."""
    if not walk.texts:
        return SampleColumns(walk.names, [""] * len(walk.names), walk.stats)
    return SampleColumns([walk.names[i] for i in taken.kept], taken.captions, walk.stats[taken.kept])


def _take(number: int, files: tuple[str, ...], walk: Walk, taken: _Taken) -> None:
    """One picture with its caption, or refused for it."""
    try:
        caption = read_caption(files, walk) if files else _NO_CAPTION
    except UnusableSampleError as error:
        stat = unpack_identity(walk.stats[number].tolist())
        taken.refused.append(as_refusal(walk.names[number], error, stat=stat))
        return
    if caption.note:
        taken.notes.append(caption.note)
    taken.kept.append(number)
    taken.captions.append(caption.text)


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


def _nothing(walk: Walk) -> EmptySourceError:
    """What was looked for, and what is there instead."""
    parts = [f"looked for {' '.join(sorted(PICTURE_EXTENSIONS))}", _what_is_there(walk.others)]
    unread = sorted(_NOT_READ & walk.others.keys())
    if unread:
        parts.append(f"this version does not read {' '.join(unread)}")
    parts.extend(_noted(walk))
    fix = "give the folder that holds the pictures: `latentcache build FOLDER`"
    return EmptySourceError(f"no pictures in {walk.root}", where=str(walk.root), why="; ".join(parts), fix=fix)


def _what_is_there(others: Mapping[str, int]) -> str:
    """How many other files there are, and the commonest endings of them."""
    total = sum(others.values())
    if not total:
        return "found no files"
    common = sorted(others.items(), key=lambda item: (-item[1], item[0]))[:5]
    words = ", ".join(f"{count} {extension or 'without ending'}" for extension, count in common)
    return f"found {total} other file{'s' * (total > 1)} ({words})"


def _noted(walk: Walk) -> Iterator[str]:
    """What was passed over on purpose: that may be where the pictures are."""
    counts = Counter(note.cause for note in walk.notes)
    if counts["hidden"]:
        yield f"{counts['hidden']} with names that begin with a dot are not used"
    if counts["cache-folder"] or (walk.root / "CURRENT").is_file():
        yield "there is a cache in it, which is not read as data"
