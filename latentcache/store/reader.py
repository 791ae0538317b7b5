"""Read items of a snapshot: positional reads into the caller's memory, and proof that bytes are what was written.

With ``checksum="first"`` each entry is proven when this process first reads it, with ``"always"`` on each read. Its
payload is compared with its checksum in the snapshot's columns. These columns have checksums too.
LMDB is not opened and nothing is mapped, so a file that is cut short is an error. A reader is safe across ``fork``,
``spawn``, threads and pickling.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CorruptEntryError, MissingEntryError, RemoteError, StoreError, UsageError
from latentcache.fields.dtypes import numpy_dtype
from latentcache.identity.content import checksum
from latentcache.store.atomic_io import open_file, unreadable
from latentcache.store.gather import Ints, Scaling, read_at, read_pieces, scale_pieces
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import FieldRows, Snapshot

Checksum = Literal["first", "always"]
ByteRange = tuple[int, int, int]
"""Descriptor of a shard, first byte, number of bytes."""
_NO_ROWS = np.zeros(0, dtype=np.intp)
#: Entries that hold several items, of 256 KiB at most, that are read together to be proven.
_TOGETHER = 64


class _Field:
    """Columns for reading a field, in memory: 28 bytes an entry, 8 to 16 a row."""

    def __init__(self, rows: FieldRows) -> None:
        self.rows = rows
        self.packed = rows.packing == "block"
        self.dtype = numpy_dtype(rows.spec.dtype)
        self.shard = np.asarray(rows.shard)
        self.offset = np.asarray(rows.offset).view(np.int64)
        self.checksum, self.size, self.head = np.asarray(rows.checksum), rows.bytes, rows.head
        self.entry, self.group = np.asarray(rows.entry), np.asarray(rows.group)
        shapes = [group.shape[1:] if rows.spec.ragged else group.shape for group in rows.groups]
        self.width = np.array([self.dtype.itemsize * int(np.prod(shape)) for shape in shapes], dtype=np.int64)
        self.start = np.asarray(rows.start) if self.packed else None
        self.length = np.asarray(rows.length) if rows.spec.ragged else None
        self.proven = np.zeros(len(self.offset), dtype=np.bool_)

    def segments(self, rows: Ints, start: Ints | None = None, length: Ints | None = None) -> tuple[Ints, Ints, Ints]:
        """(n,) shards, first bytes and bytes of items, or of elements of them from ``start`` on."""
        entry = self.entry[rows]
        width = self.width[self.group[rows]]
        count: Any = 1 if self.length is None else self.length[rows].astype(np.int64)
        offset = self.offset[entry]
        if self.start is not None:
            offset += self.start[rows].astype(np.int64) * width
        if start is not None:
            offset += start * width
            count = count - start if length is None else length
        return self.shard[entry], offset, count * width


class ShardFile:
    """An open shard, or ranges of one, which closes when nothing refers to it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # os may be gone already
        close(self.descriptor)


