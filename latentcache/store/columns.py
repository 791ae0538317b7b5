"""Columns of numbers and strings in one safetensors file, read by position. Normative text: docs/format/columns.md.

A column is stored in the fewest bytes that numpy decodes at once: in a narrower type, as runs, or as the name of an
equal column. A run is of one value, or of values that rise by one. The checksum of a column is checked when it is
first read whole. Files are read with positional reads and never mapped, so a file that is cut short is an error and
not a signal.
"""

from __future__ import annotations

import json
import math
import operator
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError
from latentcache.fields.strings import Strings
from latentcache.identity.content import checksum, checksum_of
from latentcache.store.atomic_io import open_file, replacing, unreadable
from latentcache.store.gather import read_at

#: numpy type -> name in a safetensors header.
_NAMES = {
    "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "u4": "U32", "i4": "I32", "u8": "U64", "i8": "I64",
    "f2": "F16", "f4": "F32", "f8": "F64",
}  # fmt: skip
_TYPES = {name: np.dtype(f"<{text}") for text, name in _NAMES.items()}
_BYTE = np.dtype("u1")
#: The last tensor of a file: xxh3-64 of its header.
_SIGNATURE = "header_checksum"
_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100 << 20
#: Bytes of a header per column, at most, beside its name; spaces fill what is left.
_ROOM = 400
#: A column is read whole for more than one in so many of its rows.
_DENSE = 16
_CHUNK = 1 << 17


