"""The samples of a data set, in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.strings import Strings
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.value import Value

#: Width of the stat column: size, mtime_ns, ctime_ns, inode, device, seen_ns (see ``StatMemo``).
STAT_WIDTH = 6
#: Prefix of the columns that a metadata table of DATA has beside file names and captions; see :func:`table_column`.
OF_TABLE = "table."
#: What a column that a table lacks means for each of its samples.
ABSENT: Mapping[str, int] = {"repeats": 1, "span": 0, "clip": 0, "altered": 0}


class Failure(Value):
    """Reason why a sample gives no item."""

    reason: str
    """Stable word: truncated, empty, html, git-lfs, ..."""
    detail: str = ""
    """One sentence with the numbers: line, offset, expected and found."""
    hint: str = ""
    """Advice for the user."""
    field: str = ""
    """Field of the record (``messages[2].content``); empty for all of it."""
    content: bytes = b""
    """Content hash (16 bytes) of what was rejected; empty if it was not read."""
    stat: tuple[int, ...] = ()
    """Stat memos, ``STAT_WIDTH`` numbers a file; empty if there are none."""


class Rejected(Failure):
    """A file or record that is not used: with a reason, or as a note."""

    name: str
    """File relative to DATA, with ``/``."""
    line: int = 0
    """Line or row of the file, from 1; 0 for the file itself."""
    target: str = ""
    """Field of the cache that rejects the sample; empty: the source rejects it for every field."""
    count: int = 1
    """Files or records that this one stands for; ``name`` is the first of them."""

    @property
    def label(self) -> str:
        """As samples are named: the file, or ``file:line``."""
        return f"{self.name}:{self.line}" if self.line else self.name


class Files(Value):
    """The F source files of a data set."""

    names: Strings
    """Relative to DATA, with ``/``."""
    stat: NDArray[np.uint64]
    """(F, 6) stat memos."""
    content: NDArray[np.uint8]
    """(F, 16) content hash of each whole file; zeros while unknown."""
    reading: NDArray[np.uint8] | None = None
    """(F, 16) hash of the options each file was read with; None if files have none."""

    def __len__(self) -> int:
        return len(self.names)


class Input(Value):
    """One input of every sample: where it is and what it holds."""

    content: NDArray[np.uint8]
    """(S, 16) content hash; zeros while unknown (a file that is hashed when it is encoded), and for no caption."""
    file: NDArray[np.int32]
    """(S,) position in the files; -1: the sample lacks this input."""
    line: NDArray[np.uint32] | None = None
    """(S,) line, row or member in the file, from 1; 0: the whole file. None: whole files."""
    text: Strings | None = None
    """The value itself, for text that is kept (captions)."""


class SampleTable(Value):
    """S samples, in the order of the data set, with their inputs."""

    names: Strings
    """One name per sample: the file for images, ``file.tar/name`` for members of tars, ``file:line`` for records."""
    files: Files
    inputs: Mapping[str, Input]
    """By input name: ``image``, ``caption``, ``record``. The first one names the sample's own file."""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """(S, ...) columns of inputs, such as ``original_size`` (S, 2) uint32: height, width in pixels; 0 if unknown."""

    def __len__(self) -> int:
        return len(self.names)

    def content_of(self, names: Sequence[str]) -> NDArray[np.uint8]:
        """(S, 16) content of an input; of several a hash of all, zeros while one of a sample's is unknown."""
        columns = [self.inputs[name] for name in names]
        if len(columns) == 1:
            return columns[0].content
        parts = [np.asarray(column.content) for column in columns]
        known = [
            part.any(axis=1) | (np.asarray(column.file) < 0) for part, column in zip(parts, columns, strict=True)
        ]
        rows = np.flatnonzero(np.logical_and.reduce(known))
        hashes = [content_hash(row) for row in np.concatenate([part[rows] for part in parts], axis=1)]
        contents = np.zeros_like(parts[0])
        contents[rows] = np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, HASH_BYTES)
        return contents

    @property
    def first_input(self) -> Input:
        """The input that names the sample's own file."""
        return next(iter(self.inputs.values()))

    def where(self, row: int) -> tuple[str, int]:
        """File and line of a sample; a sample that has a name of its own, as files and members have, has line 0."""
        lead = next(iter(self.inputs.values()), None)
        name = self.names[row]
        if lead is not None and lead.line is not None and (line := int(lead.line[row])):
            file = self.files.names[int(lead.file[row])]
            if name == f"{file}:{line}":
                return file, line
        return name, 0

    def note(
        self, rows: Sequence[Any] | NDArray[Any], target: str, reason: str, detail: str, hint: str = ""
    ) -> Rejected:
        """Make a note of a field, ``target``, on samples, named by the first of them."""
        first = self.names[int(rows[0])]
        return Rejected(name=first, reason=reason, detail=detail, hint=hint, count=len(rows), target=target)


