"""Read items of a snapshot: positional reads into the caller's memory, and proof that bytes are what was written.

With ``checksum="first"`` each entry is proven when this process first reads it: its payload is held against the
checksum in the snapshot's columns, which have checksums themselves. With ``"always"`` each read proves it again.
Nothing is mapped and LMDB is not opened, so a file that is cut short is an error and not a signal; a reader is safe
across ``fork``, ``spawn``, threads and pickling.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, MissingEntryError, StoreError, UsageError
from latentcache.fields.dtypes import numpy_dtype
from latentcache.identity.content import checksum
from latentcache.store.atomic_io import open_file
from latentcache.store.entry import EntryHeader, read_header
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import FieldRows, Snapshot

Ints = NDArray[np.integer]
#: Up to so many reads plain numbers are quicker than arrays: for 16 padded rows 33 us instead of 52.
_FEW = 64
_FRONT, _NO_ROWS = 0, np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where the bytes of n items are."""

    shard: NDArray[np.int32]
    """(n,) position in the snapshot's shards."""
    offset: NDArray[np.int64]
    """(n,) byte in ``data.mdb``."""
    bytes: NDArray[np.int64]
    """(n,)"""


class _Field:
    """What reading a field needs, in memory: 28 bytes an entry, 8 to 12 a row. Rows of few runs stay as they are."""

    def __init__(self, rows: FieldRows, places: Any = None) -> None:
        self.rows, self.packed, self.pending = rows, rows.packing == "block", places is not None
        self.dtype = numpy_dtype(rows.spec.dtype)
        where = rows if places is None else places  # of a pending snapshot; there each row is an entry
        self.shard, self.offset = np.asarray(where.shard), np.asarray(where.offset).astype(np.int64, copy=False)
        self.checksum, self.size, self.head = np.asarray(where.checksum), where.bytes, where.head
        self.entry = np.asarray(rows.entry)
        shapes = [one.shape[1:] if rows.spec.ragged else one.shape for one in rows.groups]
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        self.width = self.dtype.itemsize * np.array(sizes, dtype=np.int64)
        self.group = np.asarray(rows.group).astype(np.uint16) if len({*sizes}) > 1 else None
        self.start = np.asarray(where.start) if self.packed else None
        self.length = np.asarray(where.length) if rows.spec.ragged else None
        self.proven = np.zeros(len(self.offset), dtype=np.bool_)
        self.all_proven = False

    def widths(self, rows: Ints) -> Any:
        """(n,) bytes of one element of the first axis (of a whole item if the field is not ragged)."""
        return self.width[self.group[rows]] if self.group is not None else self.width[0]

    def segments(self, rows: Ints, start: Ints | None = None, length: Ints | None = None) -> Segments:
        """Where items are, or elements of them from ``start`` on."""
        entry, width = self.entry[rows], self.widths(rows)
        first: Any = _FRONT if self.start is None else self.start[rows].astype(np.int64)
        count: Any = 1 if self.length is None else self.length[rows].astype(np.int64)
        if start is not None:
            first, count = first + start, count - start if length is None else length
        size: Any = count * width
        if not isinstance(size, np.ndarray):
            size = np.full(len(entry), size, dtype=np.int64)
        offset = self.offset[entry]
        if first is not _FRONT:
            offset += first * width
        return Segments(shard=self.shard[entry], offset=offset, bytes=size)


