"""Which files of DATA hold records.

Decided by what is there, in this order: a folder that ``datasets`` saved (``state.json`` or ``dataset_dict.json``), a
folder with LLaMA-Factory's ``dataset_info.json``, else all files of records below the folder in the byte order of their
names; if there are none, its text files. A text file is one document, or one for each line if asked. Cost: one
listing of each folder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, SourceError, SourceNotFoundError, UsageError
from latentcache.fields.strings import Strings
from latentcache.fields.table import Rejected
from latentcache.sources.causes import rejected
from latentcache.sources.datasets import (
    DICT_NAME,
    INFO_NAME,
    STATE_NAME,
    is_dataset_info,
    is_saved,
    read_dataset_info,
    saved_files,
)
from latentcache.sources.known import strings_of
from latentcache.sources.record_files import KINDS, Way
from latentcache.sources.records import TEXT, RecordFormat
from latentcache.sources.walk import Notes, Walk, extension_of, pack_identity

#: Formats of records that are not read where they are loose.
_UNREAD = (".csv", ".tsv", ".arrow")
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4")
_WANTED = frozenset((*KINDS, *_UNREAD, *PACKED))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFiles:
    """The F files to read, and the rest."""

    root: Path
    names: Strings
    """Below the root."""
    way: NDArray[np.intp]
    """(F,) position in ``ways``."""
    ways: tuple[Way, ...]
    stats: NDArray[np.uint64]
    """(F, 5) see ``walk.Level``; zeros for a file without a state."""
    alone: bool = False
    """True if DATA is this one file."""
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[Rejected, ...] = ()

    def __len__(self) -> int:
        return len(self.names)


def find_records(
    data: Path, *, datasets: tuple[str, ...], text_lines: bool, form: RecordFormat | None
) -> RecordFiles:
    """The files of records in a file or folder, not opened yet.

    Raises:
        SourceNotFoundError: There is nothing at this path.
        EmptySourceError: There is no file of records in it.
        SourceError: Its dataset_info.json cannot be read, or pyarrow is needed and not installed.
        UsageError: A kind of file that is not read, or a data set that does not exist.
    """
    if not data.exists():
        raise SourceNotFoundError(f"there is no data at {data}", where=str(data.absolute()), fix="check the path")
    if data.name == INFO_NAME:
        data = data.parent
    if data.is_file():
        way = Way(kind=_kind_of_single(data), form=form, text_lines=text_lines)
        files = replace(_named(data.parent, [(data.name, way)]), alone=True)
    elif datasets and not is_dataset_info(data):
        fix = f"leave --dataset out, or put {INFO_NAME} there"
        raise UsageError(f"{data} has no {INFO_NAME}", where=str(data), fix=fix)
    elif is_saved(data):
        arrow = Way(kind="arrow", form=form)
        files = _with_unused(_named(data, [(name, arrow) for name in saved_files(data)]))
    elif is_dataset_info(data):
        files = _with_unused(_by_info(data, datasets))
    else:
        files = _by_walk(data, Way(kind="", form=form, text_lines=text_lines))
    if not len(files) and not files.rejected:
        raise _nothing(data)
    if any(way.kind in ("parquet", "arrow") for way in files.ways) and find_spec("pyarrow") is None:
        raise SourceError(
            "pyarrow is not installed, and these files need it",
            where=str(data),
            why="parquet files and saved data sets are read by an extra",
            fix="pip install 'latentcache[hf]'",
            slug="extra-missing",
        )
    return files


def possible_ways(root: Path, *, text_lines: bool, form: RecordFormat | None) -> list[Way]:
    """Every way in which files below a folder are read with these options."""
    kinds = sorted({*KINDS.values(), "arrow"})
    ways = [Way(kind=kind, form=form, text_lines=text_lines and kind != "arrow") for kind in kinds]
    try:
        forms = [dataset.form for dataset in read_dataset_info(root)[0]] if is_dataset_info(root) else []
    except SourceError:
        forms = []
    return [*ways, *(Way(kind=kind, form=one, text_lines=True) for one in forms for kind in kinds)]


def is_records_file(data: Path) -> bool:
    """True if DATA is meant as records by its name or its form: a file of records, or a described folder."""
    try:
        if data.is_file():
            return extension_of(data.name) in KINDS or data.name == INFO_NAME
        return data.is_dir() and (is_saved(data) or is_dataset_info(data))
    except OSError:  # whoever reads it reports it
        return False


def _kind_of_single(path: Path) -> str:
    kind = KINDS.get(extension_of(path.name))
    if kind is None:
        packed = extension_of(path.name) in PACKED
        raise UsageError(
            f"{path.name} is not a supported file of records",
            where=str(path),
            why="it is packed" if packed else f"expected one of {', '.join(KINDS)}",
            fix="unpack it first, e.g. `gunzip -k` or `zstd -d`" if packed else "rename it by its format",
        )
    return kind


def _named(
    root: Path, files: Sequence[tuple[str, Way]], bad: Sequence[Rejected] = (), notes: Sequence[Rejected] = ()
) -> RecordFiles:
    """Files that were named one by one."""
    ways = list(dict.fromkeys(way for _, way in files))
    stats = np.zeros((len(files), 5), dtype=np.uint64)
    for number, (name, _) in enumerate(files):
        try:
            stats[number] = pack_identity((root / name).stat())
        except OSError:
            continue  # reading it gives the reason
    return RecordFiles(
        root=root,
        names=Strings.of(name for name, _ in files),
        way=np.array([ways.index(way) for _, way in files], dtype=np.intp),
        ways=tuple(ways),
        stats=stats,
        rejected=tuple(bad),
        notes=tuple(notes),
    )


def _with_unused(files: RecordFiles) -> RecordFiles:
    """With notes on files below the root that nothing names."""
    state = [f"{folder}{STATE_NAME}" for folder in {name.rpartition("/")[0] + "/" for name in files.names}]
    said = [item.name for item in (*files.rejected, *files.notes)]
    used = {*files.names, *said, *state, INFO_NAME, DICT_NAME, STATE_NAME}
    walk = Walk(files.root, frozenset(), used=used)
    for _ in walk:
        pass
    walk.note_unused()
    return replace(files, notes=(*files.notes, *walk.notes.all()))


def _by_info(folder: Path, names: tuple[str, ...]) -> RecordFiles:
    datasets, bad, notes = read_dataset_info(folder, names)
    files: list[tuple[str, Way]] = []
    for dataset in datasets:
        path = folder / dataset.file
        if not path.is_dir():
            _take(path.relative_to(folder).as_posix(), dataset.form, files, bad, bad)
            continue
        walk = Walk(path, _WANTED)
        place = path.relative_to(folder).as_posix()
        for name in _names(walk):
            _take(f"{place}/{name}", dataset.form, files, bad, notes)
        walk.note_unused()
        notes += [replace(note, name=f"{place}/{note.name}") for note in walk.notes.all()]
        bad += [replace(item, name=f"{place}/{item.name}") for item in walk.rejected]
    return _named(folder, files, bad, notes)


def _names(walk: Walk) -> Iterable[str]:
    for level, start, stop in walk:
        yield from (level.prefix + name for name in level.names[start:stop])


def _take(
    name: str, form: RecordFormat, files: list[tuple[str, Way]], bad: list[Rejected], unread: list[Rejected]
) -> None:
    """A file that an entry names, or that is in a folder that it names; ``unread`` takes one of another format."""
    extension = extension_of(name)
    kind = KINDS.get(extension)
    if extension in PACKED:
        bad.append(rejected(name, "compressed", f"{name} is packed"))
        return
    if kind is None:
        why = f"expected one of {', '.join(KINDS)}; found {extension or 'no extension'}"
    elif kind == "text" and (form.form, form.text) != (TEXT.form, TEXT.text):
        why = f"it holds texts, whose one column is text, and its entry in {INFO_NAME} names others"
    else:
        files.append((name, Way(kind=kind, form=form, text_lines=True)))  # to LLaMA-Factory, each line is a row
        return
    unread.append(rejected(name, "unread-form" if unread is bad else "table-unused", f"{name}: {why}"))


def _by_walk(folder: Path, common: Way) -> RecordFiles:
    """All files of records; text files only if there are none."""
    walk = Walk(folder, _WANTED)
    names: list[Sequence[str]] = []
    stats = [np.empty((0, 5), dtype=np.uint64)]
    kinds: list[str] = []
    for level, start, stop in walk:
        some = level.names[start:stop]
        names.append([level.prefix + name for name in some])
        stats.append(level.stats[start:stop])
        kinds += [KINDS.get(extension_of(name), extension_of(name)) for name in some]
    walk.note_unused()
    kind = np.array(kinds, dtype=np.str_)
    every = strings_of(names)
    chosen = np.flatnonzero(np.isin(kind, ("json", "parquet")))
    is_text = not len(chosen)
    chosen = np.flatnonzero(kind == "text") if is_text else chosen
    _note_others(walk.notes, every, kind, is_text)
    packed = [
        rejected(name, "compressed", f"{name} is packed")
        for name in every.take(np.flatnonzero(np.isin(kind, PACKED)))
    ]
    ways = ["text"] if is_text else ["json", "parquet"]
    used = [way for way in ways if (kind[chosen] == way).any()]
    return RecordFiles(
        root=folder,
        names=every.select(chosen) if len(chosen) < len(every) else every,
        way=np.searchsorted(np.array(used, dtype=np.str_), kind[chosen]) if used else np.empty(0, dtype=np.intp),
        ways=tuple(replace(common, kind=way) for way in used),
        stats=np.concatenate(stats)[chosen],
        rejected=(*walk.rejected, *packed),
        notes=walk.notes.all(),
    )


def _note_others(notes: Notes, names: Strings, kind: NDArray[np.str_], is_text: bool) -> None:
    for name in names.take(np.flatnonzero(np.isin(kind, _UNREAD))):
        notes.add(rejected(name, "table-unused", f"{name} is of a format that is not supported"))
    for name in [] if is_text else names.take(np.flatnonzero(kind == "text")):
        notes.add(rejected(name, "text-unused", f"{name} is beside records"))


def _nothing(data: Path) -> EmptySourceError:
    found = Counter(extension_of(name) or "no extension" for _, _, files in os.walk(data) for name in files)
    counts = ", ".join(f"{count} {extension}" for extension, count in found.most_common(5))
    return EmptySourceError(
        "the data folder holds no records",
        where=str(data),
        why=f"expected one of {', '.join(KINDS)}; found {counts or 'no files'}",
        fix="give the file or folder that holds the texts or conversations",
    )
