"""What DATA holds for a token cache: the only place that guesses among files of records.

Decided by what is there, in this order: a folder that ``datasets`` saved (``state.json`` or ``dataset_dict.json``),
a folder with LLaMA-Factory's ``dataset_info.json``, else all files of records below the folder in the byte order of
their names; where there are none, its text files. A text file is one document, or one for each line where asked.
Names that begin with a dot, caches and links are not followed. Cost: one listing of each folder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from latentcache.errors import EmptySourceError, SourceError, SourceNotFoundError, UnusableSampleError, UsageError
from latentcache.sources.causes import as_refusal, refusal
from latentcache.sources.dataset_info import INFO_NAME, is_dataset_info, read_dataset_info
from latentcache.sources.record_files import RecordFile, read_file
from latentcache.sources.record_format import TEXT, RecordFormat
from latentcache.sources.records import Record, RecordLog, RecordScan
from latentcache.sources.sample import Refusal
from latentcache.sources.saved import is_saved, saved_files
from latentcache.sources.share import Share
from latentcache.sources.sorting import CACHE_SUFFIX, extension_of

#: Extension in lower case -> kind of file.
KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".text": "text"}
#: Forms of records that are not read where they lie loose.
_UNREAD = (".csv", ".tsv", ".arrow")
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4")
_CACHE_MARKS = frozenset(("CURRENT", "generations"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """What a user says about the records."""

    form: RecordFormat | None = None
    """Of every record; by default each file's first record tells. A dataset_info.json has the word where it is."""
    text_lines: bool = False
    """Whether each line of a text file is a document."""
    datasets: tuple[str, ...] = ()
    """Names in a dataset_info.json; all that lie on this disk by default."""
    share: Share | None = None
    """Of the records, told by their content; all of them by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    files: tuple[RecordFile, ...]
    refused: tuple[Refusal, ...] = ()
    notes: tuple[Refusal, ...] = ()


def scan_records(data: Path, options: RecordOptions | None = None) -> RecordScan:
    """The records of a file or a folder, not read yet.

    Raises:
        SourceNotFoundError: There is nothing at this path.
        EmptySourceError: There is no file of records in it.
        SourceError: Its dataset_info.json cannot be read, or pyarrow is needed and not installed.
        UsageError: A kind of file that is not read, or a data set that is not there.
    """
    options = options or RecordOptions()
    root, listing = _list(data, options)
    if not listing.files and not listing.refused:
        raise _nothing(data)
    if any(file.kind in ("parquet", "arrow") for file in listing.files):
        _need_pyarrow(data)
    alone = data.is_file()

    def read(log: RecordLog, without: Collection[str], first: bool) -> Iterator[Record]:
        log.refused += listing.refused
        log.notes += listing.notes
        for file in listing.files:
            if file.name not in without:
                yield from islice(_read(file, log, alone=alone), 1 if first else None)

    return RecordScan(root, read, tuple(file.unread() for file in listing.files), share=options.share)


def is_corpus(data: Path) -> bool:
    """Whether DATA is meant for a token cache: a file of records, or a folder of them; no where nobody can tell."""
    try:
        if data.is_file():
            return extension_of(data.name) in KINDS or data.name == INFO_NAME
        return data.is_dir() and (is_saved(data) or is_dataset_info(data))
    except OSError:  # whoever reads it has the words for it
        return False


def _list(data: Path, options: RecordOptions) -> tuple[Path, _Listing]:
    """The folder that names are relative to, and the files."""
    if not data.exists():
        raise SourceNotFoundError(f"there is no data at {data}", where=str(data.absolute()), fix="check the path")
    if data.name == INFO_NAME:
        data = data.parent
    if data.is_file():
        return data.parent, _Listing(files=(_single(data, options),))
    if options.datasets and not is_dataset_info(data):
        raise UsageError(
            f"{data} has no {INFO_NAME}", where=str(data), fix=f"leave --dataset out, or put {INFO_NAME} there"
        )
    if is_saved(data):
        files = (
            RecordFile(path=path, name=name, kind="arrow", form=options.form) for path, name in saved_files(data)
        )
        return data, _Listing(files=tuple(files))
    return data, _by_info(data, options) if is_dataset_info(data) else _by_walk(data, options)


def _single(path: Path, options: RecordOptions) -> RecordFile:
    kind = KINDS.get(extension_of(path.name))
    if kind is None:
        packed = extension_of(path.name) in _PACKED
        raise UsageError(
            f"{path.name} is no file of records that is read",
            where=str(path),
            why="it is packed" if packed else f"expected one of {', '.join(KINDS)}",
            fix="unpack it first, e.g. `gunzip -k` or `zstd -d`" if packed else "name it after what it holds",
        )
    return RecordFile(path=path, name=path.name, kind=kind, form=options.form, text_lines=options.text_lines)


def _read(file: RecordFile, log: RecordLog, *, alone: bool) -> Iterator[Record]:
    """One file; one among others that cannot be read is refused.

    Raises:
        SourceError: It is the only one, or it failed after records of it were given.
    """
    given = False
    try:
        for record in _records(file, log):
            given = True
            yield record
    except UnusableSampleError as error:
        if alone or given:
            raise SourceError(f"{file.name}: {error.what}", where=str(file.path), fix=error.fix) from error
        log.refused.append(as_refusal(file.name, error))


def _records(file: RecordFile, log: RecordLog) -> Iterator[Record]:
    if file.kind not in ("parquet", "arrow"):
        return read_file(file, log)
    # An extra that most data sets do not need.
    from latentcache.sources.columnar import read_columnar

    return read_columnar(file, log)


def _by_info(folder: Path, options: RecordOptions) -> _Listing:
    datasets, refused, notes = read_dataset_info(folder, options.datasets)
    files: list[RecordFile] = []
    for dataset in datasets:
        path = folder / dataset.file
        named = _named_folder if path.is_dir() else _named_file
        listing = named(path, folder, dataset.form)
        files += listing.files
        refused += listing.refused
        notes += listing.notes
    return _Listing(files=tuple(files), refused=tuple(refused), notes=tuple(notes))


def _named_file(path: Path, folder: Path, form: RecordFormat) -> _Listing:
    """A file that an entry names; one of a form that is not read is refused as a whole."""
    name, extension = path.relative_to(folder).as_posix(), extension_of(path.name)
    kind = KINDS.get(extension)
    if extension in _PACKED:
        return _Listing(files=(), refused=(refusal(name, "compressed", f"{name} is packed"),))
    if kind is None:
        detail = f"expected one of {', '.join(KINDS)}; found {extension or 'no extension'}"
        return _Listing(files=(), refused=(refusal(name, "unread-form", f"{name}: {detail}"),))
    if kind == "text" and (form.form, form.text) != (TEXT.form, TEXT.text):
        detail = f"{name} holds texts, whose one column is text, and its entry in {INFO_NAME} names others"
        return _Listing(files=(), refused=(refusal(name, "unread-form", detail),))
    # Each line of a text is a row to LLaMA-Factory.
    return _Listing(files=(RecordFile(path=path, name=name, kind=kind, form=form, text_lines=True),))


def _named_folder(path: Path, folder: Path, form: RecordFormat) -> _Listing:
    """The files of a folder that an entry names; what lies beside its records, as a README does, is noted."""
    walk, place = _walk(path), path.relative_to(folder).as_posix()
    each = [_named_file(path / name, folder, form) for name in walk.names]
    refused = [item for listing in each for item in listing.refused]
    notes = [replace(note, name=f"{place}/{note.name}") for note in walk.notes]
    notes += [refusal(item.name, "table-unused", item.detail) for item in refused if item.cause == "unread-form"]
    return _Listing(
        files=tuple(file for listing in each for file in listing.files),
        refused=tuple(item for item in refused if item.cause != "unread-form"),
        notes=tuple(notes),
    )


@dataclass(slots=True)
class _Walk:
    names: list[str]
    others: Counter[str]
    notes: list[Refusal]


def _walk(folder: Path) -> _Walk:
    """Names of files below a folder, in byte order."""
    walk = _Walk([], Counter(), [])
    for where, folders, files in os.walk(folder):
        prefix = Path(where).relative_to(folder).as_posix() + "/"
        prefix = "" if prefix == "./" else prefix
        kept = [name for name in folders if not _is_left_out(Path(where, name), prefix, walk)]
        folders[:] = kept
        walk.names += [prefix + name for name in files if not _is_left_out(Path(where, name), prefix, walk)]
    walk.names.sort(key=os.fsencode)
    return walk


def _is_left_out(path: Path, prefix: str, walk: _Walk) -> bool:
    """Whether a name is not followed; a word on it where it could have been meant."""
    is_folder = path.is_dir()
    if path.name.startswith("."):
        return True
    if path.is_symlink():
        if is_folder or extension_of(path.name) in KINDS:
            walk.notes.append(refusal(prefix + path.name, "link", f"the link leads to {path.readlink()}"))
        return True
    if is_folder and (path.name.endswith(CACHE_SUFFIX) or {entry.name for entry in path.iterdir()} >= _CACHE_MARKS):
        walk.notes.append(refusal(prefix + path.name + "/", "cache-folder", "it is a cache"))
        return True
    return False


def _by_walk(folder: Path, options: RecordOptions) -> _Listing:
    """All files of records; text files only where there are none."""
    walk = _walk(folder)
    kinds = {name: KINDS.get(extension_of(name), "") for name in walk.names}
    records = [name for name, kind in kinds.items() if kind in ("json", "parquet")]
    texts = [name for name, kind in kinds.items() if kind == "text"]
    if records and texts:
        walk.notes += [refusal(name, "text-unused", f"{name} lies beside records") for name in texts]
    unread = [name for name in walk.names if extension_of(name) in _UNREAD]
    walk.notes += [refusal(name, "table-unused", f"{name} is of a form that is not read") for name in unread]
    files = tuple(
        RecordFile(path=folder / name, name=name, kind=kinds[name], form=options.form, text_lines=options.text_lines)
        for name in records or texts
    )
    packed = [name for name in walk.names if extension_of(name) in _PACKED]
    refused = tuple(refusal(name, "compressed", f"{name} is packed") for name in packed)
    return _Listing(files=files, refused=refused, notes=tuple(walk.notes))


def _need_pyarrow(data: Path) -> None:
    if find_spec("pyarrow") is None:
        raise SourceError(
            "pyarrow is not installed, and these files need it",
            where=str(data),
            why="parquet files and saved data sets are read by an extra",
            fix="pip install 'latentcache[hf]'",
            slug="extra-missing",
        )


def _nothing(data: Path) -> EmptySourceError:
    found = Counter(extension_of(name) or "no extension" for name in _walk(data).names)
    counts = ", ".join(f"{count} {extension}" for extension, count in found.most_common(5))
    return EmptySourceError(
        "the data folder holds no records",
        where=str(data),
        why=f"expected one of {', '.join(KINDS)}; found {counts or 'no files'}",
        fix="give the file or folder that holds the texts or conversations",
    )
