"""Columns of strings: all bytes in one array, and where each string ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Strings that become Python objects at a time when a column is iterated.
_SLICE = 1 << 14


class Strings(Sequence[str]):
    """Many strings in two arrays. Names that are not UTF-8 come back to the byte (``os.fsencode``).

    Args:
        data: All bytes.
        ends: (n,) where each string ends in ``data``.
    """

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.integer]) -> None:
        text, self._bounds = data.tobytes(), np.concatenate([np.zeros(1, np.intp), ends.astype(np.intp)])
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
        spans = zip(self._bounds.take(chosen).tolist(), self._bounds.take(chosen + 1).tolist(), strict=True)
        if isinstance(text, str):
            return [text[start:end] for start, end in spans]
        return [text[start:end].decode("utf-8", "surrogateescape") for start, end in spans]

    def select(self, positions: NDArray[np.integer]) -> Strings:
        """A column of the strings at these positions."""
        return Strings.of(self.take(positions))

    def span(self, start: int, stop: int) -> tuple[NDArray[np.integer], bytes]:
        """Lengths and bytes of the strings from ``start`` to ``stop``, without making strings."""
        bounds = self._bounds[start : stop + 1]
        text = self._text[bounds[0] : bounds[-1]]
        return np.diff(bounds), text.encode() if isinstance(text, str) else text

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _SLICE):
            yield from self.take(np.arange(start, min(start + _SLICE, len(self))))
