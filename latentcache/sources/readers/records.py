"""The records of DATA in columns: files that may have changed are read, others are believed.

Each distinct content is one document; rows keep duplicates. Cost: one pass of parsing and hashing over new files, and
30 bytes of memory per record. Files are read again when their records are encoded. Every line of a file that is not
blank gives a record or a rejection with its line and field. A bad line never stops the others, and a file that cannot
be read to its end keeps the records before that place. Lines, text lines and rows are streamed; a JSON list is read
whole (at most 1 GiB). Of parquet and Arrow files one batch is in memory. Their bytes are hashed first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, SourceError, UnusableSampleError, count_of
from latentcache.fields.strings import Strings
from latentcache.fields.table import STAT_WIDTH, Files, Input, SampleTable
from latentcache.identity.content import HASH_BYTES, StatMemo
from latentcache.sources.causes import Findings, in_order
from latentcache.sources.causes import rejected as note
from latentcache.sources.formats.files import stat_source
from latentcache.sources.inventory import Inventory
from latentcache.sources.known import KnownFiles, Scan, ScanResult, hash_rows, is_range
from latentcache.sources.records import (
    EXPECTED,
    Record,
    RecordReader,
    reading_of,
    record_size,
)

_OFTEN = 4096
#: A row, as numpy and as ``struct`` have it.
_ROW = np.dtype(
    [("file", "=i4"), ("line", "=u4"), ("characters", "=u4"), ("form", "u1"), ("content", f"V{HASH_BYTES}")]
)
_PACKED = Struct(f"=iIIB{HASH_BYTES}s")
_BLOCK = 1 << 14


def read_records(
    root: Path, samples: SampleTable, rows: NDArray[np.integer], *, text_lines: bool
) -> Iterator[tuple[int, Record | None]]:
    """(row, record) of ascending rows; None if the file does not hold it any more. Other files are not read."""
    held = samples.inputs["record"]
    if len(rows) > 1 and not (np.diff(rows) > 0).all():
        raise ValueError("rows of records must ascend")
    file_of = np.asarray(held.file)[rows]
    bounds = [0, *(np.flatnonzero(np.diff(file_of)) + 1).tolist(), len(rows)]
    for start, stop in pairwise(bounds) if len(rows) else ():
        name = samples.files.names[int(file_of[start])]
        yield from _matching(RecordReader(root / name, name, text_lines), rows[start:stop], held)


def _matching(
    records: Iterable[Record], rows: NDArray[np.integer], held: Input
) -> Iterator[tuple[int, Record | None]]:
    """Rows of one file with their records, by line and content."""
    expected = _expected(rows, held)
    wanted = next(expected, None)
    try:
        for record in records:
            while wanted is not None and wanted[1] < record.line:
                yield wanted[0], None
                wanted = next(expected, None)
            if wanted is None:
                return
            if wanted[1:] == (record.line, record.content):
                yield wanted[0], record
                wanted = next(expected, None)
    except (UnusableSampleError, SourceError):
        pass  # the rest is not there
    yield from ((row, None) for row, _, _ in chain([] if wanted is None else [wanted], expected))


def _expected(rows: NDArray[np.integer], held: Input) -> Iterator[tuple[int, int, bytes]]:
    """Row, line and content of each record."""
    assert held.line is not None
    for start in range(0, len(rows), _BLOCK):  # there may be ten million
        block = rows[start : start + _BLOCK]
        contents = np.ascontiguousarray(held.content[block]).view(f"V{HASH_BYTES}")[:, 0]
        yield from zip(block.tolist(), held.line[block].tolist(), contents.tolist(), strict=True)


def scan_records(request: Scan, inventory: Inventory, names: Sequence[str], findings: Findings) -> ScanResult:
    """All records of these files; raises SourceError if there is one file and it cannot be read."""
    part, text_lines, rows = request.options.part, request.options.text_lines, bytearray()
    reading = hash_rows(reading_of(name, str(part or ""), text_lines=text_lines) for name in names)
    stats = np.array([_state(inventory.root / name) for name in names], dtype=np.uint64).reshape(-1, STAT_WIDTH)
    held = request.held(Strings.of(names), stats, reading)

    def read(file: int) -> None:
        held.distrust(np.array([file]))
        reader = RecordReader(inventory.root / names[file], names[file], text_lines)
        try:
            is_whole = _read(request, reader, file, rows, findings)
        except UnusableSampleError as error:
            if inventory.is_file:
                raise SourceError(f"{reader.name}: {error.what}", where=str(reader.path), fix=error.fix) from error
            raise
        if is_whole:
            assert reader.stat is not None
            held.remember(file, reader.content, reader.stat)

    known = request.contained(held, np.arange(len(names)), "record", findings.rejected, read)
    table = held.table
    if table is None or len(known) < len(names) or not is_range(held.position, len(table.files)):
        new = np.frombuffer(rows, dtype=_ROW)
        table = _table(held, reading, np.concatenate([_known(held.table, *held.rows_in("record", known)), new]))
    rejections = in_order(findings.rejected)
    if part is None:  # else they may be in other parts
        is_none = np.bincount(np.asarray(table.inputs["record"].file), minlength=len(names)) == 0
        named = {item.name for item in rejections}
        empty = [name for name in held.names.take(np.flatnonzero(is_none)) if name not in named]
        findings.notes.add(*(note(name, "unused", "it holds no records") for name in empty))
        if not len(table) and not rejections and not request.stopping():
            raise EmptySourceError(
                f"{count_of(len(names), 'files')} of {inventory.root} without a record",
                where=str(inventory.root),
                why="; ".join(names[:3]),
                fix=f"give files of texts or conversations: expected {EXPECTED}",
            )
    return ScanResult(samples=table, rejected=rejections, notes=findings.notes.all())


def _state(path: Path) -> StatMemo:
    try:
        return stat_source(path)
    except UnusableSampleError:  # reading it gives the reason
        return StatMemo(*[0] * STAT_WIDTH)


def _read(request: Scan, reader: RecordReader, file: int, rows: bytearray, findings: Findings) -> bool:
    """Add the rows of one file, and its rejected records; False: it has to be read again, its rest is unknown."""
    part, damage = request.options.part, None
    try:
        for number, record in enumerate(reader, start=1):
            if part is None or part.holds(record.content):
                size = min(record_size(record), 0xFFFF_FFFF)
                rows += _PACKED.pack(file, record.line, size, record.form, record.content)
            if not number % _OFTEN and request.stopping():
                return False
    except UnusableSampleError as error:
        if not reader.last or error.slug == "not-records":
            raise
        error.what = f"rest unread: {error.what}"
        damage = error
    findings.rejected += reader.rejected.all()
    if damage is not None:
        findings.reject(reader.name, damage, line=reader.last + 1)
    return damage is None


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
    position = rows["file"].astype(np.int64) << 32 | rows["line"]
    if not (np.diff(position) >= 0).all():
        rows = rows[np.argsort(position, kind="stable")]
    column: dict[str, NDArray[Any]] = {name: np.ascontiguousarray(rows[name]) for name in _ROW.names or ()}

    def labels() -> Iterator[list[str]]:
        for start in range(0, len(rows), _BLOCK):
            numbers, inverse = np.unique(column["file"][start : start + _BLOCK], return_inverse=True)
            names, lines = held.names.take(numbers), column["line"][start : start + _BLOCK].tolist()
            yield [f"{names[number]}:{line}" for number, line in zip(inverse.tolist(), lines, strict=True)]

    content = column["content"].view(np.uint8).reshape(-1, HASH_BYTES)
    return SampleTable(
        names=Strings.of(chain.from_iterable(labels())),
        files=Files(names=held.names, stat=held.stat, content=held.content, reading=reading),
        inputs={"record": Input(content=content, file=column["file"], line=column["line"])},
        columns={"characters": column["characters"], "form": column["form"]},
    )
