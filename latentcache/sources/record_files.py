"""Records of one file: lines of JSON, a list in JSON, text, or rows of a table of columns.

Guarantee: every line that is not blank gives a record or a refusal with its line and field; a bad one never stops
those beside it. Lines, text lines and rows are streamed; a JSON list is read whole (at most 1 GiB).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from latentcache.errors import SourceError, UnusableSampleError
from latentcache.identity.content import json_hash
from latentcache.identity.stat import StatMemo
from latentcache.sources.causes import refusal
from latentcache.sources.chat import map_record
from latentcache.sources.lines import MAX_LINE_BYTES, LineReader, decode, fault, has_bom, parse_json, parse_json_at
from latentcache.sources.reading import MAX_SOURCE_BYTES, unusable
from latentcache.sources.record_format import EXPECTED, RECORD_RULE, TEXT, RecordFormat, detect_format
from latentcache.sources.records import Record, RecordLog, RecordSource, UnreadFile
from latentcache.sources.rows import listed
from latentcache.sources.sample import Refusal

#: A pass ends with an error after so many refusals: this is another kind of file, and memory is not for listing it.
MAX_REFUSED = 100_000
_BLANK = b" \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """One file to read."""

    path: Path
    name: str
    """As sources are named."""
    kind: str
    """json, text, or a kind of ``columnar``."""
    form: RecordFormat | None = None
    """Known from a dataset_info.json or asked for; else the first record tells."""
    text_lines: bool = False
    """Whether each line of a text is a document, rather than the whole file."""

    def unread(self) -> UnreadFile:
        """The file by its name, and how it is read."""
        form = None if self.form is None else asdict(self.form)
        said = {"kind": self.kind, "form": form, "text_lines": self.text_lines, "rule": RECORD_RULE}
        only_texts = self.kind == "text" or (self.form is not None and self.form.form == "text")
        return UnreadFile(name=self.name, path=self.path, reading=json_hash(said), only_texts=only_texts)


class FileCounter:
    """Counts and refuses the records of one file.

    Args:
        file: The file.
        log: Where refusals go.
    """

    def __init__(self, file: RecordFile, log: RecordLog) -> None:
        self._file, self._log = file, log
        self._form = file.form
        self.records = self.refused = 0

    def record(self, line: int, value: Any) -> Iterator[Record]:
        """The record of one parsed line, or nothing and a refusal."""
        try:
            record = map_record(value, self._known_form(value), source=self._file.name, line=line)
        except UnusableSampleError as error:
            self.refuse(line, error)
            return
        self.records += 1
        yield record

    def refuse(self, line: int, error: UnusableSampleError) -> None:
        """Log one record that cannot be used.

        Raises:
            SourceError: There are too many of them.
        """
        self.refused += 1
        if len(self._log.refused) >= MAX_REFUSED:
            raise SourceError(
                f"more than {MAX_REFUSED} records cannot be used",
                where=f"{self._file.path}:{line}",
                why=f"the latest: {error.what}",
                fix="check that these are the files you mean, and their form",
            )
        item = Refusal(
            name=self._file.name,
            cause=error.slug,
            detail=error.what,
            hint=error.fix.replace("LINE", str(line)),
            line=line,
            field=error.where,
        )
        self._log.refused.append(item)

    def finish(self, stat: StatMemo, content: bytes) -> None:
        """Log the file as read."""
        source = RecordSource(
            name=self._file.name,
            stat=stat,
            content=content,
            records=self.records,
            refused=self.refused,
            reading=self._file.unread().reading,
        )
        self._log.sources.append(source)

    def _known_form(self, value: Any) -> RecordFormat:
        if self._form is None:
            found = detect_format(value) if isinstance(value, dict) else None
            if found is None:
                fields = listed(list(value)) if isinstance(value, dict) else type(value).__name__
                raise fault("record-field", f"expected {EXPECTED}; found {fields or 'no fields'}")
            self._form = found
        return self._form


def read_file(file: RecordFile, log: RecordLog) -> Iterator[Record]:
    """The records of a file of JSON or text; the rest is logged.

    Raises:
        UnusableSampleError: The file as a whole cannot be read; nothing of it is logged as a source.
        SourceError: Too many of its records cannot be used.
    """
    if has_bom(file.path):
        log.notes.append(refusal(file.name, "bom", f"{file.name} begins with a UTF-8 BOM"))
    counter = FileCounter(file, log)
    with LineReader(file.path) as reader:
        if file.kind == "text":
            yield from _text_lines(reader, counter) if file.text_lines else _whole_text(reader, counter, file)
        elif reader.head.lstrip(_BLANK).startswith(b"["):
            yield from _json_list(reader, counter, file)
        else:
            yield from _json_lines(reader, counter, file)
        counter.finish(*reader.finish())


def _json_lines(reader: LineReader, counter: FileCounter, file: RecordFile) -> Iterator[Record]:
    if _is_one_object(reader.head):
        raise unusable("not-records", file.path, "it is one JSON object over several lines")
    for line, raw in reader.lines():
        if raw is not None and not raw.strip(_BLANK):
            continue
        try:
            value = parse_json(decode(_not_too_long(raw)))
        except UnusableSampleError as error:
            counter.refuse(line, error)
            continue
        yield from counter.record(line, value)


def _is_one_object(head: bytes) -> bool:
    """Whether a file begins with an object that does not end on its line, as pretty-printed JSON does."""
    return head.lstrip(_BLANK).split(b"\n", 1)[0].strip(_BLANK) == b"{"


def _json_list(reader: LineReader, counter: FileCounter, file: RecordFile) -> Iterator[Record]:
    """The items of a list; a list that is not well formed ends with an error, as there is no place to go on."""
    pieces, size = [], 0
    for piece in reader.chunks():
        size += len(piece)
        if size > MAX_SOURCE_BYTES:
            raise unusable("too-large", file.path, "a JSON list has at most 1 GiB; `jq -c '.[]'` makes lines of it")
        pieces.append(piece)
    text = decode(b"".join(pieces))
    pieces.clear()
    yield from _items(text, counter)


def _items(text: str, counter: FileCounter) -> Iterator[Record]:
    place, line = _skip(text, text.index("[") + 1), 1
    counted, first = 0, True
    while text[place : place + 1] != "]":
        if not first and text[place : place + 1] != ",":
            raise fault(
                "no-json", f"expected , or ] after an item in line {line + text.count(chr(10), counted, place)}"
            )
        place = place if first else _skip(text, place + 1)
        line, counted = line + text.count("\n", counted, place), place
        try:
            value, place = parse_json_at(text, place)
        except UnusableSampleError as error:
            raise fault(error.slug, f"the list is broken in or after line {line}: {error.what}") from error
        yield from counter.record(line, value)
        place, first = _skip(text, place), False
    if text[place + 1 :].strip():
        raise fault("no-json", "there is something after the end of the list")


def _skip(text: str, place: int) -> int:
    """The next place that is no blank."""
    while text[place : place + 1].isspace():
        place += 1
    return place


def _text_lines(reader: LineReader, counter: FileCounter) -> Iterator[Record]:
    for line, raw in reader.lines():
        if raw is not None and not raw.strip(_BLANK):
            continue
        try:
            text = decode(_not_too_long(raw))
        except UnusableSampleError as error:
            counter.refuse(line, error)
            continue
        yield from counter.record(line, {TEXT.text: text})


def _whole_text(reader: LineReader, counter: FileCounter, file: RecordFile) -> Iterator[Record]:
    pieces, size = [], 0
    for piece in reader.chunks():
        size += len(piece)
        if size > MAX_LINE_BYTES:
            raise unusable("text-too-large", file.path, "it has more than 64 MiB")
        pieces.append(piece)
    try:
        text = decode(b"".join(pieces))
    except UnusableSampleError as error:
        counter.refuse(1, error)
        return
    yield from counter.record(1, {TEXT.text: text})


def _not_too_long(raw: bytes | None) -> bytes:
    if raw is None:
        raise fault("line-too-long", f"the line has more than {MAX_LINE_BYTES} bytes")
    return raw


def read_rows(
    file: RecordFile, rows: Iterable[dict[str, Any]], stat: StatMemo, content: bytes, log: RecordLog
) -> Iterator[Record]:
    """The records of rows that were read elsewhere, numbered from 1."""
    counter = FileCounter(file, log)
    for number, row in enumerate(rows, start=1):
        yield from counter.record(number, row)
    counter.finish(stat, content)
