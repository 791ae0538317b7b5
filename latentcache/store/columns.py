"""Columns of a generation: plain ``.npy`` arrays, and strings as bytes with offsets.

Guarantee: names that are not UTF-8 come back to the byte (``os.fsencode``); nothing is ever unpickled. Columns
are checked against the checksums in the manifest when a generation is opened.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError
from latentcache.identity.content import checksum
from latentcache.identity.key import FLIPPED, VARIANT_BYTE
from latentcache.store.durable import read_file, write_atomically

#: Type and width of each column of entries; a width of 0 is one value for each row.
ROW_SHAPES: Mapping[str, tuple[str, int]] = {
    "key": ("|u1", 32),
    "shard": ("<i4", 0),
    "offset": ("<u8", 0),
    "bucket": ("<i4", 0),
    "sample": ("<i4", 0),
    "crop": ("<u4", 2),
    "resize": ("<u4", 2),
    "pixel_hash": ("|u1", 16),
}
#: The same of samples.
SAMPLE_SHAPES: Mapping[str, tuple[str, int]] = {
    "content": ("|u1", 16),
    "original_size": ("<u4", 2),
    "stat": ("<u8", 6),
    "names_ends": ("<u8", 0),
    "captions_ends": ("<u8", 0),
}
_STRINGS = ("names", "captions")
#: No file is longer; larger numbers would not fit a positional read.
MAX_OFFSET = 1 << 62
#: Strings that become objects at a time when all are asked for.
_SLICE = 1 << 14
#: Rows of a column that are looked at together.
_PART = 1 << 16


class StringColumn(Sequence[str]):
    """Many strings in two arrays: all bytes, and where each string ends. Ten million cost no objects."""

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.uint64]) -> None:
        text, self._bounds = data.tobytes(), np.concatenate([np.zeros(1, np.uint64), ends]).astype(np.intp)
        # a slice of bytes costs half as much as one of an array, and nothing is left to decode where all is ASCII
        self._text = text.decode("ascii") if text.isascii() else text
        self.ends = self._bounds[1:].view(np.uint64)

    @property
    def data(self) -> NDArray[np.uint8]:
        """All bytes; read-only, and a copy where they are ASCII."""
        return np.frombuffer(self._text.encode() if isinstance(self._text, str) else self._text, dtype=np.uint8)

    def __reduce__(self) -> tuple[type[StringColumn], tuple[NDArray[np.uint8], NDArray[np.uint64]]]:
        return StringColumn, (self.data, self.ends)

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
        text = self._text[int(self._bounds[position]) : int(self._bounds[position + 1])]
        return text if isinstance(text, str) else text.decode("utf-8", "surrogateescape")

    def take(self, positions: Sequence[int] | NDArray[np.integer]) -> list[str]:
        """The strings at these positions (from 0), several times quicker than one by one."""
        chosen, text = np.asarray(positions, dtype=np.intp), self._text
        spans = zip(self._bounds.take(chosen).tolist(), self._bounds.take(chosen + 1).tolist(), strict=True)
        if isinstance(text, str):
            return [text[start:end] for start, end in spans]
        return [text[start:end].decode("utf-8", "surrogateescape") for start, end in spans]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _SLICE):
            yield from self.take(np.arange(start, min(start + _SLICE, len(self))))


def save_columns(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, Any]]:
    """Write one ``<name>.npy`` per array; returns what the manifest says of them.

    Raises:
        DiskFullError: No space.
        CacheReadOnlyError: The folder cannot be written.
    """
    facts = {}
    for name, array in arrays.items():
        data = npy_bytes(array)
        write_atomically(folder / f"{name}.npy", data)
        facts[name] = {"file": f"{name}.npy", "bytes": len(data), "checksum": f"{checksum(data):016x}"}
    return facts


def load_columns(folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Read the columns a manifest names. Files are called after their columns; a manifest cannot name others.

    Raises:
        CacheDamagedError: A column is missing or is not what was written.
    """
    return {name: _load_column(folder, name, fact) for name, fact in facts.items()}


def _load_column(folder: Path, name: str, fact: Mapping[str, Any]) -> NDArray[Any]:
    path = column_path(folder, name, fact)
    return npy_array(checked_bytes(path, fact.get("checksum")), path)


def column_path(folder: Path, name: str, fact: Mapping[str, Any]) -> Path:
    """The file of a column that a manifest names.

    Raises:
        CacheDamagedError: The manifest names another one.
    """
    path = folder / f"{name}.npy"
    if fact.get("file") != path.name or path.parent != folder:
        raise CacheDamagedError("a manifest names a file that is no column", where=str(folder), why=repr(fact))
    return path


def check_columns(columns: Mapping[str, NDArray[Any]], limits: Mapping[str, int]) -> None:
    """Refuse columns of another type or shape, and positions that point nowhere.

    Args:
        columns: All columns of a generation.
        limits: How many shards and buckets there are.

    Raises:
        ValueError: With the column's name.
        KeyError: A column is not there.
    """
    num_rows, num_samples = len(columns["shard"]), len(columns["names_ends"])
    check_shapes(columns, ROW_SHAPES, num_rows)
    check_shapes(columns, SAMPLE_SHAPES, num_samples)
    check_limits(columns, {"offset": MAX_OFFSET, "sample": num_samples} | dict(limits))
    for name in _STRINGS:
        check_strings(columns, name)


