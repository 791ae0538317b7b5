"""Metadata tables: CSV, JSON lines and parquet, read exactly as they are written.

No cell is shifted, converted or guessed (``NA``, ``001`` and ``None`` stay text). A table that is not well formed is
an error with file and line before any work is done. Every row is a sample, a rejection or a note, and so is every
image beside a table. Cost: the whole file in memory, about 3 us per row.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from latentcache.errors import TableError, UnusableSampleError
from latentcache.identity.content import StatMemo, content_hash
from latentcache.sources.captions import caption_fault, captions_in
from latentcache.sources.causes import Findings, Notes, fault, rejected
from latentcache.sources.formats.archives import PARQUET, open_rows
from latentcache.sources.formats.files import decode, listed, parse_json, read_source, shown
from latentcache.sources.inventory import IMAGE_EXTENSIONS, extension_of
from latentcache.sources.known import Units
from latentcache.sources.layout import (
    CAPTION_COLUMNS,
    FILE_COLUMNS,
    CaptionRule,
    Layout,
    choose_column,
    named,
)

_QUOTE = 'put a caption that holds a comma, a quote or a line end in double quotes, and write " inside it as ""'
_HEADER = "put a header line above it that names the columns, such as file_name,text"
_DRIVE = re.compile(r"[A-Za-z]:")
_LONGEST_NAME = 1000
#: Bytes of a text in a column that is kept.
_LONGEST_CELL = 256

#: Line, and name of a column -> value, of each row.
_Records = Iterator[tuple[int, dict[str, Any]]]


class Row(NamedTuple):
    """One row: a file name below the root, and a caption or the reason why it cannot be used."""

    name: str
    line: int
    caption: str | None = ""
    """None: the table has no column of captions."""
    error: UnusableSampleError | None = None
    more: Mapping[str, Any] = {}
    """The other columns."""


def read_tables(
    layout: Layout,
    root: Path,
    images: Mapping[int, Mapping[str, tuple[int, str]]],
    findings: Findings,
) -> tuple[Units, dict[int, tuple[bytes, StatMemo]]]:
    """Read the tables of a layout, the deepest one first; raises TableError if one of them cannot be read.

    Args:
        layout: Each of its sets is a table, and the tables are the first files.
        root: Names are below it.
        images: Set -> names of the images in its folder -> position of the image, and the caption file beside it.
        findings: Of the scan; what it names already is not rejected again.

    Returns:
        The samples, and number of each table -> content hash and memo.
    """
    named = findings.names()
    notes = findings.notes
    taken, contents = dict[str, tuple[int, int, Row]](), dict[int, tuple[bytes, StatMemo]]()
    unlisted = dict[str, str]()
    for number, image_set in sorted(enumerate(layout.sets), key=lambda pair: -len(pair[1].prefix)):
        inside = images.get(number, {})
        rule = image_set.captions
        table = image_set.captions.table
        rows, content, memo = read_table(root, table, image_set.prefix, rule)
        contents[number] = content, memo
        first_rows = match_rows(table, _with_columns(table, rows, notes), inside, {*named, *unlisted}, root, findings)
        differing = list[str]()
        for name, row in first_rows.items():
            if name not in inside or row.error is not None:
                continue
            row = row._replace(caption=None if row.caption is None else rule.formatted(row.caption))
            *_, deeper = taken.setdefault(name, (inside[name][0], number, row))
            differing += [name] if deeper.caption != row.caption else []
        notes.count("in-two-sets", "images have another caption in a deeper table, which counts", differing)
        unlisted |= {name: table for name in inside if name not in first_rows}
    for name, table in unlisted.items():
        if name not in taken:
            notes.add(rejected(name, "unlisted", f"{table} has no row for it"))
    beside = {text for inside in images.values() for _, text in inside.values() if text}
    notes.count("sidecar-unused", "caption files beside images of a table are not used", sorted(beside))
    return _units(taken.values()), contents


def _units(taken: Collection[tuple[int, int, Row]]) -> Units:
    """Samples of (position of the image, set, row)."""
    rows = [row for *_, row in taken]
    image, owner = np.array([numbers for *numbers, _ in taken], dtype=np.int32).reshape(-1, 2).T
    is_captioned = [row.caption is not None for row in rows]
    return Units(
        image=image,
        caption=np.where(is_captioned, owner, -1),
        owner=owner,
        line=np.where(is_captioned, np.array([row.line for row in rows], dtype=np.uint32), 0),
        text=np.array([row.caption or "" for row in rows], dtype=object),
        more=np.array([row.more for row in rows], dtype=object),
    )


def _with_columns(table: str, rows: Sequence[Row], notes: Notes) -> list[Row]:
    """The rows with the columns that are kept: of short texts, or of numbers. The others are noted."""
    kinds = dict[str, type | None]()
    for row in rows:
        for name, value in row.more.items():
            kind = _kind_of(value)
            before = kinds.get(name, type(None))
            if before is type(None) or kind is before:
                kinds[name] = kind
            elif kind is not type(None):
                kinds[name] = float if {kind, before} == {int, float} else None
    kept = {name: kind for name, kind in kinds.items() if kind not in (None, type(None)) and name}
    left = [name or "(no name)" for name, kind in kinds.items() if kind is None or not name]
    if all(row.caption is None and row.error is None for row in rows):
        said = f"; columns of the samples: {listed(list(kept))}" if kept else ""
        notes.add(rejected(table, "text-column", f"it has no column of captions{said}"))
    if left:
        accepted = f"numbers, or texts of at most {_LONGEST_CELL} bytes"
        notes.add(
            rejected(table, "text-column", f"columns that are not used: {listed(left)}; a column holds {accepted}")
        )
    return [
        row._replace(
            more={name: kept[name](value) for name, value in row.more.items() if name in kept and value is not None}
        )
        for row in rows
    ]


def _kind_of(value: Any) -> type | None:
    """The type of the column that can hold a value; NoneType: any can. None: no column can."""
    if isinstance(value, str):
        return str if len(value.encode(errors="replace")) <= _LONGEST_CELL and not caption_fault(value) else None
    if isinstance(value, int):
        return int if -(2**63) <= value < 2**63 else None
    return type(value) if value is None or isinstance(value, float) else None


def match_rows(
    table: str,
    rows: Sequence[Row],
    images: Collection[str],
    named: Collection[str],
    root: Path,
    findings: Findings,
) -> dict[str, Row]:
    """The first row of each name; those that make no sample, and further ones, are rejected and noted."""
    first_rows = dict[str, Row]()
    for row in rows:
        image = image_named(row.name, images)
        where = f"{table}:{row.line}"
        name = image or _printable(row.name if leads_out(row.name) else _plain(row.name))
        first = first_rows.setdefault(name, row)
        if first is not row:
            says = "the same" if first.caption == row.caption else "another"
            detail = f"lines {first.line} and {row.line} are both for {name}, with {says} caption; the first is used"
            findings.notes.add(rejected(table, "duplicate-row", detail))
        elif leads_out(row.name) and not image:
            findings.reject(name, fault("outside-root", f"{where} names a file outside the data folder"))
        elif not image and name not in named:
            cause, why = "not-found", "there is no such file"
            if os.path.isfile(root / name):  # noqa: PTH113 - False for a name that is not allowed
                cause, why = "unknown", "its extension is not that of a supported image"
            findings.reject(name, fault(cause, f"{where} names it, and {why}"))
        elif image and row.error is not None:
            findings.reject(name, row.error)
    return first_rows


def read_table(root: Path, name: str, prefix: str, rule: CaptionRule) -> tuple[list[Row], bytes, StatMemo]:
    """Rows of the table ``name`` below ``root``, and content hash and memo of the file.

    Names in it are relative to the folder ``prefix``. ``rule`` says what is known of its columns.

    Raises:
        TableError: It cannot be read as a whole; ``where`` is file and line.
    """
    path = root / name
    try:
        data, memo = read_source(path)
    except UnusableSampleError as error:
        raise _error(path, 0, "the table cannot be read", error.what, error.fix) from error
    content = content_hash(data)
    data = data.removeprefix(codecs.BOM_UTF8)
    if path.suffix == ".csv":
        records = _csv_records(path, data, rule)
    elif path.suffix == ".parquet":
        records = _parquet_records(path)
    else:
        records = _json_records(path, data)
    try:
        rows = _rows(path, records, rule)
    except UnusableSampleError as error:
        fix = f"{error.fix}, or name columns {FILE_COLUMNS[0]} and {CAPTION_COLUMNS[1]}"
        raise _error(path, 0, "a column is missing", error.what, fix) from error
    if not rows:
        fix = "add one row per image, or rename the table to use all images"
        raise _error(path, 1, "the table has no rows", "expected one row per image, found none", fix)
    above = root.absolute().as_posix()
    for number, row in enumerate(rows):
        if row.name.startswith("/") and PurePosixPath(row.name).is_relative_to(above):
            rows[number] = row._replace(name=str(PurePosixPath(row.name).relative_to(above)))
        elif not leads_out(row.name):
            rows[number] = row._replace(name=prefix + row.name)
    return rows, content, memo


def _rows(path: Path, records: _Records, rule: CaptionRule) -> list[Row]:
    """The rows of a table; if only later ones have captions, those before have none."""
    rows, file, caption = list[Row](), "", ""
    for line, record in records:
        if not file or (not caption and named(record, CAPTION_COLUMNS)):
            file, caption = _chosen(path, list(record), rule)
        name = record.get(file)
        if not isinstance(name, str | int):
            actual = shown(name) if file in record else f"columns: {listed(list(record))}"
            why = f"expected a file name as {file!r}, as in the first row; found {actual}"
            raise _error(path, line, "a row without a file name", why, "correct this line, or leave it out")
        row = make_row(path, line, str(name), record.get(caption), is_captioned=bool(caption))
        used = (file, caption)
        rows.append(row._replace(more={column: value for column, value in record.items() if column not in used}))
    if not caption:
        return rows
    return [make_row(path, row.line, row.name, None) if row.caption is None else row for row in rows]


def _chosen(path: Path, columns: Sequence[str], rule: CaptionRule) -> tuple[str, str]:
    """The column of file names, and the one of captions."""
    file = choose_column(path, "image", columns, named(columns, FILE_COLUMNS), rule.image_column)
    return file, choose_column(path, "caption", columns, named(columns, CAPTION_COLUMNS), rule.caption_column)


def make_row(path: Path, line: int, name: str, caption: Any, *, is_captioned: bool = True) -> Row:
    """A row with its caption checked: text, without NUL and half surrogate pairs."""
    try:
        return Row(name, line, captions_in(caption, strip=False) if is_captioned else None)
    except UnusableSampleError as error:
        error.what = f"{path.name}:{line}: {error.what}"
        return Row(name, line, error=error)


def _error(path: Path, line: int, problem: str, why: str, fix: str) -> TableError:
    where = f"{path}:{line}" if line else str(path)
    return TableError(f"{path.name}: {problem}", where=where, why=why, fix=fix)


# formats


def _csv_records(path: Path, data: bytes, rule: CaptionRule) -> _Records:
    import csv

    header = list[str]()
    csv.field_size_limit(max(len(data), csv.field_size_limit()))  # 131,072 characters by default
    reader = csv.reader(map(decode, data.splitlines(keepends=True)), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            why = f"{error}; the row begins on line {line}, this is line {reader.line_num}"
            raise _error(path, line, "a row that is not CSV", why, _QUOTE) from error
        except UnusableSampleError as error:
            raise _error(path, reader.line_num + 1, "the table is not UTF-8", error.what, error.fix) from error
        if cells is None:
            return
        if not header and cells:
            header = [cell.strip() for cell in cells]
            image = next((cell for cell in header if extension_of(cell) in IMAGE_EXTENSIONS), "")
            if image:
                why = f"its first line names the image {shown(image)}, not the columns"
                raise _error(path, line, "it has no header line", why, _HEADER)
            _chosen(path, header, rule)
            continue
        if cells and len(cells) != len(header):
            why = f"expected {len(header)} fields as in the first line, found {len(cells)}: {listed(cells)}"
            raise _error(path, line, "a row of another length", why, _QUOTE)
        if cells:
            yield line, dict(zip(header, cells, strict=True))


def _json_records(path: Path, data: bytes) -> _Records:
    for line, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            value = parse_json(decode(raw))
            actual = f"found {shown(value)}"
        except UnusableSampleError as error:
            value = None
            actual = error.what.removeprefix("no JSON: ")
        if not isinstance(value, dict):
            fix = f"correct line {line}, or leave it out; `sed -n {line}p {shlex.quote(str(path))}` shows it"
            raise _error(path, line, "a line that is not a JSON object", f"expected one object; {actual}", fix)
        yield line, value


def _parquet_records(path: Path) -> _Records:
    try:
        with open_rows(path, PARQUET) as table:
            yield from enumerate((row for batch in table.batches() for row in batch.to_pylist()), start=1)
    except ImportError as error:
        fix = "`pip install 'latentcache[hf]'`, or save the table as metadata.jsonl"
        raise _error(path, 0, "pyarrow is needed to read it", "it is a parquet file", fix) from error
    except UnusableSampleError as error:
        raise _error(
            path, 0, "it is not a parquet file", error.what, "export it again or use metadata.jsonl"
        ) from error


# names


def image_named(raw: str, images: Collection[str]) -> str:
    """The image that a table means by ``raw``, empty when there is none.

    ``./`` and doubled slashes are harmless, a backslash is a separator if no file has it in its name. Names that lead
    out of the folder are never looked up.
    """
    if raw in images:
        return raw
    if leads_out(raw):
        return ""
    return next((name for name in (_plain(raw), _plain(raw.replace("\\", "/"))) if name in images), "")


def leads_out(raw: str) -> bool:
    """True if a name is absolute, has a drive letter or a ``..`` part, with either separator."""
    path = raw.replace("\\", "/")
    return path.startswith("/") or ".." in path.split("/") or _DRIVE.match(raw) is not None


def _plain(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _printable(name: str) -> str:
    """A name that can be encoded as file names are: a table can hold code points that no file name has."""
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        name = name.encode("utf-8", "backslashreplace").decode()
    return name[:_LONGEST_NAME].replace("\0", "\\0") or "(no name)"