class EntryReader:
    """Reads the items of one snapshot. Picklable; opens its files on first use in each process."""

    def __init__(self, paths: CachePaths, snapshot: Snapshot, *, checksum: Checksum = "first") -> None:
        self.paths, self.snapshot, self.checksum = paths, snapshot, checksum
        self._fields: dict[str, _Field] = {}
        self._files: dict[int, ShardFile] = {}

    def gather(self, field: str, rows: Ints, out: Any, at: Ints) -> None:
        """Read rows (n,) of a field straight into memory ``out`` (m,), and prove them.

        ``at`` (n,) is the byte of ``out`` at which each begins; bytes between them keep their values. Raises
        CorruptEntryError, MissingEntryError, CacheDamagedError.
        """
        self.located(field, rows, at, len(out)).read(out)

    def located(
        self, field: str, rows: Ints, at: Ints, room: int, start: Ints | None = None, length: Ints | None = None
    ) -> Located:
        """Locate items, or elements of them along the ragged axis, to be read into ``room`` bytes of memory.

        Arguments and errors as :meth:`gather`.
        """
        columns = self._field(field)
        shard, offset, size = columns.segments(rows, start, length)
        if len(at) and (int(at.min()) < 0 or bool((at + size > room).any())):
            raise IndexError(f"items of {field} do not fit into the memory")
        whole = not columns.packed and start is None
        return self._located(columns, columns.entry[rows], shard, offset, size, at, whole=whole)

    def read(self, field: str, row: int) -> NDArray[Any]:
        """One item, as an array of its own. Errors as :meth:`gather`."""
        columns = self._field(field)
        rows = np.array([row])
        group = columns.rows.groups[int(columns.rows.group[row])]
        shape = group.shape if columns.length is None else (int(columns.length[row]), *group.shape[1:])
        array = np.empty(shape, dtype=columns.dtype)
        self.gather(field, rows, array.reshape(-1).view(np.uint8), np.zeros(1, dtype=np.int64))
        return array

    def prove(self, columns: _Field, entries: Ints) -> None:
        """Read and prove those of these entries that this process has not proven yet. Errors as :meth:`gather`."""
        entries = np.unique(entries[self.unproven(columns, entries)])
        for some in np.split(entries, range(_TOGETHER, len(entries), _TOGETHER)):
            size = np.asarray(columns.size[some]).astype(np.int64)
            ends = np.cumsum(size)
            whole = self._located(
                columns, some, columns.shard[some], columns.offset[some], size, ends - size, whole=True
            )
            whole.read(np.empty(int(size.sum()), dtype=np.uint8))

    def file(self, shard: int) -> ShardFile | None:
        """A shard, opened on first use; None: ranges of it are to be read.

        There is no lock here, which a fork could inherit held.
        """
        if self.snapshot.disk_cache is not None:
            fetched: ShardFile | None = self.snapshot.disk_cache.file(self.snapshot.shards[shard])
            return fetched
        file = self._files.get(shard)
        if file is None:
            path = self._path(shard)
            try:
                file = self._files.setdefault(shard, ShardFile(open_file(path)))
            except FileNotFoundError:
                is_copy = self.paths.remote.exists()
                fix = f"latentcache pull URL {self.paths.root}, or open_cache(URL, disk_cache=...)" if is_copy else ""
                raise MissingEntryError("a shard of this cache is gone", where=path, fix=fix) from None
            except OSError as error:
                raise unreadable(Path(path), error) from error
        return file

    def close(self) -> None:
        """Close the files, once what is being read is read. The reader opens them again when it is asked for more."""
        self._files = {}

    def __reduce__(self) -> Any:
        return partial(EntryReader, checksum=self.checksum), (self.paths, self.snapshot)

    def shards(self, field: str, rows: Ints) -> tuple[Ints, Ints]:
        """(n,) positions in the snapshot's shards of items, and (n,) their bytes."""
        shard, _, size = self._field(field).segments(rows)
        return shard, size

    def _field(self, name: str) -> _Field:
        columns = self._fields.get(name)
        if columns is None:
            if name not in self.snapshot.fields:
                known = ", ".join(sorted(self.snapshot.fields))
                raise UsageError(f"field={name!r}: this cache has {known}", fix=f"one of {known}")
            columns = self._fields.setdefault(name, _Field(self.snapshot.fields[name]))
        return columns

    def unproven(self, columns: _Field, entries: Ints) -> Ints:
        """Positions in ``entries`` of those that have to be proven."""
        if self.checksum == "always":
            return np.arange(len(entries))
        return np.flatnonzero(~columns.proven[entries])

    def _located(
        self, columns: _Field, entries: Ints, shard: Ints, offset: Ints, size: Ints, at: Ints, *, whole: bool
    ) -> Located:
        files, descriptor = self._opened(columns, entries, shard, offset, size)
        pieces = np.empty((4, len(offset)), dtype=np.int64)
        for number, column in enumerate((descriptor, offset, size, at)):
            pieces[number] = column
        return Located(self, columns, entries, files, pieces, whole=whole)

    def _opened(
        self, columns: _Field, entries: Ints, shards: Ints, offset: Ints, size: Ints
    ) -> tuple[list[ShardFile], Ints]:
        """The files of n items, and (n,) their descriptors; ``offset`` becomes that in a file of ranges."""
        numbers, position = np.unique(shards, return_inverse=True)
        files = list[ShardFile]()
        for shard_position, number in enumerate(numbers.tolist()):
            try:
                file = self.file(number)
                if file is None:
                    of_shard = position == shard_position
                    shard = self.snapshot.shards[number]
                    lengths = size[of_shard]
                    file = self.snapshot.disk_cache.ranges(shard, offset[of_shard], lengths)
                    offset[of_shard] = np.cumsum(lengths) - lengths
            except RemoteError as error:
                name, _ = self._owner(columns, int(entries[np.argmax(position == shard_position)]))
                problem = f"the {columns.rows.name} of {name} cannot be fetched: {error.what}"
                raise RemoteError(problem, where=error.where, why=error.why, fix=error.fix) from None
            files.append(file)
        return files, np.array([file.descriptor for file in files], dtype=np.int64)[position]

    def _path(self, shard: int) -> str:
        return str(self.paths.data(self.snapshot.shards[shard]))

    def corrupt(self, columns: _Field, entry: int, why: str | OSError) -> CorruptEntryError:
        """The error that names a damaged entry, or one that cannot be read now."""
        name, more = self._owner(columns, entry)
        path = self._path(int(columns.shard[entry]))
        subject = f"the {columns.rows.name} of {name}{more}"
        fix = f"mv {shlex.quote(path)} elsewhere, then run again" if self.snapshot.disk_cache else ""
        return CorruptEntryError(
            f"{subject} {'are damaged' if isinstance(why, str) else 'cannot be read'}",
            sample=name,
            key=columns.rows.key[entry].tobytes().hex(),
            where=f"{path}:{int(columns.offset[entry])}",
            why=str(why),
            reason="payload" if isinstance(why, str) else "io-error",
            fix=fix if isinstance(why, str) else unreadable(Path(path), why).fix,
        )

    def _owner(self, columns: _Field, entry: int) -> tuple[str, str]:
        """Name of the first sample that an entry belongs to, and the number of others in words."""
        rows = np.flatnonzero(columns.entry == entry)
        name = self.snapshot.samples.names[int(columns.rows.sample[int(rows[0])])] if len(rows) else ""
        return name, f" and {len(rows) - 1} more" if len(rows) > 1 else ""


