"""Opens source files; no other module of this package does.

Only regular files are opened, so that a pipe or a device never blocks. A file, or a range of one, is read into one
buffer, and its memo describes the file with exactly these bytes; a file that changes while it is read is read once
more and then rejected. Access times are left alone where the system allows it. Cost: six system calls per file beside
the bytes.
"""

from __future__ import annotations

import io
import os
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO

from latentcache.errors import UnusableSampleError
from latentcache.identity.stat import StatMemo
from latentcache.sources.causes import cause_of, hint_for

#: Larger files are rejected before they are read: 100 megapixels of 16-bit RGBA have 800 MB.
MAX_SOURCE_BYTES = 1 << 30
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_NO_ATIME = getattr(os, "O_NOATIME", 0)
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


def read_source(
    path: Path | str, *, max_bytes: int = MAX_SOURCE_BYTES, span: tuple[int, int] | None = None
) -> tuple[bytes, StatMemo]:
    """All bytes of a regular file or of a range of it (offset, bytes), and the memo of the file (``seen_ns`` is now).

    Raises:
        UnusableSampleError: ``slug`` is the reason: ``not-regular``, ``permission``, ``not-found``, ``io-error``,
            ``empty``, ``symlink-loop``, ``changing``, ``too-large``, ``out-of-memory``.
    """
    try:
        data, memo = _read_once(path, max_bytes, span)
        if memo is None:
            data, memo = _read_once(path, max_bytes, span)
    except OSError as error:
        raise _from_os(error, path) from error
    except MemoryError as error:
        raise unusable("out-of-memory", path, "there is not enough memory to read it") from error
    if memo is None:
        raise unusable("changing", path, "its size or time changed during both reads")
    if not data:
        raise unusable("empty", path, "it has 0 bytes")
    return data, memo


def open_source(path: Path | str, span: tuple[int, int] | None = None) -> BinaryIO:
    """A regular file or a range of it (offset, bytes), opened to read its header; the caller closes it.

    Raises:
        UnusableSampleError: As :func:`read_source`, without ``changing``.
    """
    try:
        _regular(os.stat(path), path)  # noqa: PTH116 - a Path costs more than the call
        descriptor = _open(path)
    except OSError as error:
        raise _from_os(error, path) from error
    try:
        found = os.fstat(descriptor)
        _regular(found, path)
        if not found.st_size:
            raise unusable("empty", path, "it has 0 bytes")
    except BaseException:
        os.close(descriptor)
        raise
    file = os.fdopen(descriptor, "rb")
    return file if span is None else io.BufferedReader(_Range(file, *span))


def stat_source(path: Path | str) -> StatMemo:
    """The memo of a regular file without opening it (``seen_ns`` is 0); raises as :func:`read_source`."""
    try:
        result = os.stat(path)  # noqa: PTH116 - a Path costs more than the call
    except OSError as error:
        raise _from_os(error, path) from error
    _regular(result, path)
    return StatMemo.of(result)


def unusable(cause: str, path: Path | str, what: str) -> UnusableSampleError:
    """The error of one file, with the hint of its reason."""
    return UnusableSampleError(what, where=str(path), fix=hint_for(cause), slug=cause)


def kind_of(mode: int) -> str:
    """What a file that is not regular is, such as ``a named pipe``."""
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


def _read_once(path: Path | str, max_bytes: int, span: tuple[int, int] | None) -> tuple[bytes, StatMemo | None]:
    """The bytes and the memo of the file, or no memo if the file changed meanwhile."""
    _regular(os.stat(path), path)  # noqa: PTH116 - a Path costs more than the call
    descriptor = _open(path)
    try:
        before = os.fstat(descriptor)
        _regular(before, path)
        start, size = span or (0, before.st_size)
        if size > max_bytes:
            raise unusable("too-large", path, f"it has {size} bytes, at most {max_bytes} are read")
        if start:
            os.lseek(descriptor, start, os.SEEK_SET)
        data = os.read(descriptor, size)  # one call for nearly every file, so nothing is copied
        while 0 < len(data) < size and (chunk := os.read(descriptor, size - len(data))):
            data += chunk
        after = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if len(data) != size or before.st_size != after.st_size or before.st_mtime_ns != after.st_mtime_ns:
        return b"", None
    return data, StatMemo.of(after, seen_ns=time.time_ns())


def _open(path: Path | str) -> int:
    """Without touching the access time if the system allows that (owner and root only)."""
    try:
        return os.open(path, _FLAGS | _NO_ATIME)
    except PermissionError:
        return os.open(path, _FLAGS)


def _regular(result: os.stat_result, path: Path | str) -> None:
    if not stat.S_ISREG(result.st_mode):
        raise unusable("not-regular", path, f"it is {kind_of(result.st_mode)}, not a regular file")


def _from_os(error: OSError, path: Path | str) -> UnusableSampleError:
    cause = cause_of(error)
    return unusable(cause, path, f"it cannot be read: {error.strerror or error}")