class _Form(NamedTuple):
    """Stored form of one column."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stored: np.dtype[Any]
    start: int
    """Byte of the file at which its values begin, or the positions of its runs before them."""
    num_bytes: int
    checksum: int
    base: int
    """Added to every stored value."""
    runs: int
    """Number of runs; -1: one stored value per row."""
    step: int
    """Rise from value to value in a run: 0 or 1."""
    first: np.dtype[Any]
    """Type of the positions at which runs begin."""


class Column(np.lib.mixins.NDArrayOperatorsMixin):
    """One column on disk. A position, a slice or an array of positions or bools gives the values as an array.

    Everything else that numpy does with it is right too, but reads the column whole.
    """

    __slots__ = ("__weakref__", "_checked", "_file", "_name", "_runs", "dtype", "form", "shape")

    def __init__(self, file: ColumnFile, name: str, form: _Form) -> None:
        self._file, self._name, self.form = file, name, form
        self.dtype, self.shape = form.dtype, form.shape
        self._checked = False
        self._runs: tuple[NDArray[np.int64], NDArray[Any]] | None = None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        whole = (np.asarray(value) if isinstance(value, Column) else value for value in inputs)
        return getattr(ufunc, method)(*whole, **more)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _CHUNK):
            yield from self[start : start + _CHUNK]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._slice(start, max(stop - start, 0)) if step == 1 else self[np.arange(start, stop, step)]
        if isinstance(index, int | np.integer):
            return self._slice(range(len(self))[operator.index(index)], 1)[0]
        positions = np.asarray(index)
        if positions.dtype == np.bool_:
            positions = np.flatnonzero(positions)
        return self._take(positions if positions.dtype == np.int32 else positions.astype(np.int64, copy=False))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._slice(0, len(self)), dtype=dtype, copy=copy)

    def __reduce__(self) -> Any:
        return operator.getitem, (self._file, self._name)

    def __repr__(self) -> str:
        return f"Column({self._name!r}, {self.dtype}, {self.shape})"

    def check(self) -> None:
        """Read the column whole and hold it against its checksum."""
        if not self._checked:
            start, stop = self.form.start, self.form.start + self.form.num_bytes
            parts = (self._file.read(at, _BYTE, (min(_CHUNK, stop - at),)).data for at in range(start, stop, _CHUNK))
            self._compare(checksum_of(parts))

    def pieces(self, first: NDArray[np.int64], size: NDArray[np.int64]) -> bytes:
        """The bytes of ranges of rows, one after the other; of a column of bytes."""
        if self.form.runs >= 0:
            return b"".join(self._slice(*span).tobytes() for span in zip(first.tolist(), size.tolist(), strict=True))
        return self._file.read_pieces(self.form.start + first, size)

    def _compare(self, checksum: int) -> None:
        if checksum != self.form.checksum:
            raise self._file.damaged(
                f"checksum of {self._name}: expected {self.form.checksum:016x}, found {checksum:016x}"
            )
        self._checked = True

    def _slice(self, first: int, count: int) -> NDArray[Any]:
        form = self.form
        if form.runs >= 0:
            return self._from_runs(first, count)
        width = form.stored.itemsize * math.prod(form.shape[1:])
        raw = self._file.read(form.start + first * width, form.stored, (count, *form.shape[1:]))
        if count == len(self) and count and not self._checked:
            self._compare(checksum(_bytes(raw)))
        return self._widened(raw)

    def _widened(self, raw: NDArray[Any]) -> NDArray[Any]:
        if raw.dtype == self.dtype and not self.form.base:
            return raw
        values = raw.astype(self.dtype)
        if self.form.base:
            values += np.array(self.form.base).astype(self.dtype)
        return values

    def _take(self, positions: NDArray[np.int32 | np.int64]) -> NDArray[Any]:
        """(n, ...) values at positions in any order."""
        if not len(positions):
            return self._slice(0, 0)
        if (low := int(positions.min())) < 0:
            positions = np.where(positions < 0, positions.astype(np.int64) + len(self), positions)
            low = int(positions.min())
        span = int(positions.max()) - low + 1
        if low < 0 or low + span > len(self):
            raise IndexError(f"a position is not below {len(self)}")
        if span == len(positions) and bool((positions[1:] - positions[:-1] == 1).all()):
            return self._slice(low, span)
        wide: NDArray[np.int64] = positions.astype(np.int64, copy=False)
        if self.form.runs >= 0:
            firsts, values = self._run_table()
            run = np.searchsorted(firsts, wide, "right") - 1
            taken: NDArray[Any] = values[run]
            return taken + (wide - firsts[run]).astype(self.dtype) if self.form.step else taken
        if len(wide) * _DENSE >= span:
            near: NDArray[Any] = self._slice(low, span)[wide - low]
            return near
        width = self.form.stored.itemsize * math.prod(self.shape[1:])
        raw = self._file.read_pieces(self.form.start + wide * width, np.full(len(wide), width))
        return self._widened(np.frombuffer(raw, self.form.stored).reshape(-1, *self.shape[1:]))

    def _run_table(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the first row of each run, followed by the number of rows; and each run's first value."""
        if self._runs is None:
            form = self.form
            raw = self._file.read(form.start, _BYTE, (form.num_bytes,))
            self._compare(checksum(raw.data))
            split = form.runs * form.first.itemsize
            firsts = np.append(raw[:split].view(form.first).astype(np.int64), len(self))
            values = self._widened(raw[split:].view(form.stored).reshape(form.runs, *form.shape[1:]))
            if form.runs and (firsts[0] != 0 or (np.diff(firsts) <= 0).any()):
                raise self._file.damaged(f"runs of {self._name}")
            self._runs = firsts, values
        return self._runs

    def _from_runs(self, first: int, count: int) -> NDArray[Any]:
        firsts, values = self._run_table()
        low = int(np.searchsorted(firsts, first, "right")) - 1
        high = int(np.searchsorted(firsts, first + count, "left")) if count else low
        if high - low == 1 and not self.form.step:  # most columns of one data set: no memory
            return np.broadcast_to(values[low], (count, *self.shape[1:]))
        bounds = np.clip(firsts[low : high + 1], first, first + count)
        counts = bounds[1:] - bounds[:-1]
        if not self.form.step:
            repeated: NDArray[Any] = np.repeat(values[low:high], counts, axis=0)
            return repeated
        rising = np.arange(first, first + count).astype(self.dtype)
        rising += np.repeat(values[low:high] - firsts[low:high].astype(self.dtype), counts)
        return rising