def check_shapes(columns: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[str, int]], count: int) -> None:
    """Refuse columns that have not ``count`` rows of their type and width.

    Raises:
        ValueError: With the column's name.
        KeyError: A column is not there.
    """
    for name, (dtype, width) in shapes.items():
        column, shape = columns[name], (count, width) if width else (count,)
        if column.dtype != np.dtype(dtype) or column.shape != shape:
            raise ValueError(f"{name}: expected {dtype} {shape}, found {column.dtype} {column.shape}")


def check_limits(columns: Mapping[str, NDArray[Any]], limits: Mapping[str, int]) -> None:
    """Refuse columns with numbers below 0, or not below their limit.

    Raises:
        ValueError: With the column's name.
    """
    for name, end in limits.items():
        for part in _parts(columns[name]):
            if not 0 <= int(part.min()) <= int(part.max()) < end:
                raise ValueError(f"{name}: a position is not below {end}")


def check_strings(columns: Mapping[str, NDArray[Any]], name: str) -> None:
    """Refuse a column of strings whose ends do not lead to the end of its bytes.

    Raises:
        ValueError: With the column's name.
    """
    data, ends = columns[f"{name}_bytes"], columns[f"{name}_ends"]
    whole = data.dtype == np.uint8 and data.shape == (int(ends[-1]) if len(ends) else 0,)
    before = np.zeros(1, dtype=ends.dtype)
    for part in _parts(ends):
        whole = whole and part[0] >= before[-1] and not bool((part[1:] < part[:-1]).any())
        before = part
    if not whole:
        raise ValueError(f"{name}: the ends do not rise to the end of the bytes")


def check_pairs(columns: Mapping[str, NDArray[Any]]) -> None:
    """Refuse mirrored rows that do not follow their pictures one by one.

    Raises:
        ValueError: Row i + N / 2 is not the mirror image of row i.
    """
    half, odd = divmod(len(columns["shard"]), 2)
    for start in range(0, half, _PART):
        stop = min(start + _PART, half)
        expected = columns["key"][start:stop].copy()
        expected[:, VARIANT_BYTE] = FLIPPED
        pairs = [(expected, columns["key"][half + start : half + stop])]
        pairs += [(columns[n][start:stop], columns[n][half + start : half + stop]) for n in ("sample", "bucket")]
        odd = odd or not all(np.array_equal(one, other) for one, other in pairs)
    if odd:
        raise ValueError("the mirrored rows are not those of the pictures before them")


def _parts(column: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """A column in slices: it may be one that stays on disk."""
    for start in range(0, len(column), _PART):
        yield column[start : start + _PART]


def checked_bytes(path: Path, expected: Any) -> bytes:
    """The bytes of a file that a manifest names.

    Raises:
        CacheDamagedError: It cannot be read, or its xxh3-64 is not ``expected`` (16 hex digits).
    """
    try:
        data = read_file(path)
    except OSError as error:
        raise CacheDamagedError(f"{path.name} cannot be read", where=str(path), why=str(error)) from error
    found = f"{checksum(data):016x}"
    if found != expected:
        why = f"checksum: expected {expected}, found {found}"
        raise CacheDamagedError(f"{path.name} is damaged", where=str(path), why=why)
    return data


def npy_bytes(array: NDArray[Any]) -> bytes:
    """The array as a ``.npy`` file, as numpy's own writer makes it without pickle; its values are copied once.

    Raises:
        ValueError: The array holds Python objects.
    """
    if array.dtype.hasobject:
        raise ValueError(f"{array.dtype} cannot be stored without pickle")
    head, whole = io.BytesIO(), np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(whole))
    return b"".join([head.getvalue(), whole.reshape(-1).view(np.uint8).data if whole.size else b""])


def npy_array(data: bytes, path: Path) -> NDArray[Any]:
    """Inverse of :func:`npy_bytes`, over bytes whose checksum was seen to hold; read-only, and nothing is copied.

    Raises:
        CacheDamagedError: No ``.npy`` file, or one that asks for pickle.
    """
    dtype, shape, start = npy_form(data, path)
    try:
        flat = np.frombuffer(data, dtype, count=math.prod(shape), offset=start)
    except (ValueError, MemoryError, OverflowError) as error:
        raise CacheDamagedError(f"{path.name} is no column", where=str(path), why=str(error)) from error
    return flat.reshape(shape)


def npy_form(data: bytes, path: Path) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Type, shape and byte at which the values begin, of a file as :func:`npy_bytes` writes it or its first bytes.

    Raises:
        CacheDamagedError: No ``.npy`` file, or one that asks for pickle.
    """
    try:
        return _form(data[: 10 + int.from_bytes(data[8:10], "little")])
    except (ValueError, EOFError, MemoryError, OverflowError) as error:
        raise CacheDamagedError(f"{path.name} is no column", where=str(path), why=str(error)) from error


@functools.lru_cache(maxsize=256)
def _form(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """What a header of version 1.0 says: numpy compiles its text as Python, and a generation has thirty alike."""
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"version {version} of .npy")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.hasobject or fortran:
        raise ValueError(f"{dtype}{' in Fortran order' if fortran else ''} is never written")
    return dtype, shape, stream.tell()
