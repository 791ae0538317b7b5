"""Metadata tables: CSV, JSON lines, parquet and kohya's JSON, read exactly as they are written.

No cell is shifted, converted or guessed (``NA``, ``001`` and ``None`` stay text). A table that is not well formed is
an error with file and line before any work is done. Cost: the whole file in memory, about 3 us per row.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from latentcache.errors import TableError, UnusableSampleError
from latentcache.fields.captions import BETWEEN
from latentcache.identity.content import content_hash
from latentcache.identity.stat import StatMemo
from latentcache.sources.captions import caption_fault
from latentcache.sources.layouts.sets import CaptionRule
from latentcache.sources.lines import UTF16_BOMS, listed, parse_json, shown
from latentcache.sources.reading import read_source
from latentcache.sources.walk import is_inside
from latentcache.value import Value

#: Names of the column of file names, and of the column of captions; in any case.
FILE_COLUMNS = ("file_name", "image", "file", "filename", "path")
CAPTION_COLUMNS = ("text", "caption", "prompt")
#: Names of the columns of the point in the middle of a focus crop; see ``fields.focus``.
FOCUS_COLUMNS = ("focus_x", "focus_y")
_QUOTE = 'put a caption that holds a comma, a quote or a line end in double quotes, and write " inside it as ""'
_DRIVE = re.compile(r"[A-Za-z]:")

#: Line, and name of a column -> value, of each row.
_Records = Iterator[tuple[int, dict[str, Any]]]


class Row(Value):
    """One row: a file name as it is written, and a caption or the reason why there is none."""

    name: str
    caption: str = ""
    line: int
    cause: str = ""
    detail: str = ""
    focus: tuple[float, float] = (-1, -1)


def read_table(
    root: Path, name: str, images: Collection[str], prefix: str = "", rule: CaptionRule | None = None
) -> tuple[tuple[Row, ...], bytes, StatMemo]:
    """Rows of the table ``name``, in their order; content hash and memo of the file.

    Args:
        root: The data folder.
        name: Of the table, below it: CSV, JSON lines, parquet, or JSON as kohya has it.
        images: Names of the images in its folder: a CSV without a header is recognized by its first cell.
        prefix: Of that folder; names in the table are relative to it.
        rule: What is known of its columns.

    Raises:
        TableError: It cannot be read as a whole; ``where`` is file and line.
    """
    path, rule = root / name, rule or CaptionRule()
    if not is_inside(str(path), os.path.realpath(root)):
        why = f"it is a link to {path.readlink()}, outside the data folder"
        raise _error(path, 0, "the table cannot be used", why, "copy it into the data folder")
    try:
        data, memo = read_source(path)
    except UnusableSampleError as error:
        raise _error(path, 0, "the table cannot be read", error.what, error.fix) from error
    content, data = content_hash(data), data.removeprefix(codecs.BOM_UTF8)
    if rule.tag_separator and path.suffix != ".jsonl":
        records = _kohya_records(path, data)
    elif path.suffix == ".csv":
        records = _csv_records(path, data, images, prefix, rule.table_columns)
    elif path.suffix == ".parquet":
        records = _parquet_records(path, data)
    else:
        records = _json_records(path, data)
    rows = tuple(_placed(row, root, prefix) for row in _rows(path, records, rule))
    if not rows:
        fix = "add one row per image, or remove the table to use all images"
        raise _error(path, 1, "the table has no rows", "expected one row per image, found none", fix)
    if rule.table_stems:
        stems = {image.rpartition(".")[0]: image for image in sorted(images, reverse=True)}
        rows = tuple(replace(row, name=stems.get(row.name, row.name)) for row in rows)
    return rows, content, memo


def _rows(path: Path, records: _Records, rule: CaptionRule) -> Iterator[Row]:
    """The rows; the first one says which columns hold the file and the caption."""
    names: tuple[str, ...] = ()
    for line, record in records:
        if rule.tag_separator:
            said = [one for one in (record.get("caption"), record.get("tags")) if one]
            yield make_row(path, line, str(record.get("image_path", "")), rule.tag_separator.join(map(str, said)))
            continue
        if not names:
            keys = list(record)
            found = choose_columns(path, line, keys, rule.table_columns)
            names = *(keys[at] for at in found), *(name for name in rule.table_columns[2:] if name in record)
        name = record.get(names[0])
        if not isinstance(name, str | int):
            found_name = shown(name) if names[0] in record else f"columns: {listed(list(record))}"
            why = f"expected a file name as {names[0]!r}, as in the first row; found {found_name}"
            raise _error(path, line, "a row without a file name", why, "correct or remove this line")
        texts = [record[one] for one in names[1:] if record.get(one) not in (None, "")]
        if not texts:
            texts = [record[one] for one in (rule.table_fallback, names[1]) if record.get(one) is not None]
        several = [one for text in texts for one in (text if isinstance(text, list) else [text])]
        point = [record[one] for one in FOCUS_COLUMNS if one in record]
        yield make_row(path, line, str(name), several if len(several) > 1 else (*texts, None)[0], point)


def make_row(path: Path, line: int, name: str, caption: Any, point: Sequence[Any] = ()) -> Row:
    """A row with its caption checked (text, without NUL and half surrogate pairs), and its point, if it has one."""

    def rejected(cause: str, detail: str) -> Row:
        return Row(name=name, line=line, cause=cause, detail=detail)

    several = caption if isinstance(caption, list) and caption else [caption]
    if not all(isinstance(one, str) for one in several):
        return rejected("table-row", f"{path.name}:{line} has {shown(caption)} as the caption, expected text")
    if fault := next(filter(None, map(caption_fault, several)), ""):
        return rejected("caption-unicode", f"the caption in {path.name}:{line} has {fault}")
    focus = (-1.0, -1.0)
    if any(one not in (None, "") for one in point):
        try:
            x, y = map(float, point)
            if not (0 <= x < math.inf and 0 <= y < math.inf):
                raise ValueError
        except (ValueError, TypeError):
            expected = "expected two numbers from 0: focus_x and focus_y"
            return rejected("table-row", f"{path.name}:{line} has the point {shown(list(point))}, {expected}")
        focus = x, y
    return Row(name=name, caption=BETWEEN.join(several), line=line, focus=focus)


def _placed(row: Row, root: Path, prefix: str) -> Row:
    """A row with its name below the root; an absolute name below it is one, too."""
    name, above = row.name, root.absolute().as_posix()
    if name.startswith("/"):
        inside = PurePosixPath(name).is_relative_to(above)
        return replace(row, name=str(PurePosixPath(name).relative_to(above))) if inside else row
    return row if leads_out(name) else replace(row, name=prefix + name)


def _decode(path: Path, data: bytes, first_line: int = 1) -> str:
    """UTF-8 or an error with line and byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        why = f"expected UTF-8, found byte 0x{data[error.start]:02x} at byte {column} of the line"
        encoding = "UTF-16" if data.startswith(UTF16_BOMS) else "WINDOWS-1252"
        old, new = shlex.quote(str(path)), shlex.quote(f"{path}.utf8")
        fix = f"`iconv -f {encoding} -t UTF-8 {old} > {new} && mv {new} {old}`"
        raise _error(path, line, "the table is not UTF-8", why, fix) from error