class ColumnFile:
    """A file of columns. Its header is checked when it is opened. Picklable; the file stays open while it is in use.

    ``expected``: xxh3-64 of its header, if the caller knows it. Raises CacheDamagedError if it is not what
    was written.
    """

    def __init__(self, path: Path, expected: int | None = None) -> None:
        self.path, self._expected = path, expected
        try:
            self._descriptor = open_file(path)
        except OSError as error:
            raise unreadable(path, error) from error
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self.num_bytes = os.fstat(self._descriptor).st_size
        (length,) = _LENGTH.unpack(self.read(0, _BYTE, (8,)).tobytes())
        if length > min(_MOST_HEADER_BYTES, self.num_bytes):
            raise self.damaged(f"a header of {length} bytes")
        text = self.read(8, _BYTE, (length,)).tobytes()
        stored = _LENGTH.unpack(self.read(self.num_bytes - 8, _BYTE, (8,)).tobytes())[0]
        if checksum(text) != stored or expected not in (None, stored):
            raise self.damaged("header checksum")
        try:
            header = json.loads(text)
            self.metadata: dict[str, str] = header.pop("__metadata__")
            forms = dict(json.loads(self.metadata.pop("columns")))
            stored_as = {name: form.get("alias", name) for name, form in forms.items()}
            self._described = {name: forms[twin] for name, twin in stored_as.items()}
            self._forms = {name: _form(forms[twin], header, twin, 8 + length) for name, twin in stored_as.items()}
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self.damaged(f"{type(error).__name__}: {error}") from error
        self._opened: weakref.WeakValueDictionary[str, Column] = weakref.WeakValueDictionary()

    def __contains__(self, name: str) -> bool:
        return name in self._forms

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __getitem__(self, name: str) -> Column:
        """A column; one object while it is in use, so that it is checked once."""
        column = self._opened.get(name)
        if column is None:
            if name not in self._forms:
                raise self.damaged(f"column {name} is missing")
            form = self._forms[name]
            if form.start + form.num_bytes > self.num_bytes - 8:
                raise self.damaged("a column leaves the file")
            self._opened[name] = column = Column(self, name, form)
        return column

    def check(self) -> None:
        """Read every column and hold it against its checksum."""
        for name in self:
            self[name].check()

    def holds(self, columns: Mapping[str, Any]) -> bool:
        """True if these columns, as :func:`write_columns` takes them, would be described by an equal header.

        Columns of this file are not read for that.
        """
        flat = dict(_flat(columns))
        return flat.keys() == self._forms.keys() and all(
            values is self[name] or _encoded(np.asarray(values))[1] == self._described[name]
            for name, values in flat.items()
        )

    def get(self, name: str) -> Column | None:
        """A column, or None if the file lacks it."""
        return self[name] if name in self._forms else None

    def strings(self, name: str) -> Strings:
        """A column of strings. Errors as for a column."""
        return Strings(self[f"{name}.bytes"], self[f"{name}.ends"])

    def __reduce__(self) -> Any:
        return ColumnFile, (self.path, self._expected)

    def read(self, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """An array from a byte of the file on."""
        values: NDArray[Any] = np.empty(shape, dtype=dtype)
        try:
            data = read_at(self._descriptor, start, _bytes(values))
        except (OSError, OverflowError) as error:
            raise unreadable(self.path, error) from error
        if len(data) < values.nbytes:
            raise self.damaged("the file ends early")
        return values

    def read_pieces(self, start: NDArray[np.int64], size: NDArray[np.int64]) -> bytes:
        """The bytes of n pieces of the file, one after the other. Errors as :meth:`read`."""
        spans = zip(start.tolist(), size.tolist(), strict=True)
        try:
            data = b"".join(os.pread(self._descriptor, count, first) for first, count in spans)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if len(data) < int(size.sum()):
            raise self.damaged("the file ends early")
        return data

    def damaged(self, why: str) -> CacheDamagedError:
        """The error that says what is wrong with the file."""
        return CacheDamagedError(f"{self.path.name} is damaged", where=str(self.path), why=why)


def write_columns(path: Path, columns: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> int:
    """Write columns atomically and durably: arrays or columns of any integer or float type, or ``Strings``.

    They are read one after the other, and none is kept. ``metadata``: more names of the file's ``__metadata__``.
    Returns the xxh3-64 of its header, which describes every column. Errors as ``write_atomically``.
    """
    forms: dict[str, Any] = {}
    header: dict[str, Any] = {}
    names: dict[str, str] = {}
    about = {**(metadata or {}), "columns": ""}
    room = len(json.dumps(about)) + sum(_ROOM * (1 + isinstance(values, Strings)) for values in columns.values())
    room += 8 * sum(len(json.dumps(name)) for name in columns)
    room += -room % 8
    with replacing(path) as file:
        file.seek(_LENGTH.size + room)  # the header is known behind the columns
        end = 0
        for name, values in _flat(columns):
            tensors, forms[name] = _encoded(np.asarray(values))
            twin = names.setdefault(json.dumps(forms[name]), name)
            if twin != name and len(values):
                forms[name] = {"alias": twin}
                continue
            for suffix, part in tensors.items():
                where = [end, end + part.nbytes]
                header[name + suffix] = {
                    "dtype": _NAMES[part.dtype.str[1:]],
                    "shape": part.shape,
                    "data_offsets": where,
                }
                file.write(_bytes(part))
                end += part.nbytes
        header[_SIGNATURE] = {"dtype": "U64", "shape": [1], "data_offsets": [end, end + 8]}
        header["__metadata__"] = about | {"columns": json.dumps(forms, separators=(",", ":"))}
        text = json.dumps(header, separators=(",", ":")).encode("ascii").ljust(room)
        signature = checksum(text)
        file.write(_LENGTH.pack(signature))
        file.seek(0)
        file.write(_LENGTH.pack(room) + text)
    return signature


def _flat(columns: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, values in columns.items():
        if isinstance(values, Strings):
            yield f"{name}.bytes", values.data
            yield f"{name}.ends", values.ends
        else:
            yield name, values


def _encoded(values: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The tensors of a column by the suffix of their names, and how to read them."""
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    form: dict[str, Any] = {"dtype": values.dtype.str[1:], "shape": list(values.shape)}
    if runs := _runs(values):
        firsts, step = runs
        stored, base = _narrowed(values[firsts])
        narrow, _ = _narrowed(firsts.astype(np.uint64), based=False)
        tensors, form = {".first": narrow, ".value": stored}, form | {"base": base, "step": step}
    else:
        stored, base = _narrowed(values)
        tensors, form = {"": stored}, form | ({"base": base} if base else {})
    tensors = {suffix: np.ascontiguousarray(part) for suffix, part in tensors.items()}
    return tensors, form | {"checksum": f"{checksum_of(map(_bytes, tensors.values())):016x}"}


def _runs(values: NDArray[Any]) -> tuple[NDArray[np.intp], int] | None:
    """Return the starts of runs and their step, if runs take less than half the bytes of plain values."""
    if len(values) < 2 or values.dtype.kind not in "ui":
        return None
    if values.ndim > 1:
        same = bool((values[1] == values[0]).all()) and bool((values[1:] == values[:1]).all())
        return (np.zeros(1, dtype=np.intp), 0) if same else None
    both = ((_breaks(values, step), step) for step in (0, 1))
    few = ((starts, step) for starts, step in both if starts is not None)
    return min(few, key=lambda runs: len(runs[0]), default=None)


def _breaks(values: NDArray[Any], step: int) -> NDArray[np.intp] | None:
    """Return the starts of runs whose values rise by ``step``; None as soon as there are too many of them."""
    starts, most = [np.zeros(1, dtype=np.intp)], len(values) * values.itemsize // 16
    for start in range(0, len(values) - 1, _CHUNK):
        some = values[start : start + _CHUNK + 1]
        starts.append(np.flatnonzero(some[1:] - some[:-1] != step) + (start + 1))
        if sum(map(len, starts)) > most:
            return None
    return np.concatenate(starts)


def _narrowed(values: NDArray[Any], *, based: bool = True) -> tuple[NDArray[Any], int]:
    """Values in the narrowest unsigned type, and what to add to them."""
    if values.dtype.kind not in "ui" or values.itemsize == 1 or not values.size:
        return values, 0
    low, high = int(values.min()), int(values.max())
    plain, moved = (np.min_scalar_type(number) for number in (high, high - low))
    base = low if low < 0 or (based and moved.itemsize < plain.itemsize) else 0
    narrow = (moved if base else plain).newbyteorder("<")
    if narrow.itemsize >= values.itemsize:
        return values, 0
    stored = np.empty(values.shape, dtype=narrow)
    np.subtract(values, np.array(base).astype(values.dtype), out=stored, casting="unsafe")
    return stored, base


def _form(described: Mapping[str, Any], header: Mapping[str, Any], name: str, data: int) -> _Form:
    """Read the stored form of a column from both halves of the header; reject numbers that contradict each other."""
    shape, in_runs = tuple(map(int, described["shape"])), f"{name}.value" in header
    values = header[f"{name}.value" if in_runs else name]
    front = header[f"{name}.first"] if in_runs else {"dtype": "U8", "data_offsets": values["data_offsets"]}
    rows = int(values["shape"][0]) if in_runs else shape[0]
    stored, first = _TYPES[values["dtype"]], _TYPES[front["dtype"]]
    start, stop = int(front["data_offsets"][0]), int(values["data_offsets"][1])
    form = _Form(
        dtype=np.dtype(f"<{described['dtype']}"),
        shape=shape,
        stored=stored,
        start=data + start,
        num_bytes=rows * (stored.itemsize * math.prod(shape[1:]) + first.itemsize * in_runs),
        checksum=int(described["checksum"], 16),
        base=int(described.get("base", 0)),
        runs=rows if in_runs else -1,
        step=int(described.get("step", 0)),
        first=first,
    )
    expected = [rows, *shape[1:]]
    if values["shape"] != expected or not shape or min(shape) < 0 or form.step not in (0, 1):
        raise ValueError(f"{name}: shape {values['shape']}, expected {expected}")
    if start < 0 or stop != start + form.num_bytes:
        raise ValueError(f"{name}: at {values['data_offsets']}")
    return form


def _bytes(values: NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data if values.size else memoryview(b"")
