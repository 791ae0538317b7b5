"""The first pass over the records of a build: what there is, what is known, what is to be tokenised.

Decides which records are tokenised, and in which order: each distinct record once, where it stands first. Guarantee:
the number of documents is known before the first is tokenised. Cost: one pass of parsing and hashing, 28 bytes of
memory a record; files that are small enough together stay in memory, the others are read again to be tokenised.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import SourceError
from latentcache.identity.content import HASH_BYTES
from latentcache.pipeline.token_known import Known
from latentcache.sources.records import Record, RecordScan, RecordSource, record_size
from latentcache.sources.sample import Refusal
from latentcache.store.documents import as_items

#: Text that is kept rather than read and parsed twice, 64 to 256 MiB: of a build by the fast path, its fixed part
#: aside, the tokenizer takes 0.90 so, and 0.82 where all is read again (docs/log.md, 2026-11-22).
KEEP_CHARACTERS = 64 << 20
#: What a record weighs beside its text, and so do its turns and their fields, about. Measured (tracemalloc, texts of
#: five characters included): 250 bytes a text, 127 to 162 a further turn, 148 to 153 each field of a turn.
_RECORD_WEIGHT, _TURN_WEIGHT, _FIELD_WEIGHT = 512, 200, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSurvey:
    """The N usable records of DATA in their order."""

    content: NDArray[np.uint8]
    """(N, 16) content hashes."""
    source: NDArray[np.int32]
    """(N,) position in ``sources``."""
    line: NDArray[np.uint32]
    """(N,) line or row."""
    size: NDArray[np.uint32]
    """(N,) characters of each record."""
    sources: tuple[RecordSource, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[Refusal, ...]
    kept: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    """All records of some files, by the name of the file: these need not be read again."""
    has_texts: bool = False
    """Whether any of the records that were read is a text."""


def survey_records(
    scan: RecordScan, met: Callable[[int], None] = lambda number: None, *, keep: int = 0
) -> TokenSurvey:
    """Read all records once.

    Args:
        scan: Where they come from; no two files of one name where any are kept.
        met: Told now and then how many there were.
        keep: Characters that may be kept: the first files that are not more together.

    Raises:
        SourceError: A file cannot be read.
    """
    content, source, line, size = bytearray(), array("i"), array("I"), array("I")
    kept, has_texts = _Kept(keep), False
    for record in scan:
        kept.take(record)
        has_texts = has_texts or record.messages is None
        content += record.content
        source.append(scan.reading)  # not by its name: two data sets may name one file
        line.append(record.line)
        size.append(min(record_size(record), 0xFFFF_FFFF))
        if not len(line) % 4096:
            met(len(line))
    return TokenSurvey(
        content=np.frombuffer(bytes(content), dtype=np.uint8).reshape(-1, HASH_BYTES),
        source=np.array(source, dtype=np.int32),
        line=np.array(line, dtype=np.uint32),
        size=np.array(size, dtype=np.uint32),
        sources=scan.sources,
        refused=scan.refused,
        notes=scan.notes,
        kept=kept.files,
        has_texts=has_texts,
    )


class _Kept:
    """Records of the first files, until there are too many: of a file all are kept or none."""

    def __init__(self, characters: int) -> None:
        self.files: dict[str, list[Record]] = {}
        self._left = characters

    def take(self, record: Record) -> None:
        """The next record of the pass."""
        if self._left <= 0:
            return
        self._left -= record_size(record) + _weight(record)
        self.files.setdefault(record.source, []).append(record)
        if self._left <= 0:
            del self.files[record.source]


def _weight(record: Record) -> int:
    """What it takes beside its characters: of many short turns, nearly all that it takes."""
    turns = record.messages or ()
    return _RECORD_WEIGHT + _TURN_WEIGHT * len(turns) + _FIELD_WEIGHT * sum(len(turn.fields) for turn in turns)


def first_of_each(content: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Positions, upwards, where a record stands for the first time."""
    _, first = np.unique(as_items(content), return_index=True) if len(content) else (None, np.empty(0, dtype=np.intp))
    return np.sort(first)


