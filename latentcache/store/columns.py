"""Columns of a generation: plain ``.npy`` arrays, and strings as bytes with offsets.

Guarantee: names that are not UTF-8 come back to the byte (``os.fsencode``); nothing is ever unpickled. Columns
are checked against the checksums in the manifest when a generation is opened.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError
from latentcache.identity.content import checksum
from latentcache.store.layout import write_atomically


class StringColumn(Sequence[str]):
    """Many strings in two arrays: all bytes, and where each string ends. Ten million cost no objects."""

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.uint64]) -> None:
        self.data, self.ends = data, ends

    @classmethod
    def of(cls, strings: Iterable[str]) -> StringColumn:
        """From strings; surrogate escapes become the bytes they stand for."""
        encoded = [text.encode("utf-8", "surrogateescape") for text in strings]
        ends = np.cumsum([len(part) for part in encoded], dtype=np.uint64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        start = int(self.ends[position - 1]) if position else 0
        return self.data[start : int(self.ends[position])].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        flat, start = self.data.tobytes(), 0
        for end in self.ends.tolist():
            yield flat[start:end].decode("utf-8", "surrogateescape")
            start = end


def save_columns(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, Any]]:
    """Write one ``<name>.npy`` per array; returns what the manifest says of them.

    Raises:
        DiskFullError: No space.
        CacheReadOnlyError: The folder cannot be written.
    """
    facts = {}
    for name, array in arrays.items():
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
        data = buffer.getvalue()
        write_atomically(folder / f"{name}.npy", data)
        facts[name] = {"file": f"{name}.npy", "bytes": len(data), "checksum": f"{checksum(data):016x}"}
    return facts


def load_columns(folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Read the columns a manifest names.

    Raises:
        CacheDamagedError: A column is missing or is not what was written.
    """
    return {name: _load_column(folder / os.fspath(str(fact["file"])), fact) for name, fact in facts.items()}


def _load_column(path: Path, fact: Mapping[str, Any]) -> NDArray[Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CacheDamagedError("a column cannot be read", where=str(path), why=str(error)) from error
    found = f"{checksum(data):016x}"
    if found != fact.get("checksum"):
        raise CacheDamagedError(
            "a column is damaged", where=str(path), why=f"checksum: expected {fact.get('checksum')}, found {found}"
        )
    array: NDArray[Any] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return array
