"""Columns of numbers and strings in one safetensors file, read by position. Normative text: docs/format/columns.md.

A column is a tensor. If all its rows are equal it is stored as one row, and equal columns are stored once. The
checksum of a column is checked when it is first read whole. Nothing is mapped: a file that is cut short is an error,
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
_ROOM = 300
#: A span of rows is read whole for more than one row in ``_DENSE``.
_DENSE = 16
_CHUNK = 1 << 17


class _Form(NamedTuple):
    """Stored form of one column."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stored_rows: int
    """1 if all rows are equal, else all rows."""
    start: int
    """Byte of the file at which its values begin."""
    num_bytes: int
    checksum: int


class Column(np.lib.mixins.NDArrayOperatorsMixin):
    """One column on disk. A position, a slice or an array of positions or bools gives the values as an array.

    Everything else that numpy does with it is right too, but reads the column whole.
    """

    __slots__ = ("__weakref__", "_checked", "_file", "_name", "dtype", "form", "shape")

    def __init__(self, file: ColumnFile, name: str, form: _Form) -> None:
        self._file, self._name, self.form = file, name, form
        self.dtype, self.shape = form.dtype, form.shape
        self._checked = False

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

    def check(self) -> None:
        """Read the column whole and hold it against its checksum."""
        if not self._checked:
            start = self.form.start
            stop = self.form.start + self.form.num_bytes
            parts = (self._file.read(at, _BYTE, (min(_CHUNK, stop - at),)).data for at in range(start, stop, _CHUNK))
            self._compare(checksum_of(parts))

    def pieces(self, first: NDArray[np.int64], size: NDArray[np.int64]) -> bytes:
        """The bytes of ranges of rows, one after the other; of a column of bytes."""
        if self.form.stored_rows < len(self):
            return self._slice(0, int(size.sum())).tobytes()
        return self._file.read_pieces(self.form.start + first, size)

    def _compare(self, computed: int) -> None:
        if computed != self.form.checksum:
            raise self._file.damaged(
                f"checksum of {self._name}: expected {self.form.checksum:016x}, found {computed:016x}"
            )
        self._checked = True

    def _slice(self, first: int, count: int) -> NDArray[Any]:
        form = self.form
        width = self.dtype.itemsize * math.prod(self.shape[1:])
        if form.stored_rows < len(self):  # most columns of one data set: no memory
            return np.broadcast_to(self._read(form.start, 1), (count, *self.shape[1:]))
        return self._read(form.start + first * width, count)

    def _read(self, start: int, count: int) -> NDArray[Any]:
        """Read stored rows from a byte of the file on."""
        values = self._file.read(start, self.dtype, (count, *self.shape[1:]))
        if count == self.form.stored_rows and count and not self._checked:
            self._compare(checksum(_bytes(values)))
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
        if self.form.stored_rows < len(self):
            return self._slice(0, len(positions))
        if span == len(positions) and bool((positions[1:] - positions[:-1] == 1).all()):
            return self._slice(low, span)
        wide: NDArray[np.int64] = positions.astype(np.int64, copy=False)
        if len(wide) * _DENSE >= span:
            near: NDArray[Any] = self._slice(low, span)[wide - low]
            return near
        width = self.dtype.itemsize * math.prod(self.shape[1:])
        raw = self._file.read_pieces(self.form.start + wide * width, np.full(len(wide), width))
        return np.frombuffer(raw, self.dtype).reshape(-1, *self.shape[1:])


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
            self._forms = {name: _form(forms[twin], header[twin], 8 + length) for name, twin in stored_as.items()}
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
            tensor, forms[name] = _encoded(np.asarray(values))
            twin = names.setdefault(json.dumps(forms[name]), name)
            if twin != name and len(values):
                forms[name] = {"alias": twin}
                continue
            header[name] = {
                "dtype": _NAMES[tensor.dtype.str[1:]],
                "shape": tensor.shape,
                "data_offsets": [end, end + tensor.nbytes],
            }
            file.write(_bytes(tensor))
            end += tensor.nbytes
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


def _encoded(values: NDArray[Any]) -> tuple[NDArray[Any], dict[str, Any]]:
    """The tensor of a column, and how to read it."""
    tensor = values.astype(values.dtype.newbyteorder("<"), copy=False)
    is_whole = values.dtype.kind in "ui"  # 0.0 equals -0.0
    if is_whole and len(values) > 1 and (values[1] == values[0]).all() and (values[1:] == values[:1]).all():
        tensor = tensor[:1]
    tensor = np.ascontiguousarray(tensor)
    form = {"dtype": tensor.dtype.str[1:], "shape": list(values.shape)}
    form["checksum"] = f"{checksum(_bytes(tensor)):016x}"
    return tensor, form


def _form(described: Mapping[str, Any], tensor: Mapping[str, Any], data: int) -> _Form:
    """Read the stored form of a column from both halves of the header; reject numbers that contradict each other."""
    dtype = _TYPES[tensor["dtype"]]
    shape = tuple(map(int, described["shape"]))
    rows = int(tensor["shape"][0])
    start, stop = map(int, tensor["data_offsets"])
    num_bytes = dtype.itemsize * rows * math.prod(shape[1:])
    if min(shape) < 0 or rows not in (1, shape[0]) or tensor["shape"] != [rows, *shape[1:]]:
        raise ValueError(f"shape {tensor['shape']}, expected {list(shape)}")
    if start < 0 or stop != start + num_bytes:
        raise ValueError(f"at {tensor['data_offsets']}, expected {num_bytes} bytes")
    return _Form(dtype, shape, rows, data + start, num_bytes, int(described["checksum"], 16))


def _bytes(values: NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data if values.size else memoryview(b"")
