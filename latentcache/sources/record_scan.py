"""The records of DATA in columns: files that may have changed are read, others are believed.

Each distinct content is one document; rows keep duplicates. Cost: one pass of parsing and hashing over new files, and
30 bytes of memory per record; files are read again when their records are encoded.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import SourceError, UnusableSampleError
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES
from latentcache.sources.causes import as_rejected
from latentcache.sources.corpus import RecordFiles
from latentcache.sources.known import Known, Scan, Scanned, match_names, memos_of, strings_of
from latentcache.sources.part import Part
from latentcache.sources.record_files import RecordReader, Way
from latentcache.sources.records import Record, record_size
from latentcache.sources.walk import in_order

_OFTEN = 4096
_BLOCK = 1 << 14


def read_records(
    files: RecordFiles,
    samples: SampleTable,
    rows: NDArray[np.integer],
) -> Iterator[tuple[int, Record | None]]:
    """(row, record) of ascending rows; None if the file does not hold it any more. Other files are not read.

    Raises:
        ValueError: The rows do not ascend.
    """
    held = samples.inputs["record"]
    if len(rows) > 1 and not (np.diff(rows) > 0).all():
        raise ValueError("rows of records must ascend")
    file_of = np.asarray(held.file)[rows]
    for start, stop in _runs(file_of):
        file, some = int(file_of[start]), rows[start:stop]
        name, way = files.names[file], int(files.way[file])
        reader = RecordReader(files.root / name, name, files.ways[way]) if way >= 0 else ()
        yield from _matching(reader, some, held)


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


def files_of(root: Path, samples: SampleTable, ways: Sequence[Way], part: Part | None) -> RecordFiles:
    """The files of a snapshot's own samples, for :func:`read_records`; nothing is read."""
    numbers = {way.reading(str(part or "")): number for number, way in enumerate(ways)}
    reading = np.asarray(samples.files.reading)
    way = np.array([numbers.get(one.tobytes(), -1) for one in reading], dtype=np.intp)
    stats = np.asarray(samples.files.stat)[:, :5]
    return RecordFiles(root=root, names=samples.files.names, way=way, ways=tuple(ways), stats=stats)


@dataclass(slots=True)
class _Rows:
    """Rows as they are read."""

    content: bytearray = field(default_factory=bytearray)
    file: array[int] = field(default_factory=lambda: array("i"))
    line: array[int] = field(default_factory=lambda: array("I"))
    characters: array[int] = field(default_factory=lambda: array("I"))
    form: array[int] = field(default_factory=lambda: array("B"))

    def add(self, file: int, record: Record) -> None:
        self.content += record.content
        self.file.append(file)
        self.line.append(record.line)
        self.characters.append(min(record_size(record), 0xFFFF_FFFF))
        self.form.append(record.form)

    def columns(self) -> dict[str, NDArray[np.generic]]:
        return {
            "content": np.frombuffer(bytes(self.content), dtype=np.uint8).reshape(-1, HASH_BYTES),
            "file": np.array(self.file, dtype=np.int32),
            "line": np.array(self.line, dtype=np.uint32),
            "characters": np.array(self.characters, dtype=np.uint32),
            "form": np.array(self.form, dtype=np.uint8),
        }


