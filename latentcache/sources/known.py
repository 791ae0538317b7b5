"""Requests and results of readers, and the last snapshot's values for files that did not change.

All in columns: about 1 us per file. A file is trusted if size, times, inode and device are those of its memo. A file
that was written within two seconds of being hashed is not trusted (``StatMemo``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.strings import Strings
from latentcache.fields.table import STAT_WIDTH, Files, Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES, RACY_NS, StatMemo, content_hash
from latentcache.sources.causes import Findings
from latentcache.sources.layout import above
from latentcache.sources.locations import Location, read_each, read_image
from latentcache.sources.options import SourceOptions
from latentcache.value import Value

_SLICE = 1 << 14
#: Names without a partner that are left out one by one, before the rest is hashed. One takes 20 us, a hash 0.4 us.
_MOST_LEFT_OUT = 1 << 12


def match_names(names: Strings, others: Strings) -> NDArray[np.int32]:
    """(n,) position of each of ``names`` in ``others``; -1 if it is absent. Each should be there once.

    Both are compared as bytes, in their order; of two names that differ the smaller one is left out. These, and the
    rest after too many of them, are compared by 64-bit hashes and then by name.
    """
    position = np.full(len(names), -1, dtype=np.int32)
    is_used = np.zeros(len(others), dtype=np.bool_)
    mine, theirs, most, left_out = 0, 0, _SLICE, 0
    while left_out < _MOST_LEFT_OUT and (count := min(most, len(names) - mine, len(others) - theirs)):
        if names.matches(mine, others, theirs, count):
            position[mine : mine + count] = np.arange(theirs, theirs + count)
            is_used[theirs : theirs + count] = True
            mine, theirs, most = mine + count, theirs + count, min(2 * most, _SLICE)
        elif count > 1:
            most = count // 2
        else:
            left_out += 1
            mine, theirs = (mine + 1, theirs) if names[mine] < others[theirs] else (mine, theirs + 1)
    here, there = np.flatnonzero(position < 0), np.flatnonzero(~is_used)
    if not len(here) or not len(there):
        return position
    wanted, hashes = _hashes(names, here), _hashes(others, there)
    order = np.argsort(hashes, kind="stable")
    nearest = order[np.minimum(np.searchsorted(hashes, wanted, sorter=order), len(there) - 1)]
    matched = np.flatnonzero(hashes[nearest] == wanted)
    for start in range(0, len(matched), _SLICE):
        some = matched[start : start + _SLICE]
        rows = here[some]
        positions = there[nearest[some]]
        equal = np.array(
            [a == b for a, b in zip(names.take(rows), others.take(positions), strict=True)], dtype=np.bool_
        )
        position[rows[equal]] = positions[equal]
    return position


def _hashes(names: Strings, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
    blocks = (rows[start : start + _SLICE] for start in range(0, len(rows), _SLICE))
    encoded = (name.encode("utf-8", "surrogateescape") for block in blocks for name in names.take(block))
    return np.fromiter(map(xxhash.xxh3_64_intdigest, encoded), dtype=np.uint64, count=len(rows))


def racy(memos: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """(n,) True for memos (n, 6) of files that may have changed unseen since they were hashed."""
    times = memos.view(np.int64)
    young: NDArray[np.bool_] = times[:, 5] - np.maximum(times[:, 1], times[:, 2]) < RACY_NS
    return young


class KnownFiles:
    """The snapshot's values for the files of now, except files to read again or that were read with other options.

    Args:
        request: The scan, with the snapshot's samples and rejections.
        names: (F,) files of now.
        memos: (F, 6) their stats, not trusted; kept and filled in.
        reading: (F, 16) hashes of the options that files are read with now; None: files have none.
    """

    def __init__(
        self, request: Scan, names: Strings, memos: NDArray[np.uint64], reading: NDArray[np.uint8] | None
    ) -> None:
        table = request.known
        count = len(names)
        self.table, self.names, self.reading = table, names, reading
        self.position = np.full(count, -1, dtype=np.int32)
        """(F,) position in the snapshot's files; -1 for a file that is new or may have changed."""
        self.stat = memos
        """(F, 6) memos; the moment of hashing is 0 for a file that is not trusted."""
        self.content = np.zeros((count, HASH_BYTES), dtype=np.uint8)
        """(F, 16) content of trusted files, else zeros."""
        if table is not None and len(table.files):
            self.position = match_names(names, table.files.names)
            for start in range(0, count, _SLICE):
                self._trust(table, slice(start, min(start + _SLICE, count)))
        self._rejected(names, () if request.full else request.rejected)
        if request.full and table is not None:
            self.distrust(take_rows(files_of(table, request.chosen), self.position))
        old = table.files.reading if table is not None else None
        if old is not None or reading is not None:
            before = np.zeros((count, HASH_BYTES), np.uint8) if old is None else take_rows(old, self.position)
            now = np.zeros_like(before) if reading is None else reading
            self.distrust((before != now).any(axis=1) & (self.position >= 0))

    @property
    def files(self) -> Files:
        """The files of now as a table of samples has them."""
        return Files(names=self.names, stat=self.stat, content=self.content, reading=self.reading)

    def distrust(self, files: NDArray[Any]) -> None:
        """Forget files: their positions, or (F,) True for each."""
        self.position[files] = -1
        self.stat[files, 5] = 0
        self.content[files] = 0

    def remember(self, file: int, content: bytes, memo: StatMemo) -> None:
        """Keep what reading a file gave."""
        self.content[file] = np.frombuffer(content, dtype=np.uint8)
        self.stat[file] = memo

    def rows_of(self, input_name: str, files: NDArray[np.integer]) -> NDArray[np.int32]:
        """(n,) row of the snapshot's samples whose input is the whole of each trusted file; -1: unknown."""
        table = self.table
        if table is None or input_name not in table.inputs or not len(table):
            return np.full(len(files), -1, dtype=np.int32)
        held = table.inputs[input_name]
        of_file = np.full(len(table.files) + 1, -1, dtype=np.int32)  # the last: for -1
        file = np.asarray(held.file)
        whole = np.arange(len(file)) if held.line is None else np.flatnonzero(np.asarray(held.line) == 0)
        of_file[file[whole]] = whole
        of_file[-1] = -1
        return of_file[np.where(files >= 0, self.position[files], -1)]

    def rows_in(self, input_name: str, files: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(n,) rows of the snapshot's samples that are parts of trusted files, file by file, and the file of each."""
        if self.table is None or not len(files):
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        held = np.asarray(self.table.inputs[input_name].file)
        order = np.arange(len(held)) if (np.diff(held) >= 0).all() else np.argsort(held, kind="stable")
        first = np.searchsorted(held, self.position[files], sorter=order)
        count = np.searchsorted(held, self.position[files], side="right", sorter=order) - first
        rows = order[np.arange(int(count.sum())) + np.repeat(first - np.cumsum(count) + count, count)]
        return rows, np.repeat(files, count)

    def is_whole(self, rows: NDArray[np.integer]) -> bool:
        """True if these rows are all rows of the snapshot, in their order."""
        return self.table is not None and is_range(rows, len(self.table))

    def _trust(self, table: SampleTable, block: slice) -> None:
        position = self.position[block]
        there = np.flatnonzero(position >= 0)
        if not len(there):
            return
        memos = np.ascontiguousarray(table.files.stat[position[there]])
        good = (memos[:, :5] == self.stat[block][there, :5]).all(axis=1) & ~racy(memos)
        position[there[~good]] = -1
        there = there[good] + block.start
        self.stat[there, 5] = memos[good, 5]
        self.content[there] = table.files.content[self.position[there]]

    def _rejected(self, names: Strings, rejected: Sequence[Rejected]) -> None:
        read = [item for item in rejected if item.content and len(item.stat) == STAT_WIDTH and not item.line]
        if not read:
            return
        position = match_names(Strings.of([item.name for item in read]), names)
        for item, file in zip(read, position.tolist(), strict=True):
            memo = np.array([value & 0xFFFF_FFFF_FFFF_FFFF for value in item.stat], dtype=np.uint64)
            unknown = file >= 0 and not self.stat[file, 5]
            if unknown and (memo[:5] == self.stat[file, :5]).all() and not racy(memo[None])[0]:
                self.stat[file, 5] = memo[5]
                self.content[file] = np.frombuffer(item.content, dtype=np.uint8)


def with_contents(
    samples: SampleTable, name: str, rows: NDArray[np.integer], content: NDArray[np.uint8], stat: NDArray[np.uint64]
) -> SampleTable:
    """Samples with the content hashes (n, 16) and file memos (n, 6) that reading an input of (n,) rows gave.

    Columns in memory are changed in place, which saves 80 bytes per sample: ``samples`` is not to be used any more.
    """
    held = samples.inputs[name]
    files = np.asarray(held.file)[rows]
    contents = writable(held.content)
    contents[rows] = content
    stats, whole = writable(samples.files.stat), writable(samples.files.content)
    part: NDArray[np.bool_] = np.zeros(len(rows), np.bool_) if held.line is None else np.asarray(held.line)[rows] > 0
    alone: Any = ~part if part.any() else slice(None)  # a slice copies nothing
    stats[files[alone]], whole[files[alone]] = stat[alone], content[alone]
    files = files[part]
    stat = stat[part]
    same = (stats[files, :5] == stat[:, :5]).all(axis=1)
    archives, archive = np.unique(files, return_inverse=True)
    moments = np.full(len(archives), np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(moments, archive, np.where(same, stat[:, 5], 0))
    before = stats[archives, 5]
    stats[archives, 5] = np.where(before > 0, np.minimum(before, moments), moments)
    inputs = {**samples.inputs, name: replace(held, content=contents)}
    return replace(samples, files=replace(samples.files, stat=stats, content=whole), inputs=inputs)


def hash_rows(hashes: Iterable[bytes]) -> NDArray[np.uint8]:
    """(n, 16) hashes."""
    return np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, HASH_BYTES)


def with_hashes(
    root: Path, samples: SampleTable, name: str, rows: NDArray[np.integer], stopping: Callable[[], bool] = bool
) -> tuple[SampleTable, dict[int, UnusableSampleError]]:
    """Samples with the contents of the files of some rows, and why those of others cannot be read."""
    contents, memos = np.zeros((len(rows), HASH_BYTES), np.uint8), np.zeros((len(rows), STAT_WIDTH), np.uint64)
    failed = dict[int, UnusableSampleError]()

    def read(location: Location) -> tuple[bytes, StatMemo]:
        data, memo = read_image(root, location)
        return content_hash(data), memo

    for number, result in read_each(read, samples, rows, name, stopping):
        if isinstance(result, UnusableSampleError):
            failed[int(rows[number])] = result
        else:
            contents[number], memos[number] = np.frombuffer(result[0], dtype=np.uint8), result[1]
    done = np.flatnonzero(memos[:, -1])
    if len(done):
        samples = with_contents(samples, name, rows[done], contents[done], memos[done])
    return samples, failed


def files_of(samples: SampleTable, chosen: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """(F,) files that hold an input of the chosen samples, or of all."""
    if chosen is None:
        return np.ones(len(samples.files), dtype=np.bool_)
    wanted = np.zeros(len(samples.files), dtype=np.bool_)
    for column in samples.inputs.values():
        files = np.asarray(column.file)[chosen]
        wanted[files[files >= 0]] = True
    return wanted


def writable(column: Any) -> NDArray[Any]:
    """The column itself if it can be changed, else a copy."""
    return column if isinstance(column, np.ndarray) and column.flags.writeable else np.array(column)


def is_range(rows: NDArray[np.integer], count: int) -> bool:
    """True if these are all rows of something, in their order."""
    return len(rows) == count and bool((rows == np.arange(count)).all())


def take_rows(column: NDArray[Any], rows: NDArray[np.integer]) -> NDArray[Any]:
    """Rows of a column, zeros for -1."""
    taken = np.zeros((len(rows), *column.shape[1:]), dtype=column.dtype)
    there = np.flatnonzero(rows >= 0)
    if len(there):
        taken[there] = column[rows[there]]
    return taken


# what readers take and give


@dataclass(kw_only=True)
class Scan:
    """Request for a scan; see ``scan.scan``."""

    options: SourceOptions
    known: SampleTable | None = None
    rejected: Sequence[Rejected] = ()
    notes: Sequence[Rejected] = ()
    chosen: NDArray[np.bool_] | None = None
    full: bool = False
    hash_all: bool = False
    stopping: Callable[[], bool] = bool
    findings: Findings = field(default_factory=Findings)
    """Rejections and notes of this scan."""

    def contained(self, held: KnownFiles, count: int, name: str, read: Callable[[int], None]) -> NDArray[np.intp]:
        """Unchanged ones of the first ``count`` files, which hold several values of the input ``name`` each.

        The snapshot has their rows, and its rejections in them stay. Changed files are given to ``read``. Files that
        it cannot read are rejected.
        """
        files = np.arange(count)
        findings = self.findings
        names = held.names.take(files)
        is_known = (held.position[files] >= 0) & (held.table is not None and held.table.inputs[name].line is not None)
        lacking = {name for item in self.rejected if item.target or item.content for name in above(item.name)}
        if lacking:  # the snapshot has no rows for these
            is_known &= [name not in lacking for name in names]
        known = {names[number] for number in np.flatnonzero(is_known).tolist()} if self.rejected else set[str]()
        findings.rejected += [item for item in self.rejected if known.intersection(above(item.name))]
        for file, label in zip(files[~is_known].tolist(), held.names.take(files[~is_known]), strict=True):
            if self.stopping():
                break
            try:
                read(file)
            except UnusableSampleError as error:
                findings.reject(label, error)
        return np.asarray(files[is_known])


class ScanResult(Value):
    """Result of a scan of images or of records."""

    samples: SampleTable
    rejected: tuple[Rejected, ...]
    """By the source, for every field."""
    notes: tuple[Rejected, ...]
    images: Any = None
    """An ``images.ImageCounts``; None: DATA are records."""
    hashed: int = 0
    """Images that were hashed."""
    unread: Mapping[tuple[str, int], UnusableSampleError] = field(default_factory=dict)
    """(Input, row) of those that could not be read, and why."""


_NONE = np.array(-1, dtype=np.int32)
#: Column of units -> its default; other columns are positions of files, and their default is -1.
_DEFAULTS: Mapping[str, NDArray[Any]] = {
    "which": np.array(-1, dtype=np.int8),
    "owner": np.array(0, dtype=np.int32),
    "repeats": np.array(1, dtype=np.int32),
    "text": np.array("", dtype=object),
    "tail": np.array("", dtype=object),
    "line": np.array(0, dtype=np.uint32),
    "member": np.array(0, dtype=np.uint32),
    "span": np.zeros(2, dtype=np.uint64),
    "more": np.array({}, dtype=object),
    "known": _NONE,
}


class Units:
    """Samples (n) before they become a table, in columns; a missing column has its default and takes no memory.

    - ``image``, ``caption``, ``mask``, ...: positions among the files; -1: none.
    - ``which``: extension of the caption file among those of its rule; -1: it is not beside the image.
    - ``owner``: sets; ``repeats`` in an epoch.
    - ``more``: other columns of the table, by their names.
    - ``text``: captions that are read already; ``line``: rows or members that hold them, 0: none.
    - ``member``: members or rows of archives, from 1; 0: the image is the file. ``tail``: their names behind that of
      the file; ``span``: (n, 2) see ``locations.SPAN``; ``known``: rows of the snapshot, -1: new.
    """

    def __init__(self, **columns: NDArray[Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["image"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        default = _DEFAULTS.get(name, _NONE)
        held = self.columns.get(name)
        return np.broadcast_to(default, (len(self), *default.shape)) if held is None else held

    @property
    def files(self) -> dict[str, NDArray[np.int32]]:
        """The columns that are positions among the files, such as ``image``."""
        return {name: column for name, column in self.columns.items() if name not in _DEFAULTS}

    def take(self, rows: NDArray[Any]) -> Units:
        """Some of them: positions, or True for each."""
        return Units(**{name: column[rows] for name, column in self.columns.items()})

    @classmethod
    def joined(cls, parts: Sequence[Units]) -> Units:
        """One after the other."""
        names = dict.fromkeys(name for part in parts for name in part.columns)
        return cls(**{name: np.concatenate([part[name] for part in parts]) for name in names})
