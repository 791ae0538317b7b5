"""Source files: their bytes, their lines, and the one strict JSON of this package. No other module opens them.

Only regular files are opened, so that a pipe or a device never blocks. A file, or a range of one, is read into one
buffer. Its memo describes the file with exactly these bytes. A file that changes while it is read is rejected. Access
times stay as they are if the system allows it. Cost: six system calls per file beside the bytes.

Large text files are read line by line: memory is bounded by the longest line allowed. Memo and hash come from one
read. Hashing, parsing and mapping of 8 kB texts takes 2.4 s of CPU per GB.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import xxhash

from latentcache.errors import SourceError, UnusableSampleError
from latentcache.identity.content import StatMemo
from latentcache.sources.causes import cause_of, fault

#: Larger files are rejected before they are read: 100 megapixels of 16-bit RGBA have 800 MB.
MAX_SOURCE_BYTES = 1 << 30
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_NO_ATIME = getattr(os, "O_NOATIME", 0)
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


def read_source(
    path: Path | str, span: tuple[int, int] | None = None, *, max_bytes: int = MAX_SOURCE_BYTES
) -> tuple[bytes, StatMemo]:
    """All bytes of a regular file or of a range (offset, bytes), and the memo of the file; ``seen_ns`` is now.

    Raises:
        UnusableSampleError: ``slug`` is the reason: ``not-regular``, ``permission``, ``not-found``, ``io-error``,
            ``empty``, ``symlink-loop``, ``changing``, ``too-large``, ``out-of-memory``.
    """
    descriptor, before = _opened(path)
    try:
        start, size = span or (0, before.st_size)
        if size > max_bytes:
            raise fault("too-large", f"it has {size} bytes, at most {max_bytes} are read", path)
        if start:
            os.lseek(descriptor, start, os.SEEK_SET)
        data = os.read(descriptor, size)  # one call for nearly every file, so nothing is copied
        while 0 < len(data) < size and (chunk := os.read(descriptor, size - len(data))):
            data += chunk
        after = os.fstat(descriptor)
    except OSError as error:
        raise _from_os(error, path) from error
    except MemoryError as error:
        raise fault("out-of-memory", "there is not enough memory to read it", path) from error
    finally:
        os.close(descriptor)
    if len(data) != size or before.st_size != after.st_size or before.st_mtime_ns != after.st_mtime_ns:
        raise fault("changing", "its size or time changed while it was read", path)
    if not data:
        raise fault("empty", "it has 0 bytes", path)
    return data, StatMemo.of(after, seen_ns=time.time_ns())


def open_source(path: Path | str, span: tuple[int, int] | None = None) -> BinaryIO:
    """A regular file or a range of it (offset, bytes), for its header; raises as ``read_source``. To be closed."""
    descriptor, state = _opened(path)
    file = os.fdopen(descriptor, "rb")
    if not state.st_size:
        file.close()
        raise fault("empty", "it has 0 bytes", path)
    return file if span is None else io.BufferedReader(_Range(file, *span))


def stat_source(path: Path | str) -> StatMemo:
    """The memo of a regular file without opening it (``seen_ns`` is 0); raises as :func:`read_source`."""
    try:
        result = os.stat(path)  # noqa: PTH116 - a Path costs more than the call
    except OSError as error:
        raise _from_os(error, path) from error
    _regular(result, path)
    return StatMemo.of(result)


def kind_of(mode: int) -> str:
    """Name the kind of a file that is not regular, such as ``a named pipe``."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


class _Range(io.RawIOBase):
    """A range of a file as a stream of its own; closes the file."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file, self._offset, self._size, self._at = file, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        room = memoryview(buffer)[: max(self._size - self._at, 0)]
        count = os.preadv(self._file.fileno(), [room], self._offset + self._at) if room else 0
        self._at += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def close(self) -> None:
        self._file.close()
        super().close()


def _opened(path: Path | str) -> tuple[int, os.stat_result]:
    """A regular file and its state; the access time stays if the system allows that (to owner and root only)."""
    try:
        try:
            descriptor = os.open(path, _FLAGS | _NO_ATIME)  # without blocking, whatever it is
        except PermissionError:
            descriptor = os.open(path, _FLAGS)
        state = os.fstat(descriptor)
    except OSError as error:
        raise _from_os(error, path) from error
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        _regular(state, path)
    return descriptor, state


def _regular(result: os.stat_result, path: Path | str) -> None:
    if not stat.S_ISREG(result.st_mode):
        raise fault("not-regular", f"it is {kind_of(result.st_mode)}, not a regular file", path)


def _from_os(error: OSError, path: Path | str) -> UnusableSampleError:
    cause = cause_of(error)
    return fault(cause, f"it cannot be read: {error.strerror or error}", path)


_PACKED = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"
}  # fmt: skip
_SHOWN = 200


def check_not_packed(head: bytes, path: Path) -> None:
    """Raise ``compressed`` for a file whose first bytes are those of a packed one."""
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            raise fault("compressed", f"it is packed with {name}", path)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def shown(value: object) -> str:
    """A value for a message, cut to a sane length."""
    return _short(repr(value))


def listed(columns: Sequence[str]) -> str:
    """Column names for a message, cut to a sane length."""
    return _short(", ".join(column if column.isprintable() else repr(column) for column in columns))


# lines and JSON


#: Longest line, and largest text that is one document, in bytes.
MAX_LINE_BYTES = 64 << 20
UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
BLANK = b" \t\r\n"
_CHUNK_BYTES = 1 << 20


class LineReader:
    """One open file, read once; raises UnusableSampleError if it is compressed, or begins as UTF-16 does."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self._before = os.fstat(file.fileno())
        self.size = self._before.st_size
        first = self._read()
        if first.startswith(UTF16_BOMS):
            raise fault("not-utf8", "it begins with the byte order mark of UTF-16, expected UTF-8", path)
        check_not_packed(first, path)
        self.head = first.removeprefix(codecs.BOM_UTF8)

    def chunks(self) -> Iterator[bytes]:
        """All bytes but the byte order mark, in pieces of about 1 MiB; ``head`` is the first."""
        yield self.head
        while chunk := self._read():
            yield chunk

    def all_bytes(self, most: int, error: UnusableSampleError) -> bytes:
        """All bytes but the byte order mark; raises ``error`` if the file has more than ``most``."""
        if self.size > most:
            raise error
        return b"".join(self.chunks())

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """(number from 1, bytes without the line end) of every line that is not blank; None if it is too long."""
        number = 1
        rest = b""
        for chunk in chain(self.chunks(), [b"\n"]):
            first, *others = chunk.split(b"\n")
            rest = (rest + first)[: MAX_LINE_BYTES + 1]
            for following in others:
                if len(rest) > MAX_LINE_BYTES:
                    yield number, None
                elif rest.strip(BLANK):
                    yield number, rest.removesuffix(b"\r")
                number = number + 1
                rest = following

    def finish(self) -> tuple[StatMemo, bytes]:
        """Memo and hash of the file after its last byte was read; raises ``changing`` if the file has changed."""
        after = os.fstat(self._file.fileno())
        if {after.st_size, self.size} != {self._size} or after.st_mtime_ns != self._before.st_mtime_ns:
            raise fault("changing", "its size or time changed while it was read", self._path)
        return StatMemo.of(after, seen_ns=time.time_ns()), self._hash.digest()

    def _read(self) -> bytes:
        try:
            # Never past the size at the start: a log that grows faster than it is read would have no end.
            chunk = self._file.read(min(_CHUNK_BYTES, self.size - self._size))
        except OSError as error:
            raise fault("io-error", f"it cannot be read: {error.strerror or error}", self._path) from error
        self._hash.update(chunk)
        self._size += len(chunk)
        return chunk


