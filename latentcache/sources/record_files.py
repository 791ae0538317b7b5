"""Records of one file: lines of JSON, a list in JSON, text, or rows of parquet and Arrow files.

Every line that is not blank gives a record or a rejection with its line and field; a bad line never stops the
others. Lines, text lines and rows are streamed; a JSON list is read whole (at most 1 GiB). Of parquet and Arrow files
one batch is in memory; their bytes are hashed first, and a file that changes in between is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from latentcache.errors import SourceError, UnusableSampleError
from latentcache.fields.table import Rejected
from latentcache.identity.content import json_hash
from latentcache.identity.stat import StatMemo
from latentcache.sources.archives.rows import opened
from latentcache.sources.lines import BLANK, MAX_LINE_BYTES, LineReader, decode, fault, parse_json, parse_json_at
from latentcache.sources.reading import MAX_SOURCE_BYTES, stat_source, unusable
from latentcache.sources.records import RECORD_RULE, TEXT, Record, RecordFormat, detect_format, map_record
from latentcache.value import Value

#: A scan ends with an error after so many rejected records: this is another kind of file.
MAX_REJECTED = 100_000
#: Extension in lower case -> kind of file.
KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".text": "text"}
_ROWS = 1024


class Way(Value):
    """How a file of records is read."""

    kind: str
    """json, text, parquet or arrow."""
    form: RecordFormat | None = None
    """Known from a dataset_info.json; None: the first record tells."""
    text_lines: bool = False
    """True if each line of a text is a document, rather than the whole file."""

    def reading(self, part: str) -> bytes:
        """16 bytes: equal file bytes that are read alike, for one part, make equal records."""
        form = None if self.form is None else asdict(self.form)
        said = {"kind": self.kind, "form": form, "text_lines": self.text_lines, "rule": RECORD_RULE, "part": part}
        return json_hash(said)


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
        """Every usable record.

        Raises:
            UnusableSampleError: The file as a whole cannot be read.
            SourceError: Too many of its records are rejected.
        """
        self._form = self.way.form
        with LineReader(self.path) as reader:
            if self.way.kind in ("parquet", "arrow"):
                for _ in reader.chunks():
                    pass
            elif self.way.kind == "text":
                error = unusable("text-too-large", self.path, "it has more than 64 MiB")
                whole = reader.lines() if self.way.text_lines else [(1, reader.all_bytes(MAX_LINE_BYTES, error))]
                yield from self._records(whole, lambda raw: {TEXT.text: decode(raw)})
            elif reader.head.lstrip(BLANK).startswith(b"["):
                yield from self._records(self._json_list(reader))
            elif reader.head.lstrip(BLANK).split(b"\n", 1)[0].strip(BLANK) == b"{":  # pretty-printed
                raise unusable("not-records", self.path, "it is one JSON object over several lines")
            else:
                yield from self._records(reader.lines(), lambda raw: parse_json(decode(raw)))
            self.stat, self.content = reader.finish()
        if self.way.kind in ("parquet", "arrow"):
            yield from self._columnar()
            if not self.stat.same_stat(stat_source(self.path)):
                raise unusable("changing", self.path, "its size or time changed while it was read")

    def _records(
        self, values: Iterable[tuple[int, Any]], parse: Callable[[Any], Any] = lambda value: value
    ) -> Iterator[Record]:
        """The records of (line, value); a line that makes none is rejected."""
        for line, value in values:
            try:
                parsed = parse(value)
                if self._form is None and isinstance(parsed, dict):
                    self._form = detect_format(parsed)
                record = map_record(parsed, self._form or TEXT, source=self.name, line=line)
            except UnusableSampleError as error:
                if len(self.rejected) >= MAX_REJECTED:
                    raise SourceError(
                        f"more than {MAX_REJECTED} records are rejected",
                        where=f"{self.path}:{line}",
                        why=f"the latest: {error.what}",
                        fix="check that these are the files you mean, and their form",
                    ) from error
                item = Rejected(name=self.name, reason=error.slug, detail=error.what, line=line, field=error.where)
                self.rejected.append(replace(item, hint=error.fix.replace("LINE", str(line))))
            else:
                yield record

    def _json_list(self, reader: LineReader) -> Iterator[tuple[int, Any]]:
        """The items of a list; a list that is not well formed ends with an error: there is no place to go on."""
        words = "a JSON list has at most 1 GiB; `jq -c '.[]'` makes lines of it"
        text = decode(reader.all_bytes(MAX_SOURCE_BYTES, unusable("too-large", self.path, words)))
        place, line = _skip(text, text.index("[") + 1), 1
        counted, first = 0, True
        while text[place : place + 1] != "]":
            if not first and text[place : place + 1] != ",":
                at = line + text.count("\n", counted, place)
                raise fault("no-json", f"expected , or ] after an item in line {at}")
            place = place if first else _skip(text, place + 1)
            line, counted = line + text.count("\n", counted, place), place
            try:
                value, place = parse_json_at(text, place)
            except UnusableSampleError as error:
                raise fault(error.slug, f"the list is broken in or after line {line}: {error.what}") from error
            yield line, value
            place, first = _skip(text, place), False
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