class Located:
    """n items of a field, or parts of items, and where their bytes are; see :meth:`EntryReader.located`."""

    def __init__(
        self,
        reader: EntryReader,
        field: _Field,
        entries: Ints,
        files: Sequence[ShardFile],
        pieces: NDArray[np.int64],
        *,
        whole: bool,
    ) -> None:
        self._reader, self._field, self._entries = reader, field, entries
        self._files = files
        """They stay open until the items are read."""
        self._pieces = pieces
        self._whole = whole
        """True if each item is an entry, and all of it is wanted."""

    def byte_ranges(self) -> list[ByteRange]:
        """Where the bytes are."""
        return list(zip(*self._pieces[:3].tolist(), strict=True))

    def read(self, out: NDArray[np.uint8], scaling: Scaling | None = None) -> None:
        """Read the items into memory ``out``, prove what this process has not proven, and scale the values.

        ``scaling``: only with the compiled library. Errors as :meth:`EntryReader.gather`.
        """
        new: Ints = _NO_ROWS
        if not self._whole:
            self._reader.prove(self._field, self._entries)
        else:
            new = self._reader.unproven(self._field, self._entries)
        count = read_pieces(self._pieces, out, None if len(new) else scaling)
        if count < len(self._entries):
            raise self._failure(count)
        if len(new):
            self._prove(new, out)
            if scaling is not None:
                scale_pieces(self._pieces, out, scaling)

    def _failure(self, item: int) -> StoreError:
        """The error of an item that did not come whole."""
        descriptor, first, size, _ = self._pieces[:, item].tolist()
        why: str | OSError = "the shard ends early"
        try:
            if len(read_at(descriptor, first, size)) == size:
                where = str(self._reader.paths.root)
                fix = "check the disk, then run again"
                return StoreError("a read failed, and worked when repeated", where=where, fix=fix)
        except OSError as error:
            why = error
        return self._reader.corrupt(self._field, int(self._entries[item]), why)

    def _prove(self, items: Ints, out: NDArray[np.uint8]) -> None:
        """Hold items that were just read against their checksums."""
        entries = self._entries[items]
        memory = out.data
        expected = self._field.checksum[entries].tolist()
        pieces = zip(*self._pieces[2:, items].tolist(), entries.tolist(), expected, strict=True)
        for size, at, entry, wanted in pieces:
            if checksum(memory[at : at + size]) != wanted:
                raise self._reader.corrupt(self._field, entry, f"payload checksum: expected {wanted:016x}")
        self._field.proven[entries] = True
