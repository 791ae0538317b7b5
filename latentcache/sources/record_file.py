"""One file of records, read once: JSON lines, a JSON list or object, texts, rows of parquet and Arrow files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latentcache.errors import UnusableSampleError
from latentcache.identity.content import StatMemo
from latentcache.sources.causes import Notes, as_rejected, fault
from latentcache.sources.formats import ARROW, PARQUET
from latentcache.sources.formats.files import MAX_SOURCE_BYTES, open_source, stat_source
from latentcache.sources.formats.rows import open_rows
from latentcache.sources.formats.text import BLANK, MAX_LINE_BYTES, LineReader, decode, list_items, parse_json
from latentcache.sources.inventory import extension_of
from latentcache.sources.records import KINDS, TEXT, Record, RecordFormat, detect_format, map_record

#: Rejected records of one file and one reason that are listed; the others are counted.
_LISTED = 1000
_ROWS = 1024


@dataclass(slots=True)
class RecordReader:
    """The records of one file, read once by iterating. ``stat`` and ``content`` are known at the end."""

    path: Path
    name: str
    text_lines: bool = False
    """True if each line of a text is a document, rather than the whole file."""
    rejected: Notes = field(default_factory=lambda: Notes(_LISTED))
    """The records that are rejected."""
    last: int = 0
    """Line, row or item that was read last."""
    stat: StatMemo | None = None
    content: bytes = b""
    _form: RecordFormat | None = None
    _has_objects: bool = False

    def __iter__(self) -> Iterator[Record]:
        """Every usable record; raises UnusableSampleError if it cannot be read to its end."""
        kind = KINDS.get(extension_of(self.path.name), ARROW)
        with open_source(self.path) as file:
            reader = LineReader(file, self.path)
            if kind in (PARQUET, ARROW):
                for _ in reader.chunks():
                    pass
            elif kind == "text":
                error = fault("text-too-large", "it has more than 64 MiB", self.path)
                whole = reader.lines() if self.text_lines else [(1, reader.all_bytes(MAX_LINE_BYTES, error))]
                yield from self._records(whole, lambda raw: {TEXT.text: decode(raw)})
            elif reader.head.lstrip(BLANK).startswith(b"["):
                words = "a JSON list has at most 1 GiB; `jq -c '.[]'` makes lines of it"
                data = reader.all_bytes(MAX_SOURCE_BYTES, fault("too-large", words, self.path))
                yield from self._records(list_items(data), lambda value: value)
                if self.last and not self._has_objects:
                    raise fault("not-records", "it is a list without objects")
            else:
                is_small = self.name.lower().endswith(".json") and reader.size <= MAX_LINE_BYTES
                lines = self._lines_of_object(reader) if is_small else reader.lines()
                yield from self._records(lines, lambda raw: parse_json(decode(raw)))
            self.stat, self.content = reader.finish()
        if kind in (PARQUET, ARROW):
            yield from self._columnar(kind)
            if self.stat.identity != stat_source(self.path).identity:
                raise fault("changing", "its size or time changed while it was read", self.path)

    def _records(self, values: Iterable[tuple[int, Any]], parse: Callable[[Any], Any]) -> Iterator[Record]:
        """The records of (line, value); a line that makes none is rejected."""
        for line, value in values:
            try:
                parsed = parse(value)
                self._has_objects |= isinstance(parsed, dict)
                if self._form is None and isinstance(parsed, dict):
                    self._form = detect_format(parsed)
                record = map_record(parsed, self._form or TEXT, source=self.name, line=line)
            except UnusableSampleError as error:
                self.rejected.add(as_rejected(self.name, error, line=line, field=error.where))
            else:
                yield record
            self.last = line

    def _lines_of_object(self, reader: LineReader) -> Iterator[tuple[int, bytes]]:
        """A file as one line if it is one object, else its lines; raises ``not-records`` for settings."""
        data = b"".join(reader.chunks())
        try:
            value = parse_json(decode(data))
        except UnusableSampleError:
            lines = enumerate(data.split(b"\n"), start=1)
            yield from ((line, raw) for line, raw in lines if raw.strip(BLANK))
            return
        try:
            if isinstance(value, dict):
                self._form = self._form or detect_format(value)
        except UnusableSampleError as error:
            if error.slug == "record-field":
                raise fault("not-records", f"it is one JSON object, and no record: {error.what}") from error
        yield 1, data

    def _columnar(self, kind: str) -> Iterator[Record]:
        with open_rows(self.path, kind) as table:
            # ``datasets`` (its feature ``Json``) writes values of several forms as JSON.
            kinds = {column.name: column.type for column in table.schema if "arrow.json" in str(column.type)}
            rows = (row for batch in table.batches(rows=_ROWS) for row in batch.to_pylist())
            parse = lambda row: {**row, **{name: _parsed(row[name], kind) for name, kind in kinds.items()}}  # noqa: E731
            yield from self._records(enumerate(rows, start=1), parse)


def _parsed(value: Any, kind: Any) -> Any:
    if value is None or "arrow.json" not in str(kind):
        return value
    if isinstance(value, list):
        return [_parsed(item, kind.value_type) for item in value]
    if isinstance(value, dict):
        return {name: _parsed(item, kind.field(name).type) for name, item in value.items()}
    return parse_json(value)