def join_tables(
    tables: Sequence[SampleTable], numbers: Sequence[NDArray[np.int64]], files: Files, order: NDArray[np.intp]
) -> SampleTable:
    """The samples of all tables with one set of inputs, those of ``order`` (rows of all) in that order.

    ``numbers`` are the positions of the files of each table in ``files``, the files of all.
    """

    def column(values: Sequence[Any]) -> NDArray[Any]:
        joined: NDArray[Any] = np.concatenate([np.asarray(array) for array in values])[order]
        return joined

    def strings(values: Sequence[Strings]) -> Strings:
        sizes = np.cumsum([0, *(len(column.data) for column in values)])[:-1]
        ends = np.concatenate([column.ends + size for column, size in zip(values, sizes.tolist(), strict=True)])
        return Strings(np.concatenate([column.data for column in values]), ends).select(order)

    def joined_input(name: str) -> Input:
        inputs = [table.inputs[name] for table in tables]
        pairs = zip(inputs, numbers, strict=True)
        files_now = [np.append(number, -1)[np.asarray(part.file)].astype(np.int32) for part, number in pairs]
        texts = [part.text for part in inputs if part.text is not None]
        lines = [
            np.zeros(len(part.file), np.uint32) if part.line is None else np.asarray(part.line) for part in inputs
        ]
        return Input(
            content=column([part.content for part in inputs]),
            file=column(files_now),
            line=column(lines) if any(part.line is not None for part in inputs) else None,
            text=strings(texts) if len(texts) == len(inputs) else None,
        )

    return SampleTable(
        names=strings([table.names for table in tables]),
        files=files,
        inputs={name: joined_input(name) for name in tables[0].inputs},
        columns={
            name: column(_filled(name, tables)) for name in sorted({label for t in tables for label in t.columns})
        },
    )


def table_column(values: Sequence[str | float | None]) -> NDArray[Any]:
    """Numbers as int64 or float64, or texts as (n, W) UTF-8 with zeros behind; None is NaN, or an empty text."""
    if any(isinstance(value, str) for value in values):
        texts = np.array([str(value or "").encode() for value in values])
        return texts.view(np.uint8).reshape(len(texts), -1)
    if all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def table_values(column: Any) -> list[str] | NDArray[Any]:
    """The texts in (n, W) UTF-8, or (n,) the numbers, of :func:`table_column`."""
    values = np.ascontiguousarray(column)
    if values.ndim == 1:
        return values
    return [text.decode() for text in values.view(f"S{values.shape[1]}")[:, 0].tolist()]


def _filled(name: str, tables: Sequence[SampleTable]) -> list[NDArray[Any]]:
    """A sample column of all parts; in a part without it every sample has the value of ``ABSENT``."""
    if name.startswith(OF_TABLE):
        columns = [table.columns.get(name, np.full(len(table), np.nan)) for table in tables]
        values = table_column([
            None if value != value else value  # NaN
            for column in columns for value in np.array(table_values(column), dtype=object).tolist()
        ])  # fmt: skip
        return np.split(values, np.cumsum([len(table) for table in tables])[:-1])
    held = next(np.asarray(table.columns[name]) for table in tables if name in table.columns)
    return [
        np.asarray(table.columns.get(name, np.full((len(table), *held.shape[1:]), ABSENT.get(name, 1), held.dtype)))
        for table in tables
    ]
