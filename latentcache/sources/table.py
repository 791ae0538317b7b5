"""Metadata tables: ``metadata.csv`` and ``metadata.jsonl``, read exactly as they are written.

No cell is shifted, converted or guessed (``NA``, ``001`` and ``None`` stay text). A table that is not well formed is
an error with file and line before any work is done. Every row is a sample, a rejection under the name it gives, or a
note; an image without a row is a note. Names never lead out of the folder. Cost: the whole file in memory, about 3 us
per row.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from latentcache.errors import TableError, UnusableSampleError
from latentcache.fields.captions import BETWEEN
from latentcache.fields.table import Rejected
from latentcache.identity.content import content_hash
from latentcache.identity.stat import StatMemo
from latentcache.sources.captions import caption_fault
from latentcache.sources.causes import rejected
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
#: Longest field of a CSV table in characters, and longest line of a JSONL table in bytes.
MAX_FIELD = 10_000_000
_DELIMITERS = (",", ";", "\t")
_QUOTE = 'put a caption that holds a comma, a quote or a line end in double quotes, and write " inside it as ""'
_DRIVE = re.compile(r"[A-Za-z]:")


class Row(Value):
    """One row: a file name as it is written, and a caption or the reason why there is none."""

    name: str
    caption: str
    line: int
    cause: str = ""
    detail: str = ""
    focus: tuple[float, float] = (-1, -1)


def read_table(
    root: Path, name: str, images: Collection[str], prefix: str = "", rule: CaptionRule | None = None
) -> tuple[tuple[Row, ...], bytes, StatMemo, tuple[Rejected, ...]]:
    """Rows of the table ``name``, in their order; content hash and memo of the file; notes on it.

    Args:
        root: The data folder.
        name: Of the table, below it: CSV, JSON lines, parquet, or JSON as kohya has it.
        images: Names of the images in its folder: a CSV without a header is recognized by its first cell.
        prefix: Of that folder; names in the table are relative to it.
        rule: What is known of its columns.

    Raises:
        TableError: It cannot be read as a whole; ``where`` is file and line.
    """
    path = root / name
    data, memo = _table_bytes(root, path)
    content = content_hash(data)
    notes = [rejected(name, "bom", f"{name} begins with a UTF-8 BOM")] if data.startswith(codecs.BOM_UTF8) else []
    data = data.removeprefix(codecs.BOM_UTF8)
    rule = rule or CaptionRule()
    csv.field_size_limit(max(MAX_FIELD, csv.field_size_limit()))  # 131,072 characters by default
    rows = tuple(_rows(path, data, images, prefix, rule))
    if not rows:
        fix = "add one row per image, or remove the table to use all images"
        raise _error(path, 1, "the table has no rows", "expected one row per image, found none", fix)
    rows = tuple(_placed(row, root, prefix) for row in rows)
    if rule.table_stems:
        stems = {image.rpartition(".")[0]: image for image in sorted(images, reverse=True)}
        rows = tuple(replace(row, name=stems.get(row.name, row.name)) for row in rows)
    return rows, content, memo, tuple(notes)


def _rows(path: Path, data: bytes, images: Collection[str], prefix: str, rule: CaptionRule) -> Iterator[Row]:
    if rule.tag_separator:
        return _kohya_rows(path, data, rule.tag_separator)
    if path.suffix == ".csv":
        return _csv_rows(path, data, images, prefix, rule.table_columns)
    return _named_rows(path, (_parquet_rows if path.suffix == ".parquet" else _json_rows)(path, data), rule)


def _placed(row: Row, root: Path, prefix: str) -> Row:
    """A row with its name below the root; an absolute name below it is one, too."""
    name = row.name
    if name.startswith("/"):
        inside = PurePosixPath(name).is_relative_to(root.absolute().as_posix())
        return replace(row, name=str(PurePosixPath(name).relative_to(root.absolute().as_posix()))) if inside else row
    return row if leads_out(name) else replace(row, name=prefix + name)


def _table_bytes(root: Path, path: Path) -> tuple[bytes, StatMemo]:
    if not is_inside(str(path), os.path.realpath(root)):
        why = f"it is a link to {path.readlink()}, outside the data folder"
        raise _error(path, 0, "the table cannot be used", why, "copy it into the data folder")
    try:
        data, memo = read_source(path)
    except UnusableSampleError as error:
        raise _error(path, 0, "the table cannot be read", error.what, error.fix) from error
    if data.startswith(UTF16_BOMS):
        why = "expected UTF-8, found the byte order mark of UTF-16"
        raise _error(path, 1, "the table is not UTF-8", why, _recode(path, "UTF-16"))
    return data, memo


def _decode(path: Path, data: bytes, first_line: int = 1) -> str:
    """UTF-8 or an error with line and byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        why = f"expected UTF-8, found byte 0x{data[error.start]:02x} at byte {column} of the line"
        raise _error(path, line, "the table is not UTF-8", why, _recode(path, "WINDOWS-1252")) from error