def decode(raw: bytes | None) -> str:
    """UTF-8 as text; raises ``not-utf8`` with the byte, or ``line-too-long`` for the None of ``LineReader.lines``."""
    if raw is None:
        raise fault("line-too-long", f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        difference = f"found 0x{raw[error.start]:02x} at byte {error.start + 1}"
        raise fault("not-utf8", f"expected UTF-8, {difference}") from error


def read_document(path: Path, fix: str, *, max_bytes: int = MAX_SOURCE_BYTES) -> Any:
    """The value of a TOML, YAML or JSON file; raises SourceError, with the line."""
    import tomllib

    import yaml

    parsers = {".toml": tomllib.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
    try:
        data = read_source(path, max_bytes=max_bytes)[0].removeprefix(codecs.BOM_UTF8)
        return parsers.get(path.suffix, parse_json)(decode(data))
    except (tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError, UnusableSampleError) as error:
        why = error.what if isinstance(error, UnusableSampleError) else str(error)
        problem = f"{path.name} cannot be read"
        raise SourceError(problem, where=str(path), why=why, fix=fix) from error


def parse_json(text: str) -> Any:
    """A JSON value, stricter than the json module.

    Raises:
        UnusableSampleError: ``no-json``: not well formed, a name twice in one object, NaN or Infinity, too deep.
    """
    return parse_json_at(text, None)[0]


def parse_json_at(text: str, start: int | None) -> tuple[Any, int]:
    """The JSON value that begins at ``start``, or that is all of the text, and where it ends."""
    try:
        return (_DECODER.decode(text), len(text)) if start is None else _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if start is not None or error.lineno > 1 else ""
        raise fault("no-json", f"no JSON: {error.msg.removesuffix(' at')} at {line}column {error.colno}") from error
    except RecursionError as error:
        raise fault("no-json", "it is nested too deeply") from error
    except ValueError as error:
        # Python's own message on long numbers advises a setting of the interpreter.
        why = "it holds an integer of thousands of digits" if "integer string" in str(error) else str(error)
        at = "" if start is None else f", in the item at {_position(text, start)}"
        raise fault("no-json", why + at) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: the json module silently keeps the last of two equal names."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {shown(repeated)} is there twice")
    return record


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def list_items(data: bytes) -> Iterator[tuple[int, Any]]:
    """The items of a JSON list by number, as several may be on one line.

    Raises UnusableSampleError at the item from which the list is broken.
    """
    damage: UnusableSampleError | None = None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:  # what is before the byte is read
        text = data[: error.start].decode()
        damage = fault("not-utf8", f"expected UTF-8, found 0x{data[error.start]:02x} at {_position(text, len(text))}")
    offset = _skip(text, text.index("[") + 1)
    number = 1
    try:
        while text[offset : offset + 1] != "]":
            if number > 1 and text[offset : offset + 1] != ",":
                raise fault("no-json", f"expected , or ] at {_position(text, offset)}")
            offset = _skip(text, offset + 1) if number > 1 else offset
            value, end = parse_json_at(text, offset)
            yield number, value
            offset = _skip(text, end)
            number = number + 1
        if damage or text[offset + 1 :].strip():
            raise fault("no-json", f"expected nothing after the list, which ends at {_position(text, offset)}")
    except UnusableSampleError as error:
        raise damage or error from None


def _skip(text: str, offset: int) -> int:
    while text[offset : offset + 1].isspace():
        offset += 1
    return offset


def _position(text: str, offset: int) -> str:
    return f"line {text.count(chr(10), 0, offset) + 1}, column {offset - text.rfind(chr(10), 0, offset)}"
