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
import os
import re
import shlex
import threading
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from latentcache.errors import TableError, UnusableSampleError
from latentcache.fields.table import Rejected
from latentcache.identity.content import content_hash
from latentcache.identity.stat import StatMemo
from latentcache.sources.captions import caption_fault
from latentcache.sources.causes import rejected
from latentcache.sources.layouts.sets import Layout
from latentcache.sources.lines import UTF16_BOMS, listed, parse_json, shown
from latentcache.sources.reading import read_source
from latentcache.sources.walk import is_inside

#: Names of the column of file names, and of the column of captions; in any case.
FILE_COLUMNS = ("file_name", "image", "file", "filename", "path")
CAPTION_COLUMNS = ("text", "caption", "prompt")
#: Longest field of a CSV table in characters, and longest line of a JSONL table in bytes.
MAX_FIELD = 10_000_000
_DELIMITERS = (",", ";", "\t")
_FIELD_LIMIT = threading.Lock()
_QUOTE = 'put a caption that holds a comma, a quote or a line end in double quotes, and write " inside it as ""'
_DRIVE = re.compile(r"[A-Za-z]:")
_LONGEST_NAME = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: a file name as it is written, and a caption or the reason why there is none."""

    name: str
    caption: str
    line: int
    cause: str = ""
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class Listed:
    """Images that are rows of the tables of a layout."""

    taken: dict[str, tuple[int, Row, int]] = field(default_factory=dict)
    """Image -> its set, its row and its repeats."""
    tables: list[tuple[int, str, bytes, StatMemo]] = field(default_factory=list)
    """(set, name, content hash, memo) of each table."""
    rejected: list[Rejected] = field(default_factory=list)
    notes: list[Rejected] = field(default_factory=list)


def listed_images(
    layout: Layout, root: Path, images: Mapping[int, Mapping[str, str]], said: Collection[str]
) -> Listed:
    """Read the tables of a layout, the deepest one first.

    Args:
        layout: Its sets.
        root: Names are below it.
        images: Set -> names of the images in its folder -> the caption file beside each one, if any.
        said: Names that are rejected or noted already.

    Raises:
        TableError: A table cannot be read as a whole.
    """
    found, unlisted = Listed(), dict[str, Rejected]()
    tables = [number for number, one in enumerate(layout.sets) if one.captions.table]
    for number in sorted(tables, key=lambda one: -len(layout.sets[one].prefix)):
        one, inside = layout.sets[number], images.get(number, {})
        table = one.captions.table
        rows, content, memo, notes = read_table(root, table, inside, one.prefix)
        matched = match_rows(table, rows, inside, {*said, *unlisted}, root)
        found.tables.append((number, table, content, memo))
        found.rejected += matched.rejected
        found.notes += [*notes, *(item for item in matched.notes if item.reason != "unlisted")]
        unlisted |= {item.name: item for item in matched.notes if item.reason == "unlisted"}
        again = [name for name in matched.samples if name in found.taken]
        if again:
            detail = f"{len(again)} images are in two tables, the first is {again[0]}; the deeper table counts"
            found.notes.append(rejected(table, "in-two-sets", detail, count=len(again)))
        for name, row in matched.samples.items():
            row = replace(row, caption=one.captions.made(row.caption))
            found.taken.setdefault(name, (number, row, one.repeats))
        beside = sorted(text for text in inside.values() if text)
        if beside:
            detail = f"{len(beside)} caption files beside images are not used, the first is {beside[0]}"
            found.notes.append(rejected(table, "sidecar-unused", detail, count=len(beside)))
    left = {name for names in images.values() for name in names} - set(found.taken)
    found.notes += [item for name, item in unlisted.items() if name in left]
    return found


def read_table(
    root: Path, name: str, images: Collection[str], prefix: str = ""
) -> tuple[tuple[Row, ...], bytes, StatMemo, tuple[Rejected, ...]]:
    """Rows of the table ``name``, in their order; content hash and memo of the file; notes on it.

    Args:
        root: The data folder.
        name: Below it; its base name is one of ``TABLE_NAMES``.
        images: Names of the images in its folder: a CSV without a header is recognized by its first cell.
        prefix: Of that folder; names in the table are relative to it.

    Raises:
        TableError: It cannot be read as a whole; ``where`` is file and line.
    """
    path = root / name
    data, memo = _table_bytes(root, path)
    content = content_hash(data)
    notes = [rejected(name, "bom", f"{name} begins with a UTF-8 BOM")] if data.startswith(codecs.BOM_UTF8) else []
    data = data.removeprefix(codecs.BOM_UTF8)
    with _long_fields():
        rows = tuple(_csv_rows(path, data, images, prefix) if path.suffix == ".csv" else _json_rows(path, data))
    if not rows:
        fix = "add one row per image, or remove the table to use all images"
        raise _error(path, 1, "the table has no rows", "expected one row per image, found none", fix)
    if prefix:
        rows = tuple(row if leads_out(row.name) else replace(row, name=prefix + row.name) for row in rows)
    return rows, content, memo, tuple(notes)


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


def _csv_rows(path: Path, data: bytes, images: Collection[str], prefix: str) -> Iterator[Row]:
    """The rows of a CSV; each has exactly as many fields as the first record."""
    text = _decode(path, data)
    columns, width = (0, 1), 0
    for line, record in _records(path, text, _delimiter(text)):
        if not width:
            width = len(record)
            headerless = width == 2 and bool(image_named(prefix + record[0], images))
            if not headerless:
                columns = choose_columns(path, line, [cell.strip() for cell in record])
                continue
        if len(record) != width:
            why = f"expected {width} fields as in the first line, found {len(record)}: {listed(record)}"
            raise _error(path, line, "a row of another length", why, _QUOTE)
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
            if "unexpected end of data" in str(error):
                last = reader.line_num
                why = f"a double quote is opened in the row of line {line} and never closed until line {last}"
                raise _error(path, line, "a quote is not closed", why, _QUOTE) from error
            why = f"{error} (the row begins on line {line}, this is line {reader.line_num})"
            raise _error(path, line, "a row that is no CSV", why, _QUOTE) from error
        if record:
            yield line, record


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
    both = (
        mark
        for mark in _DELIMITERS
        if _matching(split[mark], FILE_COLUMNS) and _matching(split[mark], CAPTION_COLUMNS)
    )
    return next(both, ",")


# JSON lines


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
        name = record.get(names[0])
        if not isinstance(name, str):
            found = shown(name) if names[0] in record else f"columns: {listed(list(record))}"
            why = f"expected a file name as {names[0]!r}, as in the first row; found {found}"
            raise _error(path, line, "a row without a file name", why, "correct or remove this line")
        if names[1] not in record:
            detail = f"{path.name}:{line} has no {names[1]!r}; found columns: {listed(list(record))}"
            yield Row(name=name, caption="", line=line, cause="table-row", detail=detail)
        else:
            yield make_row(path.name, line, name, record[names[1]])


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


# columns and rows


def choose_columns(path: Path, line: int, found: Sequence[str]) -> tuple[int, int]:
    """Positions of the file column and the caption column.

    Raises:
        TableError: One of them is missing, or there are two.
    """
    return (
        _only_column(path, line, found, FILE_COLUMNS, "file names"),
        _only_column(path, line, found, CAPTION_COLUMNS, "captions"),
    )


def make_row(table: str, line: int, name: str, caption: Any) -> Row:
    """A row with its caption checked: text, without NUL and half surrogate pairs."""
    if not isinstance(caption, str):
        detail = f"{table}:{line} has {shown(caption)} as the caption, expected text"
        return Row(name=name, caption="", line=line, cause="table-row", detail=detail)
    fault = caption_fault(caption)
    if fault:
        detail = f"the caption in {table}:{line} has {fault}"
        return Row(name=name, caption="", line=line, cause="caption-unicode", detail=detail)
    return Row(name=name, caption=caption, line=line)


def _matching(found: Sequence[str], wanted: Sequence[str]) -> list[int]:
    return [position for position, column in enumerate(found) if column.strip().lower() in wanted]


def _only_column(path: Path, line: int, found: Sequence[str], wanted: tuple[str, ...], holds: str) -> int:
    """The one column that holds file names or captions."""
    positions = _matching(found, wanted)
    if len(positions) == 1:
        return positions[0]
    choice = f"{', '.join(wanted[:-1])} or {wanted[-1]}"
    if not positions:
        why = f"expected a column named {choice}; found columns: {listed(found)}"
        fix = f"name the columns in the first line of {path.name}, e.g. `file_name,text`"
        if path.suffix != ".csv":
            fix = f'give every line of {path.name} the form {{"file_name": "a.jpg", "text": "a caption"}}'
        raise _error(path, line, f"no column of {holds}", why, fix)
    names = listed([found[position] for position in positions])
    why = f"each of {names} could be meant; found columns: {listed(found)}"
    raise _error(path, line, f"{len(positions)} columns of {holds}", why, "keep one of them")


# rows against images


@dataclass(slots=True, kw_only=True)
class Matched:
    """Every row and every image in one of these."""

    samples: dict[str, Row] = field(default_factory=dict)
    """Image -> its row."""
    rejected: list[Rejected] = field(default_factory=list)
    notes: list[Rejected] = field(default_factory=list)


def match_rows(
    table: str, rows: Sequence[Row], images: Collection[str], said: Collection[str], root: Path
) -> Matched:
    """Match the rows of the table named ``table`` with the images of a folder.

    Args:
        table: Its name.
        rows: Its rows.
        images: Names of the images.
        said: Names that are rejected or noted already.
        root: The folder.
    """
    found, first_rows, backslashed = Matched(), dict[str, Row](), list[Row]()
    likeness: dict[str, str] = {}
    for row in rows:
        name = image_named(row.name, images)
        known_as = name or _printable(row.name if leads_out(row.name) else _plain(row.name))
        first = first_rows.setdefault(known_as, row)
        if first is not row:
            found.notes.append(_repeated(table, known_as, first, row))
        elif not name:
            if leads_out(row.name) or known_as not in said:
                found.rejected.append(_absent(f"{table}:{row.line}", known_as, row, root, images, likeness))
        elif row.cause:
            found.rejected.append(rejected(name, row.cause, row.detail))
        else:
            found.samples[name] = row
        if first is row and name and "\\" in row.name and "\\" not in name:
            backslashed.append(row)
    if backslashed:
        detail = f"{len(backslashed)} rows have paths with \\, the first on line {backslashed[0].line}; read as /"
        found.notes.append(rejected(table, "backslash", detail, count=len(backslashed)))
    unlisted = (name for name in images if name not in first_rows)
    found.notes += [rejected(name, "unlisted", f"{table} has no row for it") for name in unlisted]
    return found


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


def _repeated(table: str, name: str, first: Row, row: Row) -> Rejected:
    """A second row for one file: the first one counts."""
    same = (first.caption, first.cause) == (row.caption, row.cause)
    says = "with the same caption" if same else f"with another caption; that of line {first.line} is used"
    return rejected(table, "duplicate-row", f"lines {first.line} and {row.line} are both for {name}, {says}")


def _absent(
    where: str, name: str, row: Row, root: Path, images: Collection[str], likeness: dict[str, str]
) -> Rejected:
    """A row whose name is no image that can be used."""
    if leads_out(row.name):
        cause, detail = "outside-root", f"{where} names a file outside the data folder"
    elif _is_file(root, name):
        cause, detail = "unknown", f"{where} names it, but its extension is none of an image that is read"
    else:
        cause, detail = "not-found", f"{where} names it, and there is no such file"
    if not likeness:
        for image in images:
            for like in _likenesses(image):
                likeness.setdefault(like, image)
    meant = next((likeness[like] for like in _likenesses(row.name) if like in likeness), "")
    return rejected(name, cause, detail + (f"; did you mean {meant}?" if meant else ""))


def _likenesses(name: str) -> tuple[str, str]:
    """Base name and stem, in one case and one Unicode form."""
    base = PurePosixPath(name.replace("\\", "/").strip()).name
    base = unicodedata.normalize("NFC", base).casefold()
    return base, base.rpartition(".")[0] or base


def _plain(name: str) -> str:
    """Without ``.`` parts and doubled slashes."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _printable(name: str) -> str:
    """A name that can be encoded as file names are: a table can hold code points that no file name has."""
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        name = name.encode("utf-8", "backslashreplace").decode()
    return name[:_LONGEST_NAME].replace("\0", "\\0") or "(no name)"


def _is_file(root: Path, name: str) -> bool:
    """True if there is such a file; a name that is too long or not allowed is none."""
    try:
        return (root / name).is_file()
    except (OSError, ValueError):
        return False
