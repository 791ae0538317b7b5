"""The records of DATA in columns: files that may have changed are read, others are believed.

Each distinct content is one document; rows keep duplicates. Cost: one pass of parsing and hashing over new files, and
30 bytes of memory per record. Files are read again when their records are encoded. Every line of a file that is not
blank gives a record or a rejection with its line and field. A bad line never stops the others, and a file that cannot
be read to its end keeps the records before that place. Lines, text lines and rows are streamed; a JSON list is read
whole (at most 1 GiB). Of parquet and Arrow files one batch is in memory. Their bytes are hashed first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, SourceError, UnusableSampleError, count_of
from latentcache.fields.strings import Strings
from latentcache.fields.table import STAT_WIDTH, Files, Input, Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES
from latentcache.identity.stat import StatMemo
from latentcache.sources.archives.members import opened
from latentcache.sources.causes import Notes, as_rejected, fault, in_order
from latentcache.sources.causes import rejected as note
from latentcache.sources.known import KnownFiles, hash_rows, is_range
from latentcache.sources.layout import RecordFiles
from latentcache.sources.reading import (
    BLANK,
    MAX_LINE_BYTES,
    MAX_SOURCE_BYTES,
    LineReader,
    decode,
    open_source,
    parse_json,
    parse_json_at,
    stat_source,
)
from latentcache.sources.records import (
    EXPECTED,
    TEXT,
    Record,
    RecordFormat,
    Way,
    detect_format,
    map_record,
    record_size,
)
from latentcache.sources.units import Scan, ScanResult

#: Rejected records of one file and one reason that are listed; the others are counted.
_LISTED = 1000
_ROWS, _OFTEN = 1024, 4096
#: A row, as numpy and as ``struct`` have it.
_ROW = np.dtype(
    [("file", "=i4"), ("line", "=u4"), ("characters", "=u4"), ("form", "u1"), ("content", f"V{HASH_BYTES}")]
)
_PACKED = Struct(f"=iIIB{HASH_BYTES}s")
_BLOCK = 1 << 14


def read_records(
    root: Path, samples: SampleTable, ways: Sequence[Way | None], rows: NDArray[np.integer]
) -> Iterator[tuple[int, Record | None]]:
    """(row, record) of ascending rows; None if the file does not hold it any more. Other files are not read.

    ``ways`` are those of the files; None: the file is not read.
    """
    held = samples.inputs["record"]
    if len(rows) > 1 and not (np.diff(rows) > 0).all():
        raise ValueError("rows of records must ascend")
    file_of = np.asarray(held.file)[rows]
    bounds = [0, *(np.flatnonzero(np.diff(file_of)) + 1).tolist(), len(rows)]
    for start, stop in pairwise(bounds) if len(rows) else ():
        name, way = samples.files.names[int(file_of[start])], ways[int(file_of[start])]
        reader = RecordReader(root / name, name, way) if way is not None else ()
        yield from _matching(reader, rows[start:stop], held)


def _matching(
    records: Iterable[Record], rows: NDArray[np.integer], held: Input
) -> Iterator[tuple[int, Record | None]]:
    """Rows of one file with their records, by line and content."""
    assert held.line is not None
    lines, contents, done = np.asarray(held.line)[rows].tolist(), np.asarray(held.content)[rows].tobytes(), 0
    numbers = rows.tolist()
    try:
        for record in records:
            while done < len(lines) and lines[done] < record.line:
                yield numbers[done], None
                done += 1
            if done == len(lines):
                return
            if lines[done] == record.line and contents.startswith(record.content, done * HASH_BYTES):
                yield numbers[done], record
                done += 1
    except (UnusableSampleError, SourceError):
        pass  # the rest is not there
    yield from ((row, None) for row in numbers[done:])


class RecordScan(Scan):
    """A scan of records; see ``scan.scan``."""

    def __call__(self, files: RecordFiles) -> ScanResult:
        """All records of these files; raises SourceError for one alone of which nothing can be read."""
        part = str(self.options.part or "")
        readings = {way: way.reading(part) for way in dict.fromkeys(files.ways)}
        reading = hash_rows(readings[way] for way in files.ways)
        stats = np.array([(*one, 0) for one in files.stats], dtype=np.uint64).reshape(-1, STAT_WIDTH)
        held = self.held(Strings.of(files.names), stats, reading)
        rejected, without, rows = list[Rejected](), list[Rejected](), bytearray()
        read = partial(self._read, files=files, held=held, rows=rows, rejected=rejected, without=without)
        known = self.contained(held, np.arange(len(files.names)), "record", rejected, read)
        table = held.table
        if table is not None and not is_range(held.place, len(table.files)):
            table = None
        if table is None:
            new = np.frombuffer(rows, dtype=_ROW)
            table = _table(held, reading, np.concatenate([_known(held.table, *held.rows_in("record", known)), new]))
        rejected = [*in_order(files.rejected), *_in_order(rejected, files.names)]
        if self.options.part is None:  # else they may be in other parts
            is_none = np.bincount(np.asarray(table.inputs["record"].file), minlength=len(files.names)) == 0
            named = {item.name for item in (*rejected, *without)}
            names = held.names.take(np.flatnonzero(is_none))
            without += [note(name, "unused", "it holds no records") for name in names if name not in named]
            if not len(table) and not rejected and not self.stopping():
                raise _nothing(files, without)
        return ScanResult(samples=table, rejected=tuple(rejected), notes=(*files.notes, *in_order(without)))

    def _read(
        self,
        file: int,
        files: RecordFiles,
        held: KnownFiles,
        rows: bytearray,
        rejected: list[Rejected],
        without: list[Rejected],
    ) -> None:
        """Add the rows of one file, its rejected records, and a note if it is no file of records."""
        name = files.names[file]
        reader, part = RecordReader(files.root / name, name, files.ways[file]), self.options.part
        try:
            for number, record in enumerate(reader, start=1):
                if part is None or part.holds(record.content):
                    size = min(record_size(record), 0xFFFF_FFFF)
                    rows += _PACKED.pack(file, record.line, size, record.form, record.content)
                if not number % _OFTEN and self.stopping():
                    return
        except UnusableSampleError as error:
            if files.alone and not reader.last:
                raise SourceError(f"{name}: {error.what}", where=str(reader.path), fix=error.fix) from error
            if error.slug == "not-records":
                without.append(note(name, "unused", error.what))
                return
            if not reader.last:
                raise
            error.what = f"rest unread: {error.what}"
            rejected += [*reader.rejected.all(), as_rejected(name, error, line=reader.last + 1)]
            return  # to be read again: nothing is known of the rest
        assert reader.stat is not None
        rejected += reader.rejected.all()
        held.remember(file, reader.content, reader.stat)


def _in_order(rejected: Iterable[Rejected], names: Sequence[str]) -> list[Rejected]:
    """By file and line."""
    place = {name: number for number, name in enumerate(names)}
    return sorted(rejected, key=lambda item: (place[item.name], item.line))


def _nothing(files: RecordFiles, notes: Sequence[Rejected]) -> EmptySourceError:
    return EmptySourceError(
        f"{count_of(len(files.names), 'files')} of {files.root} without a record",
        where=str(files.root),
        why="; ".join(f"{item.name}: {item.detail}" for item in notes[:3]),
        fix=f"give files of texts or conversations: expected {EXPECTED}",
    )


def _known(table: SampleTable | None, rows: NDArray[np.integer], file: NDArray[np.integer]) -> NDArray[Any]:
    known = np.empty(len(rows), dtype=_ROW)
    if table is not None and len(rows):
        old = table.inputs["record"]
        columns = {"line": old.line, **table.columns, "content": np.asarray(old.content).view(f"V{HASH_BYTES}")[:, 0]}
        known["file"] = file
        for name in ("line", "content", "characters", "form"):
            known[name] = np.asarray(columns[name])[rows]
    return known


def _table(held: KnownFiles, reading: NDArray[np.uint8], rows: NDArray[Any]) -> SampleTable:
    """Rows in any order as samples, by file and line."""
    place = rows["file"].astype(np.int64) << 32 | rows["line"]
    if not (np.diff(place) >= 0).all():
        rows = rows[np.argsort(place, kind="stable")]
    column: dict[str, NDArray[Any]] = {name: np.ascontiguousarray(rows[name]) for name in _ROW.names or ()}

    def labels() -> Iterator[list[str]]:
        for start in range(0, len(rows), _BLOCK):
            numbers, place = np.unique(column["file"][start : start + _BLOCK], return_inverse=True)
            own, lines = held.names.take(numbers), column["line"][start : start + _BLOCK].tolist()
            yield [f"{own[number]}:{one}" for number, one in zip(place.tolist(), lines, strict=True)]

    content = column["content"].view(np.uint8).reshape(-1, HASH_BYTES)
    return SampleTable(
        names=Strings.of(chain.from_iterable(labels())),
        files=Files(names=held.names, stat=held.stat, content=held.content, reading=reading),
        inputs={"record": Input(content=content, file=column["file"], line=column["line"])},
        columns={"characters": column["characters"], "form": column["form"]},
    )


@dataclass(slots=True)
class RecordReader:
    """The records of one file, read once by iterating. ``stat`` and ``content`` are known at the end."""

    path: Path
    name: str
    way: Way
    rejected: Notes = field(default_factory=lambda: Notes(_LISTED))
    """The records that are rejected."""
    last: int = 0
    """Line, row or item that was read last."""
    stat: StatMemo | None = None
    content: bytes = b""
    _form: RecordFormat | None = None

    def __iter__(self) -> Iterator[Record]:
        """Every usable record; raises UnusableSampleError if it cannot be read to its end."""
        self._form = self.way.form
        with open_source(self.path) as file:
            reader = LineReader(file, self.path)
            if self.way.kind in ("parquet", "arrow"):
                for _ in reader.chunks():
                    pass
            elif self.way.kind == "text":
                error = fault("text-too-large", "it has more than 64 MiB", self.path)
                whole = reader.lines() if self.way.text_lines else [(1, reader.all_bytes(MAX_LINE_BYTES, error))]
                yield from self._records(whole, lambda raw: {TEXT.text: decode(raw)})
            elif reader.head.lstrip(BLANK).startswith(b"["):
                yield from self._records(self._items(reader), _or_raise)
            else:
                lines = self._lines_of_object(reader) if self._may_be_object(reader) else reader.lines()
                yield from self._records(lines, lambda raw: parse_json(decode(raw)))
            self.stat, self.content = reader.finish()
        if self.way.kind in ("parquet", "arrow"):
            yield from self._columnar()
            if self.stat.identity != stat_source(self.path).identity:
                raise fault("changing", "its size or time changed while it was read", self.path)

    def _records(self, values: Iterable[tuple[int, Any]], parse: Callable[[Any], Any]) -> Iterator[Record]:
        """The records of (line, value); a line that makes none is rejected."""
        for line, value in values:
            try:
                parsed = parse(value)
                if self._form is None and isinstance(parsed, dict):
                    self._form = detect_format(parsed)
                form, is_described = self._form or TEXT, self.way.form is not None
                record = map_record(parsed, form, source=self.name, line=line, is_described=is_described)
            except UnusableSampleError as error:
                self.rejected.add(as_rejected(self.name, error, line=line, field=error.where))
            else:
                yield record
            self.last = line

    def _may_be_object(self, reader: LineReader) -> bool:
        """True if the first line alone is no JSON, or a ``.json`` file has no other one."""
        first, end, _ = reader.head.strip(BLANK).partition(b"\n")
        if not first.startswith(b"{") or reader.size > MAX_LINE_BYTES:
            return False
        if not end:
            return self.name.lower().endswith(".json")
        try:
            parse_json(decode(first))
        except UnusableSampleError:
            return True
        return False

    def _lines_of_object(self, reader: LineReader) -> Iterator[tuple[int, bytes]]:
        """A file as one line if it is one object, else its lines; raises ``not-records`` for settings."""
        data = reader.all_bytes(MAX_LINE_BYTES, fault("too-large", "it has more than 64 MiB", self.path))
        try:
            value = parse_json(decode(data))
            if self._form is None:
                self._form = detect_format(value)
        except UnusableSampleError as error:
            if error.slug == "record-field":
                raise fault("not-records", f"it is one JSON object, and no record: {error.what}") from error
            lines = enumerate(data.split(b"\n"), start=1)
            yield from ((line, raw) for line, raw in lines if raw.strip(BLANK))
        else:
            yield 1, data

    def _items(self, reader: LineReader) -> Iterator[tuple[int, Any]]:
        """The items of a list by number, as several may be on one line; an error for one that is lost alone.

        Raises UnusableSampleError at the item from which the list is broken.
        """
        words = "a JSON list has at most 1 GiB; `jq -c '.[]'` makes lines of it"
        data = reader.all_bytes(MAX_SOURCE_BYTES, fault("too-large", words, self.path))
        try:
            text, is_utf8 = data.decode(), True
        except UnicodeDecodeError:
            text, is_utf8 = data.decode("utf-8", "surrogateescape"), False
        place, number = _skip(text, text.index("[") + 1), 1
        has_objects = False
        while text[place : place + 1] != "]":
            if number > 1 and text[place : place + 1] != ",":
                raise fault("no-json", f"expected , or ] at {_position(text, place)}")
            place = _skip(text, place + 1) if number > 1 else place
            value, end = _item(text, place)
            has_objects |= isinstance(value, dict)
            yield number, value if is_utf8 else _in_utf8(text[place:end], value)
            place, number = _skip(text, end), number + 1
        if text[place + 1 :].strip():
            raise fault("no-json", f"expected nothing after the list, which ends at {_position(text, place)}")
        if number > 1 and not has_objects:
            raise fault("not-records", "it is a list without objects")

    def _columnar(self) -> Iterator[Record]:
        with opened(self.path, self.way.kind) as table:
            # ``datasets`` (its feature ``Json``) writes values of several forms as JSON.
            kinds = {column.name: column.type for column in table.schema if "arrow.json" in str(column.type)}
            rows = (row for batch in table.batches(rows=_ROWS) for row in batch.to_pylist())
            parse = lambda row: {**row, **{name: _parsed(row[name], kind) for name, kind in kinds.items()}}  # noqa: E731
            yield from self._records(enumerate(rows, start=1), parse)


def _parsed(value: Any, kind: Any) -> Any:
    if value is None or "arrow.json" not in str(kind):
        return value
    if isinstance(value, list):
        return [_parsed(one, kind.value_type) for one in value]
    if isinstance(value, dict):
        return {name: _parsed(one, kind.field(name).type) for name, one in value.items()}
    return parse_json(value)


def _or_raise(value: Any) -> Any:
    if isinstance(value, UnusableSampleError):
        raise value
    return value


def _item(text: str, start: int) -> tuple[Any, int]:
    """The item of a list that begins at ``start``, or why it is lost, and where it ends."""
    try:
        return parse_json_at(text, start)
    except UnusableSampleError as error:
        try:
            return error, _LENIENT.raw_decode(text, start)[1]
        except (ValueError, RecursionError):  # no other reader could say where it ends either
            raise error from None


def _in_utf8(text: str, value: Any) -> Any:
    """The value of an item, or the error if its text has bytes that are not UTF-8."""
    try:
        decode(text.encode("utf-8", "surrogateescape"))
    except UnusableSampleError as error:
        return error
    return value


def _skip(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


def _position(text: str, place: int) -> str:
    return f"line {text.count(chr(10), 0, place) + 1}, column {place - text.rfind(chr(10), 0, place)}"


#: Takes what JSON forbids, but for the form of a list: NaN, equal names, numbers of any length, control characters.
_LENIENT = json.JSONDecoder(strict=False, parse_int=str)
