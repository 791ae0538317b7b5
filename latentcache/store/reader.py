"""Read items of a snapshot: positional reads into the caller's memory, and proof that bytes are what was written.

With ``checksum="first"`` each entry is proven when this process first reads it, with ``"always"`` on each read. Its
payload is compared with its checksum in the snapshot's columns. These columns have checksums too.
LMDB is not opened, and only the compiled library maps shards, so a file that is cut short is an error. A reader is
safe across ``fork``, ``spawn``, threads and pickling.
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, MissingEntryError, UsageError
from latentcache.fields.dtypes import numpy_dtype
from latentcache.identity.content import checksum
from latentcache.store.atomic_io import open_file, unreadable
from latentcache.store.gather import File, Ints, Pieces, Reading, Scaling, read_at
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import FieldRows, Snapshot

Checksum = Literal["first", "always"]
Place = tuple[int, int, int]
"""Descriptor of a shard, first byte, number of bytes."""
_NO_ROWS = np.zeros(0, dtype=np.intp)


class _Field:
    """Columns for reading a field, in memory: 28 bytes an entry, 8 to 16 a row. Rows of few runs stay as they are."""

    def __init__(self, rows: FieldRows) -> None:
        self.rows, self.packed = rows, rows.packing == "block"
        self.dtype = numpy_dtype(rows.spec.dtype)
        self.shard, self.offset = np.asarray(rows.shard), np.asarray(rows.offset).view(np.int64)
        self.checksum, self.size, self.head = np.asarray(rows.checksum), rows.bytes, rows.head
        self.entry, self.group = np.asarray(rows.entry), np.asarray(rows.group)
        shapes = [group.shape[1:] if rows.spec.ragged else group.shape for group in rows.groups]
        self.width = np.array([self.dtype.itemsize * int(np.prod(shape)) for shape in shapes], dtype=np.int64)
        self.start = np.asarray(rows.start) if self.packed else None
        self.length = np.asarray(rows.length) if rows.spec.ragged else None
        self.proven = np.zeros(len(self.offset), dtype=np.bool_)

    def segments(self, rows: Ints, start: Ints | None = None, length: Ints | None = None) -> tuple[Ints, Ints, Ints]:
        """(n,) shards, first bytes and bytes of items, or of elements of them from ``start`` on."""
        entry, width = self.entry[rows], self.width[self.group[rows]]
        count: Any = 1 if self.length is None else self.length[rows].astype(np.int64)
        offset = self.offset[entry]
        if self.start is not None:
            offset += self.start[rows].astype(np.int64) * width
        if start is not None:
            offset += start * width
            count = count - start if length is None else length
        return self.shard[entry], offset, count * width


class EntryReader:
    """Reads the items of one snapshot. Picklable; opens its files on first use in each process."""

    def __init__(self, paths: CachePaths, snapshot: Snapshot, *, checksum: Checksum = "first") -> None:
        self.paths, self.snapshot, self.checksum = paths, snapshot, checksum
        self._fields: dict[str, _Field] = {}
        self._files: dict[int, File] = {}
        weakref.finalize(self, _close_all, self._files).atexit = False  # the system does it then

    def gather(self, field: str, rows: Ints, out: Any, at: Ints) -> None:
        """Read rows (n,) of a field straight into memory ``out`` (m,), and prove them.

        ``at`` (n,) is the byte of ``out`` at which each begins; bytes between them are left as they are. Raises
        CorruptEntryError, MissingEntryError, CacheDamagedError.
        """
        Gathering(self.located(field, rows, at, len(out)), 0, len(rows), out).finish()

    def located(
        self, field: str, rows: Ints, at: Ints, room: Any, start: Ints | None = None, length: Ints | None = None
    ) -> Located:
        """Locate items, or elements of them along the ragged axis, to be read by :class:`Gathering`.

        Arguments and errors as :meth:`gather`; ``room`` is the memory that each is read into, in bytes.
        """
        one = self._field(field)
        shard, offset, size = one.segments(rows, start, length)
        if len(at) and (int(at.min()) < 0 or bool((at + size > room).any())):
            raise IndexError(f"items of {field} do not fit into the memory")
        return Located(self, one, rows, not one.packed and start is None, *self._opened(shard), offset, size, at)

    def read(self, field: str, row: int) -> NDArray[Any]:
        """One item, as an array of its own. Errors as :meth:`gather`."""
        one, rows = self._field(field), np.array([row])
        group = one.rows.groups[int(one.rows.group[row])]
        shape = group.shape if one.length is None else (int(one.length[row]), *group.shape[1:])
        found = np.empty(shape, dtype=one.dtype)
        self.gather(field, rows, found.reshape(-1).view(np.uint8), np.zeros(1, dtype=np.int64))
        return found

    def prove(self, one: _Field, rows: Ints) -> None:
        """Read and prove the entries of items that this process has not proven yet. Errors as :meth:`gather`."""
        entries = np.unique(one.entry[rows[self.unproven(one, rows)]])
        for entry in entries.tolist():
            self.check_hash(
                one, entry, checksum(self._pread(one, entry, int(one.size[entry]), int(one.offset[entry])))
            )
        one.proven[entries] = True

    def file(self, shard: int) -> File:
        """A shard, opened on first use. There is no lock: a fork could inherit it held; of two threads one wins."""
        if shard not in self._files:
            path = self._path(shard)
            try:
                opened = File(open_file(path))
            except FileNotFoundError:
                raise MissingEntryError("a shard of this cache is gone", where=path) from None
            except OSError as error:
                raise unreadable(Path(path), error) from error
            if self._files.setdefault(shard, opened) is not opened:
                os.close(opened.descriptor)
        return self._files[shard]

    def fresh(self) -> EntryReader:
        """The same items with files of its own; what is known of entries is shared, and which were proven."""
        other = EntryReader(self.paths, self.snapshot, checksum=self.checksum)
        other._fields = self._fields
        return other

    def close(self) -> None:
        """Close the files. The reader opens them again when it is asked for more."""
        _close_all(self._files)

    def __reduce__(self) -> Any:
        return partial(EntryReader, checksum=self.checksum), (self.paths, self.snapshot)

    def _field(self, name: str) -> _Field:
        found = self._fields.get(name)
        if found is None:
            if name not in self.snapshot.fields:
                known = ", ".join(sorted(self.snapshot.fields))
                raise UsageError(f"field={name!r}: this cache has {known}", fix=f"one of {known}")
            found = self._fields.setdefault(name, _Field(self.snapshot.fields[name]))
        return found

    def unproven(self, one: _Field, rows: Ints) -> Ints:
        """Positions in ``rows`` of items whose entries have to be proven."""
        if self.checksum == "always":
            return np.arange(len(rows))
        return np.flatnonzero(~one.proven[one.entry[rows]])

    def _opened(self, shards: Ints) -> tuple[list[File], Ints | int]:
        """The files of n items, opened on first use, and (n,) which of them each is in."""
        if (shards == shards[:1]).all():
            return [self.file(int(shard)) for shard in shards[:1]], 0
        known, own = np.unique(shards, return_inverse=True)
        return [self.file(shard) for shard in known.tolist()], own

    def _pread(self, one: _Field, entry: int, size: int, place: int) -> memoryview:
        data, why = memoryview(b""), "the shard ends early"
        try:
            shard = self.file(int(one.shard[entry])).descriptor
            if 0 <= place <= os.fstat(shard).st_size - size:
                data = read_at(shard, place, size)
        except OSError as error:
            why = str(error)
        if len(data) != size:
            raise self.corrupt(one, entry, why)
        return data

    def check_hash(self, one: _Field, entry: int, found: int) -> None:
        """Raise unless the payload of an entry has its checksum."""
        if found != int(one.checksum[entry]):
            raise self.corrupt(one, entry, f"payload checksum: expected {int(one.checksum[entry]):016x}")

    def _path(self, shard: int) -> str:
        return str(self.paths.data(self.snapshot.shards[shard]))

    def corrupt(self, one: _Field, entry: int, why: str) -> CorruptEntryError:
        """The error that names a damaged entry."""
        rows = np.flatnonzero(one.entry == entry)
        name = self.snapshot.samples.names[int(one.rows.sample[int(rows[0])])] if len(rows) else ""
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        return CorruptEntryError(
            f"the {one.rows.name} of {name}{more} are damaged",
            sample=name,
            key=one.rows.key[entry].tobytes().hex(),
            where=f"{self._path(int(one.shard[entry]))}:{int(one.offset[entry])}",
            why=why,
        )


class Located(Pieces):
    """Places of n items of a field; see :meth:`EntryReader.located`."""

    def __init__(self, reader: EntryReader, field: _Field, rows: Ints, whole: bool, *pieces: Any) -> None:
        super().__init__(*pieces)
        self.reader, self.field, self.rows = reader, field, rows
        self.whole = whole
        """True if each item is an entry, and all of it is wanted."""

    def places(self, first: int, last: int) -> list[Place]:
        """Return the places of the bytes of some of them, for reading ahead."""
        return list(zip(*self.columns[:3, first:last].tolist(), strict=True))


class Gathering(Reading):
    """Reads located items from ``first`` to before ``last`` into ``out``; ``scaling`` is done as they are read."""

    def __init__(self, located: Located, first: int, last: int, out: Any, scaling: Scaling | None = None) -> None:
        self._located, self._first, self._last, self._out = located, first, last, out
        one, reader = located.field, located.reader
        self._new: Ints = _NO_ROWS
        if not located.whole:
            reader.prove(one, located.rows[first:last])
        else:
            self._new = reader.unproven(one, located.rows[first:last])
        super().__init__(located, out, first, last, hashed=len(self._new) > 0, scaling=scaling)

    def finish(self) -> bool:
        """Return when everything is read and proven."""
        if not super().finish():
            self._read_each()
            self.hashes = None
            if self._kept[2] is not None:
                where = str(self._located.reader.paths.root)
                raise CacheDamagedError("a read failed, and worked when repeated", where=where)
        if len(self._new):
            self._prove()
        return True

    def _read_each(self) -> None:
        """Read one item after the other; one that does not come whole is named."""
        one, memory = self._located.field, self._out.data
        columns = self._located.columns[:4, self._first : self._last].tolist()
        for row, file, place, size, front in zip(self._located.rows[self._first :], *columns, strict=False):
            found, why = -1, "the shard ends early"
            try:
                found = len(read_at(file, place, memory[front : front + size]))
            except OSError as error:
                why = str(error)
            if found != size:
                raise self._located.reader.corrupt(one, int(one.entry[row]), why)

    def _prove(self) -> None:
        """Hold items that were just read against their checksums."""
        one, new, hashes = self._located.field, self._first + self._new, self.hashes
        entries = one.entry[self._located.rows[new]]
        if hashes is None:
            size, begin = self._located.columns[2:4, new]
            pieces, memory = zip(begin.tolist(), (begin + size).tolist(), strict=True), self._out.data
            hashes = np.array([checksum(memory[first:last]) for first, last in pieces], dtype=np.uint64)
        else:
            hashes = hashes[self._new]
        wrong = np.flatnonzero(hashes != one.checksum[entries])
        for at in wrong.tolist():
            self._located.reader.check_hash(one, int(entries[at]), int(hashes[at]))
        one.proven[entries] = True


def _close_all(files: dict[int, File]) -> None:
    while files:
        os.close(files.popitem()[1].descriptor)