def _error(path: Path, line: int, what: str, why: str, fix: str) -> TableError:
    """An error of a table at one line (from 1); line 0 means the whole file."""
    where = f"{path}:{line}" if line else str(path)
    return TableError(f"{path.name}: {what}", where=where, why=why, fix=fix)


# formats


def _csv_records(path: Path, data: bytes, images: Collection[str], prefix: str, named: Sequence[str]) -> _Records:
    """The rows of a CSV; each has exactly as many fields as the first line."""
    text, header = _decode(path, data), list[str]()
    csv.field_size_limit(max(len(data), csv.field_size_limit()))  # 131,072 characters by default
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            why = f"{error}; the row begins on line {line}, this is line {reader.line_num}"
            raise _error(path, line, "a row that is no CSV", why, _QUOTE) from error
        if cells is None:
            return
        if not header and cells:
            if len(cells) != 2 or not image_named(prefix + cells[0], images):
                header = [cell.strip() for cell in cells]
                choose_columns(path, line, header, named)
                continue
            header = [FILE_COLUMNS[0], CAPTION_COLUMNS[0]]
        if cells and len(cells) != len(header):
            why = f"expected {len(header)} fields as in the first line, found {len(cells)}: {listed(cells)}"
            raise _error(path, line, "a row of another length", why, _QUOTE)
        if cells:
            yield line, dict(zip(header, cells, strict=True))


