"""The records of DATA in columns: files that may have changed are read, others are believed.

Each distinct content is one document; rows keep duplicates. Cost: one pass of parsing and hashing over new files, and
30 bytes of memory per record. Files are read again when their records are encoded. Every line of a file that is not
blank gives a record or a rejection with its line and field. A bad line never stops the others. Lines, text lines and
rows are streamed; a JSON list is read whole (at most 1 GiB). Of parquet and Arrow files one batch is in memory. Their
bytes are hashed first, and a file that changes in between is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import SourceError, UnusableSampleError
from latentcache.fields.strings import Strings
from latentcache.fields.table import STAT_WIDTH, Files, Input, Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES
from latentcache.identity.stat import StatMemo
from latentcache.sources.archives.members import opened
from latentcache.sources.causes import as_rejected, fault, in_order
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
from latentcache.sources.records import TEXT, Record, RecordFormat, Way, detect_format, map_record, record_size
from latentcache.sources.units import Scan, ScanResult

#: A scan ends with an error after so many rejected records: this is another kind of file.
MAX_REJECTED = 100_000
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
        """All records of these files; raises SourceError for one alone, or one that fails after some records."""
        part = str(self.options.part or "")
        readings = {way: way.reading(part) for way in dict.fromkeys(files.ways)}
        reading = hash_rows(readings[way] for way in files.ways)
        stats = np.array([(*one, 0) for one in files.stats], dtype=np.uint64).reshape(-1, STAT_WIDTH)
        held = self.held(Strings.of(files.names), stats, reading)
        rejected, rows = list[Rejected](), bytearray()
        read = partial(self._read, files=files, held=held, rows=rows, bad=rejected)
        known = self.contained(held, np.arange(len(files.names)), "record", rejected, read)
        table = held.table
        if table is not None and not is_range(held.place, len(table.files)):
            table = None
        if table is None:
            new = np.frombuffer(rows, dtype=_ROW)
            table = _table(held, reading, np.concatenate([_known(held.table, *held.rows_in("record", known)), new]))
        place = {name: number for number, name in enumerate(files.names)} if rejected else {}
        notes, bad = files.notes, {item.name for item in rejected}
        if self.options.part is None:  # else they may be in other parts
            is_none = np.bincount(np.asarray(table.inputs["record"].file), minlength=len(files.names)) == 0
            names = held.names.take(np.flatnonzero(is_none))
            notes += [note(name, "unused", "it holds no records") for name in names if name not in bad]
        return ScanResult(
            samples=table,
            rejected=(*in_order(files.rejected), *sorted(rejected, key=lambda one: (place[one.name], one.line))),
            notes=tuple(notes),
        )

    def _read(self, file: int, files: RecordFiles, held: KnownFiles, rows: bytearray, bad: list[Rejected]) -> None:
        """Add the rows of one file. Its rejected records go to ``bad``."""
        name, first = files.names[file], len(rows)
        reader = RecordReader(files.root / name, name, files.ways[file], bad)
        part = self.options.part
        try:
            for number, record in enumerate(reader, start=1):
                if part is None or part.holds(record.content):
                    size = min(record_size(record), 0xFFFF_FFFF)
                    rows += _PACKED.pack(file, record.line, size, record.form, record.content)
                if not number % _OFTEN and self.stopping():
                    return
        except UnusableSampleError as error:
            if files.alone or len(rows) > first:
                raise SourceError(f"{name}: {error.what}", where=str(reader.path), fix=error.fix) from error
            raise
        assert reader.stat is not None
        held.remember(file, reader.content, reader.stat)


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
    rejected: list[Rejected] = field(default_factory=list)
    """Takes the records that are rejected; may be shared by several readers."""
    stat: StatMemo | None = None
    content: bytes = b""
    _form: RecordFormat | None = None

    def __iter__(self) -> Iterator[Record]:
        """Every usable record; raises UnusableSampleError if it cannot be read as a whole."""
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
                yield from self._records(self._json_list(reader))
            elif reader.head.lstrip(BLANK).split(b"\n", 1)[0].strip(BLANK) == b"{":  # pretty-printed
                raise fault("not-records", "it is one JSON object over several lines", self.path)
            else:
                yield from self._records(reader.lines(), lambda raw: parse_json(decode(raw)))
            self.stat, self.content = reader.finish()
        if self.way.kind in ("parquet", "arrow"):
            yield from self._columnar()
            if self.stat.identity != stat_source(self.path).identity:
                raise fault("changing", "its size or time changed while it was read", self.path)

    def _records(
        self, values: Iterable[tuple[int, Any]], parse: Callable[[Any], Any] = lambda value: value
    ) -> Iterator[Record]:
        """The records of (line, value); a line that makes none is rejected."""
        for line, value in values:
            try:
                parsed = parse(value)
                if self._form is None and isinstance(parsed, dict):
                    self._form = detect_format(parsed)
                form, is_described = self._form or TEXT, self.way.form is not None
                record = map_record(parsed, form, source=self.name, line=line, is_described=is_described)
            except UnusableSampleError as error:
                if len(self.rejected) >= MAX_REJECTED:
                    raise SourceError(
                        f"more than {MAX_REJECTED} records are rejected",
                        where=f"{self.path}:{line}",
                        why=f"the latest: {error.what}",
                        fix="check that these are the files you mean, and their form",
                    ) from error
                error.fix = error.fix.replace("LINE", str(line))
                self.rejected.append(as_rejected(self.name, error, line=line, field=error.where))
            else:
                yield record

    def _json_list(self, reader: LineReader) -> Iterator[tuple[int, Any]]:
        """The items of a list by number: several may be on one line. A list that is not well formed is an error."""
        words = "a JSON list has at most 1 GiB; `jq -c '.[]'` makes lines of it"
        text = decode(reader.all_bytes(MAX_SOURCE_BYTES, fault("too-large", words, self.path)))
        place, number = _skip(text, text.index("[") + 1), 1
        while text[place : place + 1] != "]":
            if number > 1 and text[place : place + 1] != ",":
                raise fault("no-json", f"expected , or ] after an item in line {_line(text, place)}")
            place = _skip(text, place + 1) if number > 1 else place
            try:
                value, place = parse_json_at(text, place)
            except UnusableSampleError as error:
                where = f"the list is broken in or after line {_line(text, place)}"
                raise fault(error.slug, f"{where}: {error.what}") from error
            yield number, value
            place, number = _skip(text, place), number + 1
        if text[place + 1 :].strip():
            raise fault("no-json", "there is something after the end of the list")

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


def _skip(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