def _recode(path: Path, encoding: str) -> str:
    old, new = shlex.quote(str(path)), shlex.quote(f"{path}.utf8")
    return f"`iconv -f {encoding} -t UTF-8 {old} > {new} && mv {new} {old}`"


def _error(path: Path, line: int, what: str, why: str, fix: str) -> TableError:
    """An error of a table at one line (from 1); line 0 means the whole file."""
    where = f"{path}:{line}" if line else str(path)
    return TableError(f"{path.name}: {what}", where=where, why=why, fix=fix)


# CSV


def _csv_rows(path: Path, data: bytes, images: Collection[str], prefix: str, named: Sequence[str]) -> Iterator[Row]:
    """The rows of a CSV; each has exactly as many fields as the first record."""
    text = _decode(path, data)
    columns, point, width = (0, 1), list[int](), 0
    for line, record in _records(path, text, _delimiter(text)):
        if not width:
            width = len(record)
            headerless = width == 2 and bool(image_named(prefix + record[0], images))
            if not headerless:
                columns = choose_columns(path, line, [cell.strip() for cell in record], named)
                point = [at for name in FOCUS_COLUMNS for at in _matching(record, (name,))]
                continue
        if len(record) != width:
            why = f"expected {width} fields as in the first line, found {len(record)}: {listed(record)}"
            raise _error(path, line, "a row of another length", why, _QUOTE)
        yield make_row(path.name, line, record[columns[0]], record[columns[1]], [record[at] for at in point])


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
            if "unexpected end of data" in str(error):
                last = reader.line_num
                why = f"a double quote is opened in the row of line {line} and never closed until line {last}"
                raise _error(path, line, "a quote is not closed", why, _QUOTE) from error
            why = f"{error} (the row begins on line {line}, this is line {reader.line_num})"
            raise _error(path, line, "a row that is no CSV", why, _QUOTE) from error
        if record:
            yield line, record


def _delimiter(text: str) -> str:
    """Comma, unless the header is one only with a semicolon or a tab."""
    header = text.lstrip("\r\n").partition("\n")[0][:MAX_FIELD]
    split = {mark: [cell.strip('" \r') for cell in header.split(mark)] for mark in _DELIMITERS}
    both = (
        mark
        for mark in _DELIMITERS
        if _matching(split[mark], FILE_COLUMNS) and _matching(split[mark], CAPTION_COLUMNS)
    )
    return next(both, ",")


# JSON lines