def todo_of(work: TokenSurvey, known: Known, refused: Mapping[bytes, Any]) -> NDArray[np.bool_]:
    """(N,) whether a record is to be tokenised.

    Args:
        work: All records.
        known: Those that are committed.
        refused: Content hashes of records that this recipe refused before.
    """
    todo = np.zeros(len(work.content), dtype=np.bool_)
    first = first_of_each(work.content)
    todo[first] = known.find(work.content[first]) < 0
    if refused:
        todo[[row for row in np.flatnonzero(todo).tolist() if work.content[row].tobytes() in refused]] = False
    return todo


def refused_rows(work: TokenSurvey, refused: Mapping[bytes, Refusal]) -> list[Refusal]:
    """One refusal for each record that the tokenizer refused, also where one stands several times.

    Args:
        work: All records.
        refused: Refusals by content hash.
    """
    if not refused:
        return []
    known = as_items(np.frombuffer(b"".join(refused), dtype=np.uint8).reshape(-1, HASH_BYTES))
    rows = np.flatnonzero(np.isin(as_items(work.content), known)).tolist()
    return [
        replace(
            refused[work.content[row].tobytes()],
            name=work.sources[int(work.source[row])].name,
            line=int(work.line[row]),
        )
        for row in rows
    ]


def todo_records(scan: RecordScan, work: TokenSurvey, todo: NDArray[np.bool_]) -> Iterator[Record]:
    """The records that are to be tokenised, kept or read again; files without any are not opened.

    Raises:
        SourceError: A file is not what it was a moment ago.
    """
    names = {work.sources[number].name for number in np.unique(work.source[todo]).tolist()}
    wanted = np.array([source.name in names for source in work.sources], dtype=np.bool_)
    rows = np.flatnonzero(wanted[work.source]).tolist()
    last = int(np.flatnonzero(todo)[-1]) if rows else -1
    for place, record in enumerate(_again(scan, names, work.kept)):
        row = rows[place] if place < len(rows) else -1
        if row < 0 or record.content != work.content[row].tobytes():
            raise _changed(record.source)
        if todo[row]:
            yield record
        if row == last:
            return
    if rows:
        raise _changed(work.sources[int(work.source[last])].name)


def _again(scan: RecordScan, names: Collection[str], kept: Mapping[str, Sequence[Record]]) -> Iterator[Record]:
    """All records of the files of these names, in the order of the scan; those that were not kept are read."""
    files = list(dict.fromkeys(file.name for file in scan.files))
    for is_kept, group in groupby((name for name in files if name in names), key=kept.__contains__):
        if is_kept:
            for name in group:
                yield from kept[name]
        else:
            some = set(group)
            yield from scan.but([name for name in files if name not in some])


def _changed(name: str) -> SourceError:
    return SourceError(
        "a file was changed while it was built from",
        where=name,
        fix="run the same command again when nobody writes to it: committed work is kept",
    )


def as_refusals(items: Sequence[Mapping[str, Any]]) -> list[Refusal]:
    """Refusals as a generation keeps them, made whole again."""
    return [
        Refusal(
            name=str(item["name"]),
            cause=str(item["cause"]),
            detail=str(item.get("detail", "")),
            hint=str(item.get("hint", "")),
            content=bytes.fromhex(str(item.get("content", ""))),
            line=int(item.get("line", 0)),
            field=str(item.get("field", "")),
        )
        for item in items
    ]


def token_refusal_json(refusal: Refusal) -> dict[str, Any]:
    """A refusal as a generation keeps it."""
    said: dict[str, Any] = {"name": refusal.name, "cause": refusal.cause}
    more = {"line": refusal.line, "field": refusal.field, "detail": refusal.detail, "hint": refusal.hint}
    return (
        said
        | {key: value for key, value in more.items() if value}
        | ({"content": refusal.content.hex()} if refusal.content else {})
    )