@dataclass(kw_only=True)
class RecordScan(Scan):
    """A scan of records; see ``scan.scan``."""

    def __call__(self, files: RecordFiles) -> Scanned:
        """All records of these files.

        Raises:
            SourceError: A file cannot be read and is the only one, or failed after some of its records.
        """
        readings = [np.frombuffer(way.reading(str(self.part or "")), dtype=np.uint8) for way in files.ways]
        reading = np.stack(readings)[files.way] if readings else np.empty((0, HASH_BYTES), dtype=np.uint8)
        held = self.held(files.names, memos_of([files.stats]), reading)
        lacking = {item.name for item in self.rejected if item.content}
        if lacking:  # a record that every field rejected has no row in the snapshot
            held.distrust(np.array([name in lacking for name in files.names], dtype=np.bool_))
        known, old = self._known_rows(held, files)
        again, rows = list[Rejected](), _Rows()
        for file in np.flatnonzero(held.place < 0).tolist():
            if self.stopping():
                break
            self._file(file, files, held, rows, again)
        same = self.known is not None and held.all_trusted
        table = self.known if same else _joined(files, held, reading, known, rows.columns())
        assert table is not None
        return Scanned(
            samples=table,
            rejected=(*in_order(files.rejected), *_in_files(files.names, [*old, *again])),
            notes=files.notes,
        )

    def _file(self, file: int, files: RecordFiles, held: Known, rows: _Rows, bad: list[Rejected]) -> None:
        """Read one file. Its rejected records go to ``bad``."""
        name, first = files.names[file], len(rows.line)
        reader = RecordReader(files.root / name, name, files.ways[int(files.way[file])], bad)
        try:
            for number, record in enumerate(reader, start=1):
                if self.part is None or self.part.holds(record.content):
                    rows.add(file, record)
                if not number % _OFTEN and self.stopping():
                    return
        except UnusableSampleError as error:
            if files.alone or len(rows.line) > first:
                raise SourceError(f"{name}: {error.what}", where=str(reader.path), fix=error.fix) from error
            bad.append(as_rejected(name, error))
            return
        assert reader.stat is not None
        held.remember(file, reader.content, reader.stat)

    def _known_rows(self, held: Known, files: RecordFiles) -> tuple[dict[str, NDArray[np.generic]], list[Rejected]]:
        """Rows of trusted files, in their order, and rejected lines of those files; no rows if all are trusted."""
        own = np.flatnonzero(held.place >= 0)
        if self.known is None or not len(own):
            return {}, []
        bad = {item.name for item in self.rejected if item.line}
        bad = bad.intersection(files.names.take(own)) if bad else bad
        said = [item for item in self.rejected if item.line and item.name in bad]
        if held.all_trusted:
            return {}, said
        old = self.known.inputs["record"]
        rows, file = held.rows_in("record", own)
        columns = {"content": old.content, "line": old.line}
        columns |= {name: self.known.columns[name] for name in ("characters", "form")}
        known: dict[str, NDArray[np.generic]] = {name: np.asarray(one)[rows] for name, one in columns.items()}
        return known | {"file": file.astype(np.int32)}, said


def _joined(
    files: RecordFiles,
    held: Known,
    reading: NDArray[np.uint8],
    known: Mapping[str, NDArray[np.generic]],
    read: Mapping[str, NDArray[np.generic]],
) -> SampleTable:
    """Rows that are known and rows that were read, by file and line."""
    parts = [part for part in (known, read) if part and len(part["line"])] or [read]
    rows = {
        name: np.concatenate([part[name] for part in parts]) if len(parts) > 1 else parts[0][name] for name in read
    }
    place = rows["file"].astype(np.int64) << 32 | rows["line"].astype(np.int64)
    if not (np.diff(place) >= 0).all():
        order = np.argsort(place, kind="stable")
        rows = {name: column[order] for name, column in rows.items()}
    file, line = rows["file"], rows["line"]
    content = np.ascontiguousarray(rows["content"], dtype=np.uint8)
    return SampleTable(
        names=_row_names(files.names, file, line),
        files=Files(names=files.names, stat=held.stat, content=held.content, reading=reading),
        inputs={"record": Input(content=content, file=file.astype(np.int32), line=line.astype(np.uint32))},
        columns={"characters": rows["characters"], "form": rows["form"]},
    )


def _row_names(names: Strings, file: NDArray[np.generic], line: NDArray[np.generic]) -> Strings:
    """``file:line`` of every row."""

    def blocks() -> Iterator[list[str]]:
        for start in range(0, len(file), _BLOCK):
            numbers, place = np.unique(file[start : start + _BLOCK], return_inverse=True)
            own = names.take(numbers.astype(np.intp))
            lines = line[start : start + _BLOCK].tolist()
            yield [f"{own[number]}:{one}" for number, one in zip(place.tolist(), lines, strict=True)]

    return strings_of(blocks())


def _in_files(names: Strings, items: Iterable[Rejected]) -> tuple[Rejected, ...]:
    """Rejected lines in the order of files and lines."""
    by_name: dict[str, list[Rejected]] = defaultdict(list)
    for item in items:
        by_name[item.name].append(item)
    place = match_names(Strings.of(by_name), names).tolist()
    ordered = sorted(zip(place, by_name.values(), strict=True), key=lambda pair: pair[0])
    return tuple(item for _, some in ordered for item in sorted(some, key=lambda one: one.line))


def _runs(values: NDArray[np.integer]) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs of equal values."""
    bounds = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return ((start, stop) for start, stop in pairwise(bounds) if stop > start)