def _json_rows(path: Path, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line and object of each row."""
    for line, raw in enumerate(data.split(b"\n"), start=1):
        if raw.strip():
            yield line, _json_record(path, line, raw)


def _named_rows(path: Path, records: Iterable[tuple[int, dict[str, Any]]], rule: CaptionRule) -> Iterator[Row]:
    """The rows of a JSONL or parquet table; the first one says which names hold the file and the caption."""
    names: tuple[str, ...] = ()
    for line, record in records:
        if not names:
            keys = list(record)
            found = choose_columns(path, line, keys, rule.table_columns)
            names = *(keys[at] for at in found), *(name for name in rule.table_columns[2:] if name in record)
        name = record.get(names[0])
        if isinstance(name, int):
            name = str(name)
        if not isinstance(name, str):
            said = shown(name) if names[0] in record else f"columns: {listed(list(record))}"
            why = f"expected a file name as {names[0]!r}, as in the first row; found {said}"
            raise _error(path, line, "a row without a file name", why, "correct or remove this line")
        point = [record[one] for one in FOCUS_COLUMNS if one in record]
        texts = [record[one] for one in names[1:] if record.get(one) not in (None, "")]
        if not texts and record.get(rule.table_fallback) is not None:
            texts = [record[rule.table_fallback]]
        if not texts and names[1] not in record:
            detail = f"{path.name}:{line} has no {names[1]!r}; found columns: {listed(list(record))}"
            yield Row(name=name, caption="", line=line, cause="table-row", detail=detail)
            continue
        several = [one for text in texts for one in (text if isinstance(text, list) else [text])]
        yield make_row(path.name, line, name, several if len(texts) > 1 else (*texts, record.get(names[1]))[0], point)


def _json_record(path: Path, line: int, raw: bytes) -> dict[str, Any]:
    """One line as an object."""
    if len(raw) > MAX_FIELD:
        why = f"expected at most {MAX_FIELD} bytes, found {len(raw)}"
        raise _error(path, line, "a line that is too long", why, "write one object per line")
    try:
        record = parse_json(_decode(path, raw, line))
    except UnusableSampleError as error:
        _not_json(path, line, error.what.removeprefix("no JSON: "), error)
    if not isinstance(record, dict):
        _not_json(path, line, f"found {shown(record)}", None)
    return record


def _not_json(path: Path, line: int, found: str, error: Exception | None) -> NoReturn:
    fix = f"correct or remove line {line}; `sed -n {line}p {shlex.quote(str(path))}` shows it"
    raise _error(path, line, "a line that is no JSON object", f"expected one object; {found}", fix) from error


# parquet, and JSON as kohya has it


def _parquet_rows(path: Path, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and values of each row."""
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
    rows = (row for batch in table.to_batches(1 << 12) for row in batch.to_pylist())
    return enumerate(rows, start=1)


def _kohya_rows(path: Path, data: bytes, separator: str) -> Iterator[Row]:
    """An object of images, or lines with ``image_path``: the caption, then the tags."""
    if path.suffix == ".jsonl":
        lines = (
            (line, _json_record(path, line, raw)) for line, raw in enumerate(data.split(b"\n"), 1) if raw.strip()
        )
        found = [(line, str(value.get("image_path", "")), value) for line, value in lines]
    else:
        try:
            value = parse_json(_decode(path, data))
        except UnusableSampleError as error:
            raise _error(path, 0, "it is not JSON", error.what, "correct it, or make it again") from error
        pairs = value.items() if isinstance(value, dict) else ()
        found = [(line, name, one if isinstance(one, dict) else {}) for line, (name, one) in enumerate(pairs, 1)]
    for line, name, one in found:
        caption, tags = one.get("caption") or "", one.get("tags") or ""
        text = f"{caption}{separator}{tags}" if caption and tags else caption or tags
        yield make_row(path.name, line, name, text)


# columns and rows


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


def make_row(table: str, line: int, name: str, caption: Any, point: Sequence[Any] = ()) -> Row:
    """A row with its caption checked (text, without NUL and half surrogate pairs), and its point, if it has one."""
    several = isinstance(caption, list) and bool(caption) and all(isinstance(one, str) for one in caption)
    if not several and not isinstance(caption, str):
        detail = f"{table}:{line} has {shown(caption)} as the caption, expected text"
        return Row(name=name, caption="", line=line, cause="table-row", detail=detail)
    fault = next(filter(None, map(caption_fault, caption if several else [caption])), "")
    if fault:
        detail = f"the caption in {table}:{line} has {fault}"
        return Row(name=name, caption="", line=line, cause="caption-unicode", detail=detail)
    caption = BETWEEN.join(caption) if several else caption
    if all(one in (None, "") for one in point):
        return Row(name=name, caption=caption, line=line)
    try:
        x, y = map(float, point)
        if not (0 <= x < math.inf and 0 <= y < math.inf):
            raise ValueError
    except (ValueError, TypeError):
        detail = (
            f"{table}:{line} has the point {shown(list(point))}, expected two numbers from 0: focus_x and focus_y"
        )
        return Row(name=name, caption="", line=line, cause="table-row", detail=detail)
    return Row(name=name, caption=caption, line=line, focus=(x, y))


def _matching(found: Sequence[str], wanted: Sequence[str]) -> list[int]:
    return [position for position, column in enumerate(found) if column.strip().lower() in wanted]


def _only_column(path: Path, line: int, found: Sequence[str], wanted: Sequence[str], holds: str) -> int:
    """The one column that holds file names or captions."""
    positions = _matching(found, wanted)
    if len(positions) == 1:
        return positions[0]
    choice = " or ".join([", ".join(wanted[:-1]), wanted[-1]] if len(wanted) > 1 else wanted)
    if not positions:
        why = f"expected a column named {choice}; found columns: {listed(found)}"
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
