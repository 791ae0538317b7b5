"""Metadata tables: ``metadata.csv`` and ``metadata.jsonl``, read exactly as they are written.

Guarantee: no cell is ever shifted, converted or guessed (``NA``, ``001`` and ``None`` stay text); a table that is
not well formed is an error with file and line before any work is done; a row that names a picture but gives it no
usable caption is refused alone. Cost: the whole file in memory, about 3 µs per row.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import shlex
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from latentcache.errors import TableError, UnusableSampleError
from latentcache.sources.causes import refusal
from latentcache.sources.listing import picture_named
from latentcache.sources.reading import read_source
from latentcache.sources.rows import Row, choose_columns, has_columns, listed, make_row, shown, table_error
from latentcache.sources.sample import Refusal
from latentcache.sources.sorting import TABLE_NAMES, is_inside

#: Longest field of a CSV table in characters, and longest line of a JSONL table in bytes.
MAX_FIELD = 10_000_000
_DELIMITERS = (",", ";", "\t")
_FIELD_LIMIT = threading.Lock()
_UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_QUOTE = 'put a caption that holds a comma, a quote or a line end in double quotes, and write " inside it as ""'


def find_table(root: Path) -> str:
    """Name of the table in a folder, empty when there is none.

    Raises:
        TableError: There are two.
    """
    found = [name for name in TABLE_NAMES if (root / name).exists() or (root / name).is_symlink()]
    if len(found) > 1:
        second = root / found[1]
        raise TableError(
            f"the data folder has two tables: {' and '.join(found)}",
            where=str(root),
            why="expected one: both would say which pictures are used and what their captions are",
            fix=f"remove or rename one, e.g. `mv {shlex.quote(str(second))} {shlex.quote(f'{second}.off')}`",
        )
    return found[0] if found else ""


def read_table(root: Path, name: str, pictures: Collection[str]) -> tuple[tuple[Row, ...], tuple[Refusal, ...]]:
    """Rows of the table ``name`` in ``root``, in their order, and notes on it.

    Args:
        root: The data folder.
        name: One of ``TABLE_NAMES``.
        pictures: Names of the pictures in the folder: a CSV without a header is known by its first cell.

    Raises:
        TableError: It cannot be read as a whole; ``where`` is file and line.
    """
    path = root / name
    data = _table_bytes(root, path)
    notes = [refusal(name, "bom", f"{name} begins with a UTF-8 BOM")] if data.startswith(codecs.BOM_UTF8) else []
    data = data.removeprefix(codecs.BOM_UTF8)
    with _long_fields():
        rows = tuple(_csv_rows(path, data, pictures) if path.suffix == ".csv" else _json_rows(path, data))
    if not rows:
        fix = "add one row per picture, or remove the table to use all pictures"
        raise table_error(path, 1, "the table has no rows", "expected one row per picture, found none", fix)
    return rows, tuple(notes)


def _table_bytes(root: Path, path: Path) -> bytes:
    """The bytes of a table that lies in the folder and is no UTF-16.

    Raises:
        TableError: It cannot be read.
    """
    if not is_inside(str(path), os.path.realpath(root)):
        why = f"it is a link to {path.readlink()}, outside the data folder"
        raise table_error(path, 0, "the table cannot be used", why, "copy it into the data folder")
    try:
        data, _ = read_source(path)
    except UnusableSampleError as error:
        raise table_error(path, 0, "the table cannot be read", error.what, error.fix) from error
    if data.startswith(_UTF16_BOMS):
        why = "expected UTF-8, found the byte order mark of UTF-16"
        raise table_error(path, 1, "the table is not UTF-8", why, _recode(path, "UTF-16"))
    return data


def _decode(path: Path, data: bytes, first_line: int = 1) -> str:
    """UTF-8 or an error with line and byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        why = f"expected UTF-8, found byte 0x{data[error.start]:02x} at byte {column} of the line"
        raise table_error(path, line, "the table is not UTF-8", why, _recode(path, "WINDOWS-1252")) from error


def _recode(path: Path, encoding: str) -> str:
    old, new = shlex.quote(str(path)), shlex.quote(f"{path}.utf8")
    return f"`iconv -f {encoding} -t UTF-8 {old} > {new} && mv {new} {old}`"


