"""Big files of text, read once from front to back: their lines, their stat memo and their hash come of the same read.

Guarantee: memory is bounded by the longest line that is allowed, whatever the size of the file; the memo describes
the bytes that were hashed; a file that changes meanwhile is an error when its end is reached. A byte order mark of
UTF-8 is taken off, one of UTF-16 is an error. Lines end with LF; a CR before it is taken off. Cost, hashing,
parsing and mapping of 8 kB texts included: 2.4 s of CPU per GB (docs/log.md, 2026-11-20).
"""

from __future__ import annotations

import codecs
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import xxhash

from latentcache.errors import UnusableSampleError
from latentcache.identity.stat import StatMemo
from latentcache.sources.causes import hint_for
from latentcache.sources.reading import open_source, unusable
from latentcache.sources.rows import shown

#: Longest line, and largest text that is one document, in bytes.
MAX_LINE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PACKED = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstandard"), (b"PK\x03\x04", "zip"), (b"BZh", "bzip2"))


class LineReader:
    """One file, read once.

    Args:
        path: A regular file.
        max_bytes: A longer line is given as None; its bytes are hashed and let go.

    Raises:
        UnusableSampleError: It cannot be opened, is compressed, or begins with a UTF-16 byte order mark.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._path, self._max = path, max_bytes
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self._file = open_source(path)
        self._before = os.fstat(self._file.fileno())
        try:
            self._first = self._check_start(self._read())
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def head(self) -> bytes:
        """The first bytes, at most 1 MiB, without a byte order mark."""
        return self._first

    def chunks(self) -> Iterator[bytes]:
        """All bytes but the byte order mark, in pieces of about 1 MiB."""
        yield self._first
        while chunk := self._read():
            yield chunk

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """(number from 1, bytes without the line end) of every line, also empty ones; None where it is too long."""
        number, rest, skipping = 1, b"", False
        for chunk in self.chunks():
            first, *others = chunk.split(b"\n")
            rest = b"" if skipping else rest + first
            for following in others:
                yield number, None if skipping or len(rest) > self._max else rest.removesuffix(b"\r")
                number, rest, skipping = number + 1, following, False
            if len(rest) > self._max:
                rest, skipping = b"", True
        if skipping:
            yield number, None
        elif rest:
            yield number, rest.removesuffix(b"\r")

    def finish(self) -> tuple[StatMemo, bytes]:
        """Memo and hash of the file after its last byte was read.

        Raises:
            UnusableSampleError: ``changing``: it is not what it was when it was opened.
        """
        after = os.fstat(self._file.fileno())
        if {after.st_size, self._before.st_size} != {self._size} or after.st_mtime_ns != self._before.st_mtime_ns:
            raise unusable("changing", self._path, "its size or time changed while it was read")
        return StatMemo.of(after, seen_ns=time.time_ns()), self._hash.digest()

    def _read(self) -> bytes:
        try:
            # Never past the size at the start: a log that grows faster than it is read would have no end.
            chunk = self._file.read(min(_CHUNK_BYTES, self._before.st_size - self._size))
        except OSError as error:
            raise unusable("io-error", self._path, f"it cannot be read: {error.strerror or error}") from error
        self._hash.update(chunk)
        self._size += len(chunk)
        return chunk

    def _check_start(self, chunk: bytes) -> bytes:
        """The first chunk without a byte order mark.

        Raises:
            UnusableSampleError: ``not-utf8`` or ``compressed``.
        """
        if chunk.startswith(_UTF16_BOMS):
            raise unusable("not-utf8", self._path, "it begins with the byte order mark of UTF-16, expected UTF-8")
        for magic, name in _PACKED:
            if chunk.startswith(magic):
                raise unusable("compressed", self._path, f"it is packed with {name}")
        return chunk.removeprefix(codecs.BOM_UTF8)


def has_bom(path: Path) -> bool:
    """Whether a file begins with the byte order mark of UTF-8."""
    with open_source(path) as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def fault(cause: str, detail: str, field: str = "") -> UnusableSampleError:
    """The error of one record; ``where`` is its field."""
    return UnusableSampleError(detail, where=field, fix=hint_for(cause), slug=cause)


def decode(raw: bytes) -> str:
    """UTF-8 as text.

    Raises:
        UnusableSampleError: ``not-utf8``, with the byte.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {error.start + 1}"
        raise fault("not-utf8", f"expected UTF-8, found 0x{raw[error.start]:02x} at {where}") from error


def parse_json(text: str) -> Any:
    """A JSON value, stricter than the json module.

    Raises:
        UnusableSampleError: ``no-json``: not well formed, a name twice in one object, NaN or Infinity, too deep.
    """
    return _strictly(DECODER.decode, text)


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at a place, and where it ends; raises as :func:`parse_json`."""
    value, end = _strictly(lambda whole: DECODER.raw_decode(whole, start), text)
    return value, int(end)


def _strictly(decoder: Any, text: str) -> Any:
    try:
        return decoder(text)
    except json.JSONDecodeError as error:
        raise fault("no-json", f"no JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from error
    except RecursionError as error:
        raise fault("no-json", "it is nested too deeply") from error
    except ValueError as error:
        # Python's own words on long numbers advise a setting of the interpreter.
        why = "it holds a whole number of thousands of digits" if "integer string" in str(error) else str(error)
        raise fault("no-json", why) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: of two equal names the json module keeps the last in silence."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {shown(repeated)} is there twice")
    return record


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON value")


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
