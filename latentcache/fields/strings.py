"""Columns of strings: all bytes in one array, and where each string ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Strings that become Python objects at a time when a column is iterated.
_SLICE = 1 << 14
#: Positions looked up together in a column on disk, and strings between two of them that are read with them.
_NEAR, _GAP_STRINGS = 1 << 12, 32
#: Strings whose ends are looked at together.
_EMPTY_SLICE = 1 << 18


class Strings(Sequence[str]):
    """Many strings in two arrays. Names that are not UTF-8 come back to the byte (``os.fsencode``).

    Args:
        data: All bytes.
        ends: (n,) where each string ends in ``data``.
    """

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.integer]) -> None:
        text, width = data.tobytes(), np.int32 if len(data) <= np.iinfo(np.int32).max else np.int64
        self._bounds: NDArray[np.integer] = np.concatenate([np.zeros(1, width), ends], dtype=width, casting="unsafe")
        # A slice of bytes costs half as much as one of an array, and ASCII needs no decoding.
        self._text = text.decode("ascii") if text.isascii() else text

    @property
    def data(self) -> NDArray[np.uint8]:
        """All bytes, read-only."""
        return np.frombuffer(self._text.encode() if isinstance(self._text, str) else self._text, dtype=np.uint8)

    @property
    def ends(self) -> NDArray[np.int64]:
        """(n,) where each string ends in :attr:`data`."""
        return self._bounds[1:].astype(np.int64, copy=False)

    def __reduce__(self) -> tuple[type[Strings], tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        return Strings, (self.data, self.ends)

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        """From strings; surrogate escapes become the bytes they stand for."""
        encoded = [text.encode("utf-8", "surrogateescape") for text in strings]
        ends = np.cumsum([len(part) for part in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Strings):
            return NotImplemented
        return self._text == other._text and np.array_equal(self._bounds, other._bounds)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Strings({len(self)} strings)"

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(*index.indices(len(self))))
        position = range(len(self))[index]
        text = self._text[int(self._bounds[position]) : int(self._bounds[position + 1])]
        return text if isinstance(text, str) else text.decode("utf-8", "surrogateescape")

    def take(self, positions: Sequence[int] | NDArray[np.integer]) -> list[str]:
        """The strings at these positions (from 0), several times faster than one by one."""
        chosen, text = np.asarray(positions, dtype=np.intp), self._text
        spans = zip(self._bounds[chosen].tolist(), self._bounds[chosen + 1].tolist(), strict=True)
        if isinstance(text, str):
            return [text[start:end] for start, end in spans]
        return [text[start:end].decode("utf-8", "surrogateescape") for start, end in spans]

    def select(self, positions: NDArray[np.integer]) -> Strings:
        """A column of the strings at these positions."""
        return Strings.of(self.take(positions))

    def empty(self) -> tuple[int, int]:
        """How many strings are empty, and the position of the first of them; -1: there is none."""
        count, first = 0, -1
        for start in range(0, len(self), _EMPTY_SLICE):
            bounds = self._bounds_of(start, min(start + _EMPTY_SLICE, len(self)))
            found = np.flatnonzero(np.diff(bounds) == 0)
            first = start + int(found[0]) if first < 0 and len(found) else first
            count += len(found)
        return count, first

    def _bounds_of(self, low: int, high: int) -> NDArray[np.integer]:
        """(high - low + 1,) where the strings from ``low`` up to ``high`` begin and end."""
        return self._bounds[low : high + 1]

    def span(self, start: int, stop: int) -> tuple[NDArray[np.integer], bytes]:
        """Lengths and bytes of the strings from ``start`` to ``stop``, without making strings."""
        bounds = self._bounds[start : stop + 1]
        text = self._text[bounds[0] : bounds[-1]]
        return np.diff(bounds), text.encode() if isinstance(text, str) else text

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _SLICE):
            yield from self.take(np.arange(start, min(start + _SLICE, len(self))))


class LazyStrings(Strings):
    """Strings that stay on disk; those at asked positions are read.

    Args:
        data: All bytes: a column that is read by position and slice.
        ends: Where each string ends: likewise.
    """

    def __init__(self, data: Any, ends: Any) -> None:
        self._data, self._ends = data, ends

    @property
    def data(self) -> NDArray[np.uint8]:
        """All bytes."""
        return np.asarray(self._data)

    @property
    def ends(self) -> NDArray[np.int64]:
        """(n,) where each string ends in :attr:`data`."""
        return np.asarray(self._ends, dtype=np.int64)

    def __reduce__(self) -> Any:
        return _unpickled, (self._data, self._ends)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strings) and Strings(self.data, self.ends) == Strings(other.data, other.ends)

    __hash__ = None

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(*index.indices(len(self))))
        return self.take([range(len(self))[index]])[0]

    def take(self, positions: Sequence[int] | NDArray[np.integer]) -> list[str]:
        """The strings at these positions (from 0); quick for positions that are close together."""
        chosen, found = np.asarray(positions, dtype=np.int64), list[str]()
        for start in range(0, len(chosen), _NEAR):
            part = chosen[start : start + _NEAR]
            low, high = int(part.min()), int(part.max())
            if high - low >= _GAP_STRINGS * len(part) and len(part) > 1:
                found += self._scattered(part)
                continue
            bounds = self._bounds_of(low, high + 1)
            text = self._data[int(bounds[0]) : int(bounds[-1])].tobytes()
            at = bounds - bounds[0]
            spans = zip(at[part - low].tolist(), at[part - low + 1].tolist(), strict=True)
            found += [text[begin:end].decode("utf-8", "surrogateescape") for begin, end in spans]
        return found

    def _scattered(self, chosen: NDArray[np.int64]) -> list[str]:
        """The strings at positions that are far apart."""
        bounds = self._ends[np.concatenate([(chosen - 1).clip(min=0), chosen])].astype(np.int64)
        first, size = bounds[: len(chosen)] * (chosen > 0), bounds[len(chosen) :]
        size -= first
        text, ends = self._data.pieces(first, size), np.cumsum(size)
        spans = zip((ends - size).tolist(), ends.tolist(), strict=True)
        return [text[begin:end].decode("utf-8", "surrogateescape") for begin, end in spans]

    def span(self, start: int, stop: int) -> tuple[NDArray[np.integer], bytes]:
        """Lengths and bytes of the strings from ``start`` to ``stop``."""
        bounds = self._bounds_of(start, stop)
        return np.diff(bounds), self._data[int(bounds[0]) : int(bounds[-1])].tobytes()

    def _bounds_of(self, low: int, high: int) -> NDArray[np.int64]:
        """See :meth:`Strings._bounds_of`."""
        ends: NDArray[np.int64] = self._ends[max(low - 1, 0) : high].astype(np.int64)
        return ends if low else np.concatenate([np.zeros(1, np.int64), ends])


def _unpickled(data: Any, ends: Any) -> Strings:
    """Columns on disk come back as themselves or as arrays."""
    return Strings(data, ends) if isinstance(data, np.ndarray) else LazyStrings(data, ends)