def _csv_rows(path: Path, data: bytes, pictures: Collection[str]) -> Iterator[Row]:
    """The rows of a CSV; each has exactly as many fields as the first record."""
    text = _decode(path, data)
    delimiter = _delimiter(text)
    columns, width = (0, 1), 0
    for line, record in _records(path, text, delimiter):
        if not width:
            width = len(record)
            if not _is_headerless(record, pictures):
                header = [cell.strip() for cell in record]
                columns = choose_columns(path, line, header)
                continue
        if len(record) != width:
            why = f"expected {width} fields as in the first line, found {len(record)}: {listed(record)}"
            raise table_error(path, line, "a row of another length", why, _QUOTE)
        yield make_row(path.name, line, record[columns[0]], record[columns[1]])


def _records(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Line on which a record begins, and its fields; empty lines are passed over."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            _not_csv(path, line, reader.line_num, error)
        if record:
            yield line, record


def _not_csv(path: Path, line: int, last_line: int, error: csv.Error) -> NoReturn:
    """Say where a record began that the csv module could not end."""
    if "unexpected end of data" in str(error):
        why = f"a double quote is opened in the row of line {line} and never closed until line {last_line}"
        raise table_error(path, line, "a quote is not closed", why, _QUOTE) from error
    why = f"{error} (the row begins on line {line}, this is line {last_line})"
    raise table_error(path, line, "a row that is no CSV", why, _QUOTE) from error


@contextmanager
def _long_fields() -> Iterator[None]:
    """Captions longer than the csv module's 131 072 characters; its limit is the process's, so it is put back."""
    with _FIELD_LIMIT:
        before = csv.field_size_limit(MAX_FIELD)
        try:
            yield
        finally:
            csv.field_size_limit(before)


def _delimiter(text: str) -> str:
    """Comma, unless the header is one only with a semicolon or a tab."""
    header = text.lstrip("\r\n").partition("\n")[0][:MAX_FIELD]
    split = {mark: [cell.strip('" \r') for cell in header.split(mark)] for mark in _DELIMITERS}
    return next((mark for mark in _DELIMITERS if has_columns(split[mark])), ",")


def _is_headerless(record: list[str], pictures: Collection[str]) -> bool:
    """Two columns, the first of which names a picture that is there."""
    return len(record) == 2 and bool(picture_named(record[0], pictures))


def _json_rows(path: Path, data: bytes) -> Iterator[Row]:
    """The rows of a JSONL table; the first one says which names hold the file and the caption."""
    names: tuple[str, str] | None = None
    for line, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip():
            continue
        record = _json_record(path, line, raw)
        if names is None:
            keys = list(record)
            file, caption = choose_columns(path, line, keys)
            names = keys[file], keys[caption]
        yield _json_row(path, line, record, names)


def _json_row(path: Path, line: int, record: dict[str, Any], names: tuple[str, str]) -> Row:
    """One object as a row."""
    name = record.get(names[0])
    if not isinstance(name, str):
        found = shown(name) if names[0] in record else f"columns: {listed(list(record))}"
        why = f"expected a file name as {names[0]!r}, as in the first row; found {found}"
        raise table_error(path, line, "a row without a file name", why, "correct or remove this line")
    if names[1] not in record:
        detail = f"{path.name}:{line} has no {names[1]!r}; found columns: {listed(list(record))}"
        return Row(name=name, caption="", line=line, cause="table-row", detail=detail)
    return make_row(path.name, line, name, record[names[1]])


def _json_record(path: Path, line: int, raw: bytes) -> dict[str, Any]:
    """One line as an object, stricter than the json module.

    Raises:
        TableError: Too long, not UTF-8, no JSON, no object, a repeated name, NaN or Infinity, nested too deeply.
    """
    if len(raw) > MAX_FIELD:
        why = f"expected at most {MAX_FIELD} bytes, found {len(raw)}"
        raise table_error(path, line, "a line that is too long", why, "write one object per line")
    text = _decode(path, raw, line)
    try:
        record = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        _not_json(path, line, f"{error.msg} at column {error.colno}", error)
    except RecursionError as error:
        _not_json(path, line, "it is nested too deeply", error)
    except ValueError as error:
        _not_json(path, line, str(error), error)
    if not isinstance(record, dict):
        _not_json(path, line, f"found {shown(record)}", None)
    return record


def _not_json(path: Path, line: int, found: str, error: Exception | None) -> NoReturn:
    fix = f"correct or remove line {line}; `sed -n {line}p {shlex.quote(str(path))}` shows it"
    raise table_error(path, line, "a line that is no JSON object", f"expected one object; {found}", fix) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: of two equal names the json module keeps the last in silence."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {shown(repeated)} is there twice")
    return record


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON value")
