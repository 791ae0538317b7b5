"""Columns of strings: all bytes in one array, and where each string ends."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Strings that are looked up or made together, and strings between two of them that are read with them.
_NEAR, _GAP_STRINGS = 1 << 12, 32
#: Strings that are counted or compared together.
_SLICE = 1 << 18


class Strings(Sequence[str]):
    """Many strings: all bytes, and (n,) where each ends. Names that are not UTF-8 come back to the byte.

    Both are arrays or columns on disk, which are read by position and slice.
    """

    def __init__(self, data: Any, ends: Any) -> None:
        if isinstance(data, np.ndarray):  # a slice of bytes costs half as much as one of an array
            width = np.int32 if len(data) <= np.iinfo(np.int32).max else np.int64
            data = data.tobytes()
            ends = np.asarray(ends, dtype=width)
        self._data, self._ends = data, ends

    @property
    def data(self) -> Any:
        """All bytes, as an array or a column on disk."""
        return np.frombuffer(self._data, dtype=np.uint8) if isinstance(self._data, bytes) else self._data

    @property
    def ends(self) -> Any:
        """(n,) int64 where each string ends in :attr:`data`, as an array or a column on disk."""
        return self._ends.astype(np.int64, copy=False) if isinstance(self._ends, np.ndarray) else self._ends

    def __reduce__(self) -> Any:
        return Strings, (self._data, self._ends)  # columns on disk come back as themselves or as arrays

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        """Make a column from strings; surrogate escapes become the bytes they stand for."""
        data = bytearray()
        lengths = array("q")
        remaining = iter(strings)
        while part := list(islice(remaining, _NEAR)):  # no string is kept
            text = "".join(part)
            lengths.extend(
                map(len, part if text.isascii() else [string.encode("utf-8", "surrogateescape") for string in part])
            )
            data += text.encode("utf-8", "surrogateescape")
        return Strings(np.frombuffer(data, dtype=np.uint8), np.cumsum(np.frombuffer(lengths, dtype=np.int64)))

    def __len__(self) -> int:
        return len(self._ends)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Strings):
            return NotImplemented
        starts = range(0, len(self), _SLICE)
        return len(self) == len(other) and all(self.matches(at, other, at, _SLICE) for at in starts)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} strings)"

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(*index.indices(len(self))))
        position = range(len(self))[index]
        begin, end = self._bounds(position, position + 1).tolist()
        return self._bytes(begin, end).decode("utf-8", "surrogateescape")

    def take(self, positions: Sequence[int] | NDArray[np.integer]) -> list[str]:
        """The strings at these positions (from 0), several times faster than one by one."""
        chosen = np.asarray(positions, dtype=np.int64)
        strings = list[str]()
        if isinstance(self._ends, np.ndarray):
            return _cut(self._data, self._ends[chosen - 1] * (chosen > 0), self._ends[chosen])
        for start in range(0, len(chosen), _NEAR):
            part = chosen[start : start + _NEAR]
            low, high = int(part.min()), int(part.max())
            if high - low < _GAP_STRINGS * len(part):
                bounds = self._bounds(low, high + 1)
                text = self._bytes(int(bounds[0]), int(bounds[-1]))
                at = bounds - bounds[0]
                strings += _cut(text, at[part - low], at[part - low + 1])
                continue
            bounds = self._ends[np.concatenate([(part - 1).clip(min=0), part])].astype(np.int64)
            first = bounds[: len(part)] * (part > 0)
            size = bounds[len(part) :] - first
            ends = np.cumsum(size)
            strings += _cut(self._data.pieces(first, size), ends - size, ends)
        return strings

    def select(self, positions: NDArray[np.integer]) -> Strings:
        """A column of the strings at these positions."""
        blocks = (self.take(positions[start : start + _NEAR]) for start in range(0, len(positions), _NEAR))
        return Strings.of(chain.from_iterable(blocks))

    def empty(self) -> tuple[int, int]:
        """Count empty strings, and find the position of the first of them; -1: there is none."""
        count = 0
        first = -1
        for start in range(0, len(self), _SLICE):
            empties = np.flatnonzero(np.diff(self._bounds(start, min(start + _SLICE, len(self)))) == 0)
            first = start + int(empties[0]) if first < 0 and len(empties) else first
            count += len(empties)
        return count, first

    def matches(self, first: int, other: Strings, start: int, count: int) -> bool:
        """True if up to ``count`` strings from ``first`` are those of ``other`` from ``start``; none is made."""
        mine, theirs = self._bounds(first, first + count), other._bounds(start, start + count)
        if not np.array_equal(mine - mine[0], theirs - theirs[0]):
            return False
        return self._bytes(int(mine[0]), int(mine[-1])) == other._bytes(int(theirs[0]), int(theirs[-1]))

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _NEAR):
            yield from self.take(np.arange(start, min(start + _NEAR, len(self))))

    def _bounds(self, low: int, high: int) -> NDArray[np.int64]:
        """(high - low + 1,) where the strings from ``low`` up to ``high`` begin and end."""
        ends: NDArray[np.int64] = self._ends[max(low - 1, 0) : high].astype(np.int64)
        return ends if low else np.concatenate([np.zeros(1, np.int64), ends])

    def _bytes(self, begin: int, end: int) -> bytes:
        return bytes(self._data[begin:end])


def _cut(data: bytes, begins: NDArray[np.integer], ends: NDArray[np.integer]) -> list[str]:
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    return [data[begin:end].decode("utf-8", "surrogateescape") for begin, end in spans]