def _json_records(path: Path, data: bytes) -> _Records:
    for line, raw in enumerate(data.split(b"\n"), start=1):
        if raw.strip():
            yield line, _json_object(path, raw, line)


def _json_object(path: Path, raw: bytes, line: int) -> dict[str, Any]:
    cause: Exception | None = None
    try:
        value = parse_json(_decode(path, raw, line))
        found = f"found {shown(value)}"
    except UnusableSampleError as error:
        value, cause, found = None, error, error.what.removeprefix("no JSON: ")
    if not isinstance(value, dict):
        fix = f"correct or remove line {line}; `sed -n {line}p {shlex.quote(str(path))}` shows it"
        raise _error(path, line, "a line that is no JSON object", f"expected one object; {found}", fix) from cause
    return value


def _kohya_records(path: Path, data: bytes) -> _Records:
    """An object of images, each with its caption and tags."""
    for number, (name, one) in enumerate(_json_object(path, data, 1).items(), start=1):
        yield number, {**(one if isinstance(one, dict) else {}), "image_path": name}


def _parquet_records(path: Path, data: bytes) -> _Records:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        fix = "`pip install 'latentcache[hf]'`, or save the table as metadata.jsonl"
        raise _error(path, 0, "pyarrow is needed to read it", "it is a parquet file", fix) from error
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise _error(path, 0, "it is no parquet file", str(error), "save it again, or as metadata.jsonl") from error
    yield from enumerate((row for batch in table.to_batches(1 << 12) for row in batch.to_pylist()), start=1)


# columns and names


def choose_columns(path: Path, line: int, found: Sequence[str], named: Sequence[str] = ()) -> tuple[int, int]:
    """Positions of the file column and the caption column; ``named`` are their names if they are known.

    Raises:
        TableError: One of them is missing, or there are two.
    """
    files, captions = (named[:1], named[1:2]) if named else (FILE_COLUMNS, CAPTION_COLUMNS)
    return (
        _only_column(path, line, found, [name.lower() for name in files], "file names"),
        _only_column(path, line, found, [name.lower() for name in captions], "captions"),
    )


def _matching(found: Sequence[str], wanted: Sequence[str]) -> list[int]:
    return [position for position, column in enumerate(found) if column.strip().lower() in wanted]


def _only_column(path: Path, line: int, found: Sequence[str], wanted: Sequence[str], holds: str) -> int:
    """The one column that holds file names or captions."""
    positions = _matching(found, wanted)
    if len(positions) == 1:
        return positions[0]
    if not positions:
        why = f"expected a column named {' or '.join(wanted)}; found columns: {listed(found)}"
        fix = f"name the columns in the first line of {path.name}, e.g. `file_name,text`"
        if path.suffix != ".csv":
            fix = f'give every line of {path.name} the form {{"file_name": "a.jpg", "text": "a caption"}}'
        raise _error(path, line, f"no column of {holds}", why, fix)
    names = listed([found[position] for position in positions])
    why = f"each of {names} could be meant; found columns: {listed(found)}"
    raise _error(path, line, f"{len(positions)} columns of {holds}", why, "keep one of them")


def image_named(raw: str, images: Collection[str]) -> str:
    """The image that a table means by ``raw``, empty when there is none.

    ``./`` and doubled slashes are harmless, a backslash is a separator if no file has it in its name. Names that lead
    out of the folder are never looked up.
    """
    if raw in images:
        return raw
    if leads_out(raw):
        return ""
    return next((name for name in (plain(raw), plain(raw.replace("\\", "/"))) if name in images), "")


def leads_out(raw: str) -> bool:
    """True if a name is absolute, has a drive letter or a ``..`` part, with either separator."""
    path = raw.replace("\\", "/")
    return path.startswith("/") or ".." in path.split("/") or _DRIVE.match(raw) is not None


def plain(name: str) -> str:
    """A name without ``.`` parts and doubled slashes."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))
