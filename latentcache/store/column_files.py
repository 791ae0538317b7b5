"""Columns of a generation that stay on disk: parts of them are read, by position, when they are asked for.

Guarantee: files are read and never mapped, so one that is cut short meanwhile is an error in words and not a signal;
each was seen to be whole when it was opened, in one pass. A file stays open as long as its column is in use.
Cost: a system call for each slice; positions that lie close together share one.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError
from latentcache.identity.content import checksum_of
from latentcache.store.columns import StringColumn, column_path, npy_form
from latentcache.store.durable import open_file

#: Bytes read at a time of a file that is only hashed, and more than a ``.npy`` header has.
_READ_BYTES, _FRONT_BYTES = 1 << 20, 4096
#: Positions looked up together, and bytes or strings that may lie between two that are read at once.
_TOGETHER, _GAP_BYTES, _GAP_STRINGS = 1 << 12, 1 << 12, 32
#: Rows that are looked at together.
_PART = 1 << 16


class FileColumn(np.lib.mixins.NDArrayOperatorsMixin):
    """One column, of which only parts are ever in memory.

    A position, a slice or an array of positions (or one of bool) gives what an array would give, as a copy. Whatever
    else numpy does with it is right too, but reads it whole.

    Args:
        path: The ``.npy`` file.
        expected: Its xxh3-64, 16 hex digits.

    Raises:
        CacheDamagedError: It cannot be read, is another one, or is no column.
    """

    def __init__(self, path: Path, expected: Any) -> None:
        self._path = path
        try:
            self._file = open_file(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        weakref.finalize(self, os.close, self._file)
        try:
            found = f"{checksum_of(iter(lambda: os.read(self._file, _READ_BYTES), b'')):016x}"
            front = os.pread(self._file, _FRONT_BYTES, 0)
        except OSError as error:
            raise _unreadable(path, error) from error
        if found != expected:
            why = f"checksum: expected {expected}, found {found}"
            raise CacheDamagedError(f"{path.name} is damaged", where=str(path), why=why)
        self.dtype, self.shape, self._start = npy_form(front, path)
        self._width = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        if not self.shape or self._start + len(self) * self._width > os.fstat(self._file).st_size:
            raise CacheDamagedError(f"{path.name} is no column", where=str(path), why=f"it ends before {self.shape}")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._read(start, max(stop - start, 0)) if step == 1 else self[np.arange(start, stop, step)]
        if isinstance(index, int | np.integer):
            position = operator.index(index)
            return self._read(range(len(self))[position], 1)[0]
        positions = np.asarray(index)
        return self._take(np.flatnonzero(positions) if positions.dtype == np.bool_ else positions)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self._read(0, len(self)), dtype=dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        whole = (np.asarray(value) if isinstance(value, FileColumn) else value for value in inputs)
        return getattr(ufunc, method)(*whole, **more)

    def _read(self, first: int, count: int) -> NDArray[Any]:
        """(count, ...) values from one position on."""
        values: NDArray[Any] = np.empty((count, *self.shape[1:]), dtype=self.dtype)
        place, done, size = self._start + first * self._width, 0, values.nbytes
        memory = values.reshape(-1).view(np.uint8).data if size else memoryview(b"")
        while done < size:
            try:
                found = os.preadv(self._file, [memory[done:]], place + done)
            except OSError as error:
                raise _unreadable(self._path, error) from error
            if not found:
                why = "it has become shorter"
                raise CacheDamagedError(f"{self._path.name} is damaged", where=str(self._path), why=why)
            done += found
        return values

    def _take(self, positions: NDArray[Any]) -> NDArray[Any]:
        """(n, ...) values at positions in any order."""
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(self):
            raise IndexError(f"a position is not below {len(self)}")
        out: NDArray[Any] = np.empty((len(positions), *self.shape[1:]), dtype=self.dtype)
        gap = max(_GAP_BYTES // self._width, 1)
        for start in range(0, len(positions), _TOGETHER):
            part = positions[start : start + _TOGETHER]
            order = np.argsort(part, kind="stable")
            for run in np.split(order, np.flatnonzero(np.diff(part[order]) > gap) + 1):
                first, last = int(part[run[0]]), int(part[run[-1]])
                out[start + run] = self._read(first, last - first + 1)[part[run] - first]
        return out


class FileStrings(StringColumn):
    """Many strings that stay on disk.

    Args:
        data: All bytes.
        ends: Where each string ends.
    """

    def __init__(self, data: Any, ends: Any) -> None:
        self._data, self.ends = data, ends

    @property
    def data(self) -> Any:
        """All bytes, on disk."""
        return self._data

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(*index.indices(len(self))))
        position = range(len(self))[index]
        return self.text(position, position + 1)[2].decode("utf-8", "surrogateescape")

    def take(self, positions: Sequence[int] | NDArray[np.integer]) -> list[str]:
        """The strings at these positions (from 0); quick where they lie close together."""
        chosen, found = np.asarray(positions, dtype=np.intp), list[str]()
        for start in range(0, len(chosen), _TOGETHER):
            part = chosen[start : start + _TOGETHER]
            low, high = int(part.min()), int(part.max())
            if high - low >= _GAP_STRINGS * len(part):
                found += [self[position] for position in part.tolist()]
                continue
            first, bounds, text = self.text(low, high + 1)
            at = bounds - first
            spans = zip(at[part - low].tolist(), at[part - low + 1].tolist(), strict=True)
            found += [text[begin:end].decode("utf-8", "surrogateescape") for begin, end in spans]
        return found

    def text(self, low: int, high: int) -> tuple[int, NDArray[np.intp], bytes]:
        """Where the strings from ``low`` up to ``high`` begin, (high - low + 1,) their bounds, and their bytes."""
        ends = self.ends[max(low - 1, 0) : high].astype(np.intp)
        bounds = ends if low else np.concatenate([np.zeros(1, np.intp), ends])
        first = int(bounds[0])
        return first, bounds, self._data[first : int(bounds[-1])].tobytes()


def open_columns(folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The columns that a manifest names, as :func:`~latentcache.store.columns.load_columns` gives them, on disk.

    Raises:
        CacheDamagedError: A column is missing or is not what was written.
    """
    return {name: FileColumn(column_path(folder, name, fact), fact.get("checksum")) for name, fact in facts.items()}


def parts(length: int, size: int = 0) -> Iterator[slice]:
    """Slices of ``size`` at most (65 536 where it is 0) that cover a column of this length."""
    size = size or _PART
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _unreadable(path: Path, error: OSError) -> CacheDamagedError:
    return CacheDamagedError(f"{path.name} cannot be read", where=str(path), why=str(error))
