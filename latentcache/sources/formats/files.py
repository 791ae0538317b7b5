"""Opens source files; no other module opens them.

Only regular files are opened, so that a pipe or a device never blocks. A file, or a range of one, is read into one
buffer. Its memo describes the file with exactly these bytes. A file that changes while it is read is rejected. Access
times stay as they are if the system allows it. Cost: six system calls per file beside the bytes.
"""

from __future__ import annotations

import io
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from latentcache.errors import UnusableSampleError
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