class EntryReader:
    """Reads the items of one snapshot. Picklable; opens its files on first use in each process.

    Args:
        paths: The cache.
        snapshot: Whose items they are.
        checksum: ``first`` proves each entry once in a process, ``always`` on each read.

    Raises:
        UsageError: Another value of ``checksum``.
    """

    def __init__(
        self, paths: CachePaths, snapshot: Snapshot, *, checksum: Literal["first", "always"] = "first"
    ) -> None:
        if checksum not in ("first", "always"):
            raise UsageError(f"checksum={checksum!r}: must be 'first' or 'always'", fix="open_cache(path)")
        self.paths, self.snapshot, self.checksum = paths, snapshot, checksum
        self._fields: dict[str, _Field] = {}
        self._files: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._files).atexit = False  # the system does it then

    def dtype(self, field: str) -> np.dtype[Any]:
        """The numpy type that carries the values of a field."""
        return self._field(field).dtype

    def ready(self, field: str, rows: Ints, timeout_s: float | None = None) -> None:
        """Return when items can be read: at once, unless the snapshot is pending.

        Raises:
            MissingEntryError: An item was rejected.
            NotYetEncodedError: It did not come in time, or the build has ended without it.
        """
        if self.snapshot.pending is not None:
            self.snapshot.pending.ready(field, np.asarray(rows), timeout_s)

    def segments(self, field: str, rows: Ints) -> Segments:
        """Where the bytes of items are.

        Args:
            field: Its name.
            rows: (n,) rows of the field.
        """
        return self._field(field).segments(rows)

    def gather(
        self, field: str, rows: Ints, out: Any, at: Ints, *, start: Ints | None = None, length: Ints | None = None
    ) -> None:
        """Read items straight into their places in the caller's memory, and prove them.

        Args:
            field: Its name.
            rows: (n,) rows of the field.
            out: Memory of bytes, C-contiguous; bytes between the items are left as they are.
            at: (n,) byte of ``out`` at which each item begins.
            start: (n,) first element of each item that is wanted, along the ragged axis; by default 0.
            length: (n,) number of elements; by default up to the item's end.

        Raises:
            CorruptEntryError: An entry fails its check.
            MissingEntryError: A shard is gone.
            CacheDamagedError: A shard cannot be read.
        """
        one = self._field(field)
        self.ready(field, rows)
        if one.packed or start is not None:
            self.prove(field, rows)
        where = one.segments(rows, start, length)
        memory = memoryview(out).cast("B")
        self._read(one, rows, where, memory, at)
        if not one.packed and start is None:
            new = self._unproven(one, rows)
            if len(new):
                spans = zip(at[new].tolist(), (at[new] + where.bytes[new]).tolist(), strict=True)
                self.check(field, rows[new], [memory[begin:end] for begin, end in spans])

    def read(self, field: str, row: int) -> NDArray[Any]:
        """One item, as an array of its own. Errors as :meth:`gather`."""
        one = self._field(field)
        rows = np.array([row])
        self.ready(field, rows)
        group = one.rows.groups[int(one.rows.group[row])]
        shape = group.shape if one.length is None else (int(one.length[row]), *group.shape[1:])
        found = np.empty(shape, dtype=one.dtype)
        self.gather(field, rows, found.reshape(-1).view(np.uint8), np.zeros(1, dtype=np.int64))
        return found

    def read_into(self, field: str, row: int, out: NDArray[Any]) -> None:
        """Read one item into an array of its shape and type.

        Raises:
            CorruptEntryError: The item has another size or type, or its entry fails its check.
            MissingEntryError: Its shard is gone.
            CacheDamagedError: Its shard cannot be read.
        """
        one = self._field(field)
        self.ready(field, np.array([row]))
        size = int(one.segments(np.array([row])).bytes[0])
        if out.dtype != one.dtype or out.nbytes != size:
            why = f"expected {out.dtype} {list(out.shape)}, found {size} bytes"
            raise self._corrupt(one, int(one.entry[row]), why)
        self.gather(field, np.array([row]), out.reshape(-1).view(np.uint8), np.zeros(1, dtype=np.int64))

    def header(self, field: str, row: int) -> EntryHeader:
        """The head of the entry that holds an item, held against the snapshot. Errors as :meth:`gather`."""
        one = self._field(field)
        self.ready(field, np.array([row]))
        return self.entry_header(field, int(one.entry[row]))

    def entry_header(self, field: str, entry: int) -> EntryHeader:
        """The head of an entry of a field. Errors as :meth:`gather`."""
        one = self._field(field)
        head, of_block = int(one.head[entry]), one.packed and one.pending
        data = self._pread(one, entry, head, int(one.offset[entry]) - head)
        try:
            header = read_header(data, None if of_block else one.rows.key[entry].tobytes())
        except CorruptEntryError as error:
            raise self._corrupt(one, entry, error.why) from error
        expected = (one.rows.recipe_id, int(one.size[entry]), int(one.checksum[entry]), one.rows.spec.dtype)
        found = (header.recipe_id, header.payload_bytes, header.payload_checksum, header.dtype)
        if expected != found:
            raise self._corrupt(one, entry, f"its head says {found}, the snapshot {expected}")
        return header

    def payload(self, field: str, entry: int) -> bytes:
        """All bytes of an entry, after they were checked. Errors as :meth:`gather`."""
        one = self._field(field)
        data = self._pread(one, entry, int(one.size[entry]), int(one.offset[entry]))
        self._hold(one, entry, data)
        return data

    def check_entry(self, field: str, entry: int) -> EntryHeader:
        """Read an entry whole and hold head and payload against the snapshot. Errors as :meth:`gather`."""
        header = self.entry_header(field, entry)
        self.payload(field, entry)
        return header

    def check(self, field: str, rows: Ints, buffers: Sequence[Any]) -> None:
        """Prove items that were read whole already; each is the payload of its entry.

        Args:
            field: One whose items are entries of their own.
            rows: (n,) its rows.
            buffers: (n,) their bytes.

        Raises:
            CorruptEntryError: One fails its check.
        """
        one = self._field(field)
        new = self._unproven(one, rows)
        entries = one.entry[rows[new]]
        checks = zip(new.tolist(), entries.tolist(), one.checksum[entries].tolist(), strict=True)
        for position, entry, expected in checks:
            if checksum(buffers[position]) != expected:
                raise self._corrupt(one, entry, f"payload checksum: expected {expected:016x}")
        self._remember(one, entries)

    def prove(self, field: str, rows: Ints) -> None:
        """Read and prove the entries of items that this process has not proven yet. Errors as :meth:`gather`."""
        one = self._field(field)
        new = self._unproven(one, rows)
        if not len(new):
            return
        entries = np.unique(one.entry[rows[new]])
        for entry in entries.tolist():
            if one.pending and one.proven[entry] and self.checksum == "first":
                continue
            self.payload(field, entry)
            if one.pending:
                one.proven[(one.offset == one.offset[entry]) & (one.shard == one.shard[entry])] = True
        self._remember(one, entries)

    def descriptor(self, shard: int) -> int:
        """Descriptor of a shard, opened on first use; one inherited by a fork stays valid for positional reads.

        There is no lock, because a fork could inherit it held; two threads that open a shard at once keep one.

        Raises:
            MissingEntryError: The shard is gone.
            CacheDamagedError: It cannot be opened.
        """
        if shard not in self._files:
            path = self._path(shard)
            try:
                opened = open_file(path)
            except FileNotFoundError:
                raise MissingEntryError("a shard of this cache is gone", where=path) from None
            except OSError as error:
                raise CacheDamagedError("a shard cannot be read", where=path, why=str(error)) from error
            if self._files.setdefault(shard, opened) != opened:
                os.close(opened)
        return self._files[shard]

    def close(self) -> None:
        """Close the files. The reader opens them again when it is asked for more."""
        _close_all(self._files)

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "snapshot": self.snapshot, "checksum": self.checksum}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _field(self, name: str) -> _Field:
        found = self._fields.get(name)
        if found is None:
            if name not in self.snapshot.fields:
                known = ", ".join(sorted(self.snapshot.fields))
                raise UsageError(f"field={name!r}: this cache has {known}", fix=f"one of {known}")
            pending = self.snapshot.pending
            places = None if pending is None else pending.places[name]
            found = self._fields.setdefault(name, _Field(self.snapshot.fields[name], places))
        return found

    def _unproven(self, one: _Field, rows: Ints) -> Ints:
        """Positions in ``rows`` of items whose entries have to be proven."""
        if self.checksum == "always":
            return np.arange(len(rows))
        return _NO_ROWS if one.all_proven else np.flatnonzero(~one.proven[one.entry[rows]])

    def _remember(self, one: _Field, entries: Ints) -> None:
        one.proven[entries] = True
        if len(entries):
            one.all_proven = bool(one.proven.all()) if one.proven[-1] and one.proven[0] else False

    def _read(self, one: _Field, rows: Ints, where: Segments, memory: memoryview, at: Ints) -> None:
        files, read, front, why = self._files, os.preadv, 0, "the shard ends early"
        try:
            for shard, place, size, front in (_few if len(rows) <= _FEW else _many)(where, at):
                file = files.get(shard)
                if file is None:
                    file = self.descriptor(shard)
                if read(file, (memory[front : front + size],), place) != size:
                    break
            else:
                return
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            why = str(error)
        piece = int(np.flatnonzero(at == front)[0])
        raise self._corrupt(one, int(one.entry[rows[piece]]), why)

    def _pread(self, one: _Field, entry: int, size: int, place: int) -> bytes:
        shard = self.descriptor(int(one.shard[entry]))
        try:
            if place < 0 or place + size > os.fstat(shard).st_size:
                raise self._corrupt(one, entry, "the shard ends early")
            data = os.pread(shard, size, place)
        except OSError as error:
            raise self._corrupt(one, entry, str(error)) from error
        if len(data) != size:
            raise self._corrupt(one, entry, f"the shard ends early: expected {size} bytes, found {len(data)}")
        return data

    def _hold(self, one: _Field, entry: int, data: bytes) -> None:
        expected = int(one.checksum[entry])
        if checksum(data) != expected:
            raise self._corrupt(one, entry, f"payload checksum: expected {expected:016x}")

    def _path(self, shard: int) -> str:
        names = self.snapshot.shards if self.snapshot.pending is None else self.snapshot.pending.shards
        return str(self.paths.data(names[shard]))

    def _corrupt(self, one: _Field, entry: int, why: str) -> CorruptEntryError:
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


def _few(where: Segments, at: Ints) -> Iterator[tuple[int, int, int, int]]:
    """A read for each item: shard, place in it, number of bytes, place in memory."""
    columns = (column.tolist() for column in (where.shard, where.offset, where.bytes, at))
    return zip(*columns, strict=True)


def _many(where: Segments, at: Ints) -> Iterator[tuple[int, int, int, int]]:
    """The same; items that are neighbours in memory and in the file are read at once."""
    shard, place, size = where.shard, where.offset, where.bytes
    follow = (at[1:] == at[:-1] + size[:-1]) & (place[1:] == place[:-1] + size[:-1]) & (shard[1:] == shard[:-1])
    first = np.flatnonzero(np.append(True, ~follow))
    columns = (shard[first], place[first], np.add.reduceat(size, first), at[first])
    return zip(*(column.tolist() for column in columns), strict=True)


def _close_all(files: dict[int, int]) -> None:
    while files:
        os.close(files.popitem()[1])
