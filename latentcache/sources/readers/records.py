"""The records of DATA in columns, and the files that hold them.

The first of these that fits:
- a folder that Hugging Face ``datasets`` saved (of a dict of data sets, ``train``);
- all files of records below the folder, in the byte order of their names;
- its text files, each one document, or each line one document if asked.

Files that may have changed are read, others are believed.

Each distinct content is one document; rows keep duplicates. Cost: one pass of parsing and hashing over new files, and
30 bytes of memory per record. Files are read again when their records are encoded. Every line of a file that is not
blank gives a record or a rejection with its line and field. A bad line never stops the others, and a file that cannot
be read to its end keeps the records before that place. Lines, text lines and rows are streamed; a JSON list is read
whole (at most 1 GiB). Of parquet and Arrow files one batch is in memory. Their bytes are hashed first.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, SourceError, UnusableSampleError, count_of
from latentcache.fields.strings import Strings
from latentcache.fields.table import STAT_WIDTH, Input, SampleTable
from latentcache.identity.content import HASH_BYTES, StatMemo
from latentcache.sources.causes import Findings, in_order, rejected
from latentcache.sources.formats.archives import kind_of_archive
from latentcache.sources.formats.files import read_document, stat_source
from latentcache.sources.inventory import (
    IMAGE_EXTENSIONS,
    PACKED_EXTENSIONS,
    TABLE_NAMES,
    Inventory,
    count_unused,
    extension_of,
)
from latentcache.sources.known import KnownFiles, Scan, ScanResult, hash_rows, is_range
from latentcache.sources.readers.archive import hold_images
from latentcache.sources.records import (
    EXPECTED,
    KINDS,
    Record,
    RecordReader,
    reading_of,
    record_size,
)
from latentcache.sources.splits import for_training, missing_shards, read_as_train, splits_of, which_split

_OFTEN = 4096
#: A row, as numpy and as ``struct`` have it.
_ROW = np.dtype(
    [("file", "=i4"), ("line", "=u4"), ("characters", "=u4"), ("form", "u1"), ("content", f"V{HASH_BYTES}")]
)
_PACKED = Struct(f"=iIIB{HASH_BYTES}s")
_BLOCK = 1 << 14


def read_records(
    root: Path, samples: SampleTable, rows: NDArray[np.integer], *, text_lines: bool
) -> Iterator[tuple[int, Record | None]]:
    """(row, record) of ascending rows; None if the file does not hold it any more. Other files are not read."""
    held = samples.inputs["record"]
    if len(rows) > 1 and not (np.diff(rows) > 0).all():
        raise ValueError("rows of records must ascend")
    file_of = np.asarray(held.file)[rows]
    bounds = [0, *(np.flatnonzero(np.diff(file_of)) + 1).tolist(), len(rows)]
    for start, stop in pairwise(bounds) if len(rows) else ():
        name = samples.files.names[int(file_of[start])]
        yield from _matching(RecordReader(root / name, name, text_lines), rows[start:stop], held)


def _matching(
    records: Iterable[Record], rows: NDArray[np.integer], held: Input
) -> Iterator[tuple[int, Record | None]]:
    """Rows of one file with their records, by line and content."""
    expected = _expected(rows, held)
    wanted = next(expected, None)
    try:
        for record in records:
            while wanted is not None and wanted[1] < record.line:
                yield wanted[0], None
                wanted = next(expected, None)
            if wanted is None:
                return
            if wanted[1:] == (record.line, record.content):
                yield wanted[0], record
                wanted = next(expected, None)
    except (UnusableSampleError, SourceError):
        pass  # the rest is not there
    yield from ((row, None) for row, _, _ in chain([] if wanted is None else [wanted], expected))


def _expected(rows: NDArray[np.integer], held: Input) -> Iterator[tuple[int, int, bytes]]:
    """Row, line and content of each record."""
    assert held.line is not None
    for start in range(0, len(rows), _BLOCK):  # there may be ten million
        block = rows[start : start + _BLOCK]
        contents = np.ascontiguousarray(held.content[block]).view(f"V{HASH_BYTES}")[:, 0]
        yield from zip(block.tolist(), held.line[block].tolist(), contents.tolist(), strict=True)


def scan_records(request: Scan, inventory: Inventory) -> ScanResult:
    """All records of DATA; raises as ``scan.scan``."""
    part, text_lines, findings = request.options.part, request.options.text_lines, request.findings
    names = find_records(request, inventory)
    rows = bytearray()
    reading = hash_rows(reading_of(name, str(part or ""), text_lines=text_lines) for name in names)
    stats = np.array([_state(inventory.root / name) for name in names], dtype=np.uint64).reshape(-1, STAT_WIDTH)
    held = KnownFiles(request, Strings.of(names), stats, reading)

    def read(file: int) -> None:
        held.distrust(np.array([file]))
        reader = RecordReader(inventory.root / names[file], names[file], text_lines)
        try:
            is_whole = _read(request, reader, file, rows)
        except UnusableSampleError as error:
            if inventory.is_file:
                raise SourceError(f"{reader.name}: {error.what}", where=str(reader.path), fix=error.fix) from error
            raise
        if is_whole:
            assert reader.stat is not None
            held.remember(file, reader.content, reader.stat)

    known = request.contained(held, len(names), "record", read)
    table = held.table
    if table is None or len(known) < len(names) or not is_range(held.position, len(table.files)):
        new = np.frombuffer(rows, dtype=_ROW)
        table = _table(held, np.concatenate([_known(held.table, *held.rows_in("record", known)), new]))
    rejections = in_order(findings.rejected)
    if part is None:  # else they may be in other parts
        is_none = np.bincount(np.asarray(table.inputs["record"].file), minlength=len(names)) == 0
        named = {item.name for item in rejections}
        empty = [name for name in held.names.take(np.flatnonzero(is_none)) if name not in named]
        findings.notes.add(*(rejected(name, "unused", "it holds no records") for name in empty))
        if not len(table) and not rejections and not request.stopping():
            raise EmptySourceError(
                f"{count_of(len(names), 'files')} of {inventory.root} without a record",
                where=str(inventory.root),
                why="; ".join(names[:3]),
                fix=f"give files of texts or conversations: expected {EXPECTED}",
            )
    return ScanResult(samples=table, rejected=rejections, notes=findings.notes.all())


def _state(path: Path) -> StatMemo:
    try:
        return stat_source(path)
    except UnusableSampleError:  # reading it gives the reason
        return StatMemo(*[0] * STAT_WIDTH)


def _read(request: Scan, reader: RecordReader, file: int, rows: bytearray) -> bool:
    """Add the rows of one file, and its rejected records; False: it has to be read again, its rest is unknown."""
    part = request.options.part
    damage = None
    try:
        for number, record in enumerate(reader, start=1):
            if part is None or part.holds(record.content):
                size = min(record_size(record), 0xFFFF_FFFF)
                rows += _PACKED.pack(file, record.line, size, record.form, record.content)
            if not number % _OFTEN and request.stopping():
                return False
    except UnusableSampleError as error:
        if not reader.last or error.slug == "not-records":
            raise
        error.what = f"rest unread: {error.what}"
        damage = error
    request.findings.rejected += reader.rejected.all()
    if damage is not None:
        request.findings.reject(reader.name, damage, line=reader.last + 1)
    return damage is None


def _known(table: SampleTable | None, rows: NDArray[np.integer], file: NDArray[np.integer]) -> NDArray[Any]:
    known = np.empty(len(rows), dtype=_ROW)
    if table is not None and len(rows):
        old = table.inputs["record"]
        columns = {"line": old.line, **table.columns, "content": np.asarray(old.content).view(f"V{HASH_BYTES}")[:, 0]}
        known["file"] = file
        for name in ("line", "content", "characters", "form"):
            known[name] = np.asarray(columns[name])[rows]
    return known


def _table(held: KnownFiles, rows: NDArray[Any]) -> SampleTable:
    """Rows in any order as samples, by file and line."""
    position = rows["file"].astype(np.int64) << 32 | rows["line"]
    if not (np.diff(position) >= 0).all():
        rows = rows[np.argsort(position, kind="stable")]
    column: dict[str, NDArray[Any]] = {name: np.ascontiguousarray(rows[name]) for name in _ROW.names or ()}

    def labels() -> Iterator[list[str]]:
        for start in range(0, len(rows), _BLOCK):
            block = slice(start, start + _BLOCK)
            names = held.names.take(column["file"][block])
            lines = column["line"][block].tolist()
            yield [f"{name}:{line}" for name, line in zip(names, lines, strict=True)]

    content = column["content"].view(np.uint8).reshape(-1, HASH_BYTES)
    return SampleTable(
        names=Strings.of(chain.from_iterable(labels())),
        files=held.files,
        inputs={"record": Input(content=content, file=column["file"], line=column["line"])},
        columns={"characters": column["characters"], "form": column["form"]},
    )


# which files hold records


INFO_NAME = "dataset_info.json"
STATE_NAME, DICT_NAME = "state.json", "dataset_dict.json"
#: Formats of records that are not read where they are loose.
_UNREAD = (".csv", ".tsv", ".arrow")
#: Any of these is in an entry of LLaMA-Factory's ``dataset_info.json``.
_ENTRY = ("file_name", "script_url", "hf_hub_url", "ms_hub_url", "om_hub_url", "cloud_file_name")


def find_records(request: Scan, inventory: Inventory) -> list[str]:
    """Names of the files of records in a file or folder, below its root; raises as ``scan.scan``.

    Only new ``.json`` files are opened, to see if they hold records.
    """
    data = inventory.data
    if inventory.is_file:
        which_split(data, [""], request.options.split)
        names = [data.name]
    elif splits := saved_splits(inventory):
        names = _by_state(request, inventory, splits)
    elif is_dataset_info(inventory):
        raise SourceError(
            f"{INFO_NAME} of LLaMA-Factory is not followed",
            where=str(data / INFO_NAME),
            why="a file of records is read by the names of its columns",
            fix="give one file of records as DATA, or move this one elsewhere to read all files in the folder",
        )
    else:
        names = _by_names(request, inventory)
    if not names and not request.findings.rejected:
        raise EmptySourceError(
            "the data folder holds no records",
            where=str(inventory.root),
            why=f"expected one of {', '.join(KINDS)}; found {inventory.contents}",
            fix="give the file or folder that holds the texts or conversations",
        )
    if any(map(kind_of_archive, names)) and find_spec("pyarrow") is None:
        raise SourceError(
            "pyarrow is not installed, and these files need it",
            where=str(data),
            why="parquet files and saved data sets are read by an extra",
            fix="pip install 'latentcache[hf]'",
            slug="extra-missing",
        )
    return names


def holds_records(inventory: Inventory) -> bool:
    """True if a folder describes records, or one of its files begins with one; texts may be captions."""
    if splits := saved_splits(inventory):
        return not hold_images(inventory.root, next(iter(splits.values()))[:1])
    if is_dataset_info(inventory):
        return True
    return any(begins_with(inventory.root, name) == "record" for name in _apart(inventory))


def _apart(inventory: Inventory) -> Iterator[str]:
    """Files that may hold records, but for metadata tables and the captions of images."""
    for folder in inventory.below():
        images = (name for name in folder.names if extension_of(name) in IMAGE_EXTENSIONS)
        stems = {name.rpartition(".")[0] for name in images}
        for name in folder.others:
            is_caption = extension_of(name) == ".json" and name.rpartition(".")[0] in stems
            if extension_of(name) in KINDS and name not in TABLE_NAMES and not is_caption:
                yield folder.prefix + name


def _note_others(inventory: Inventory, used: Collection[str], findings: Findings) -> None:
    """Note and reject what the inventory could not use, and the files that nothing names."""
    used = {*used, *findings.names()}
    for folder in inventory.below():
        findings.rejected += folder.rejected.values()
        findings.notes.add(*folder.notes)
        names = (folder.prefix + name for name in (*folder.names, *folder.loose))
        count_unused(findings.notes, (name for name in names if name not in used))


def _by_state(request: Scan, inventory: Inventory, splits: Mapping[str, list[str]]) -> list[str]:
    """A data set that ``datasets`` saved."""
    chosen = which_split(inventory.root, list(splits), request.options.split)
    used = set(saved_states(splits))
    if not splits[chosen]:
        state = f"{chosen}/{STATE_NAME}"
        fix = "save the data set again with save_to_disk"
        raise SourceError(
            f"{state} lists no files", where=str(inventory.root / state), why=f"{DICT_NAME} names it", fix=fix
        )
    for split in filter(chosen.__ne__, splits):
        names = [folder.prefix + name for folder in inventory.below(split) for name in folder.names]
        request.findings.notes.count("split-unused", f"files of the split {split}; {chosen} is read", names)
        used.update(names)
    _note_others(inventory, {*used, *splits[chosen]}, request.findings)
    return splits[chosen]


def _by_names(request: Scan, inventory: Inventory) -> list[str]:
    """All files of records of one split; text files only if there are none."""
    findings = request.findings
    known = set(request.known.files.names) if request.known is not None else set[str]()
    notes, texts, tables = findings.notes, list[str](), list[str]()
    for name in sorted(
        (folder.prefix + name for folder in inventory.below() for name in folder.names), key=os.fsencode
    ):
        extension = extension_of(name)
        kind = KINDS.get(extension)
        if extension in PACKED_EXTENSIONS:
            findings.rejected.append(rejected(name, "compressed", f"{name} is packed"))
        elif extension in _UNREAD:
            notes.add(rejected(name, "table-unused", f"{name} is of a format that is not supported"))
        elif kind == "text":
            texts.append(name)
        elif kind and (name in known or extension != ".json" or begins_with(inventory.root, name) != "settings"):
            tables.append(name)
    if tables:
        notes.add(*(rejected(name, "text-unused", f"{name} is beside records") for name in texts))
    readable = tables or texts
    names = list[str]()
    named = splits_of(readable, request.options.split)
    splits = for_training(named)
    chosen = which_split(inventory.root, splits or [""], request.options.split) if readable else ""
    for name, split in zip(readable, splits, strict=True):
        if split == chosen:
            names.append(name)
        else:
            notes.count("split-unused", f"files of the split {split}; {chosen} is read", (name,))
    notes.add(*missing_shards(names), *read_as_train(dict.fromkeys(readable, 1), named))
    _note_others(inventory, readable, findings)
    return names


def is_dataset_info(inventory: Inventory) -> bool:
    """True if a folder has a ``dataset_info.json`` as LLaMA-Factory has it; ``datasets`` writes another one."""
    entries = [entry for entry in _document(inventory, INFO_NAME).values() if isinstance(entry, dict)]
    return any(isinstance(entry.get(name), str) for entry in entries for name in _ENTRY)


def saved_splits(inventory: Inventory) -> dict[str, list[str]]:
    """Splits of a data set that ``datasets`` saved -> the Arrow files that ``state.json`` lists, below the root.

    Its only split has no name. A split without such a list has no files. Empty: the folder is another one.
    """
    if files := _data_files(inventory, ""):
        return {"": files}
    names = _document(inventory, DICT_NAME).get("splits")
    splits = {str(name): _data_files(inventory, f"{name}/") for name in (names if isinstance(names, list) else ())}
    return splits if any(splits.values()) else {}


def saved_states(splits: Iterable[str]) -> frozenset[str]:
    """Files beside the Arrow files of these splits."""
    folders = ["", *(f"{split}/" for split in splits if split)]
    return frozenset((DICT_NAME, *(folder + name for folder in folders for name in (STATE_NAME, INFO_NAME))))


def _data_files(inventory: Inventory, prefix: str) -> list[str]:
    """Files that a ``state.json`` lists; none: it is the file of another program, or not there."""
    entries = _document(inventory, prefix + STATE_NAME).get("_data_files")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in entries
    ):
        return []
    return [prefix + Path(entry["filename"]).name for entry in entries]


def _document(inventory: Inventory, name: str) -> dict[str, Any]:
    """The object in a JSON file below the root; an empty one if there is none."""
    folder, _, base = name.rpartition("/")
    if base not in inventory.folder(folder).others:
        return {}
    try:
        document = read_document(inventory.root / name, "")
    except SourceError:
        return {}
    return document if isinstance(document, dict) else {}


def begins_with(root: Path, name: str) -> str:
    """``record``, or ``settings`` for a ``.json`` file that is one object, or a list, and no record; else empty."""
    if extension_of(name) == ".parquet" and hold_images(root, [name]):
        return ""
    try:
        return "record" if next(iter(RecordReader(root / name, name)), None) is not None else ""
    except UnusableSampleError as error:
        return "settings" if error.slug == "not-records" else ""
    except ImportError:
        return ""
