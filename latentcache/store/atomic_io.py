"""Put files into a cache and read them: a crash leaves the old file or the new one, never half.

Guarantee: what ``write_atomically`` has written is durable when it returns. Trouble with the disk comes as an error
of this package that says what to do. Nothing but a regular file is ever opened for reading.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import stat
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from latentcache.errors import CacheDamagedError, CacheReadOnlyError, DiskFullError, StoreError
from latentcache.failpoint import failpoint

Buffer = bytes | bytearray | memoryview
#: Error numbers that mean "no space": LMDB reports a full disk as EIO.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Error numbers that mean "not yours to write".
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def open_file(path: Path | str) -> int:
    """Descriptor of a regular file, for reading; a pipe or a device in its place is an OSError, not a wait."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EISDIR, "not a regular file", str(path))
    return descriptor


@contextlib.contextmanager
def file_descriptor(path: Path) -> Iterator[int]:
    """As :func:`open_file`; closed at the end."""
    descriptor = open_file(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(path: Path) -> bytes:
    """All bytes of a regular file. Errors as :func:`open_file`."""
    with os.fdopen(open_file(path), "rb") as file:
        return file.read()


def write_atomically(path: Path, data: bytes) -> None:
    """Write, fsync, rename, fsync the folder: after a power cut the file is the old one or the new one."""
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another one at the end, as :func:`write_atomically` has it."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            failpoint("temporary-written")
            os.fsync(file.fileno())
        failpoint("after-fsync")
        temporary.replace(path)
        failpoint("after-rename")
        sync_folder(path.parent)
        failpoint("folder-synced")
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise as_store_error(error, path) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """One JSON object, ASCII, one value a line, put there atomically. Errors as :func:`write_atomically`."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=True).encode("ascii") + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object."""
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from error
    if not isinstance(value, dict):
        raise CacheDamagedError(f"{path.name} holds no JSON object", where=str(path))
    return value


def unreadable(path: Path, error: Exception) -> StoreError:
    """The error for a file or folder that could not be read.

    Wrong bytes and missing files are damage. A failing disk and a missing permission say nothing about the bytes, so
    the caller must not set anything aside or make it again.
    """
    if isinstance(error, StoreError):
        return error
    problem, where, why = f"{path.name} cannot be read", str(path), str(error)
    if not isinstance(error, OSError) or error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        return CacheDamagedError(problem, where=where, why=why)
    if error.errno in DISK_FULL:
        return as_store_error(error, path)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StoreError(
            problem, where=where, why=why, fix="ulimit -n 65536, then run again: each shard is an open file"
        )
    denied = isinstance(error, PermissionError)
    mend = f"chmod -R u+rX {shlex.quote(str(path.parent))}" if denied else "check the disk"
    never = f"if it can never be read again: mv {shlex.quote(where)} elsewhere, then build"
    return StoreError(problem, where=where, why=why, fix=f"{mend}, then run again; {never}")


def make_folder(path: Path) -> list[Path]:
    """Make a folder and its parents, each durable in the folder above it; return those that were not there."""
    try:
        missing = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync_folder(folder.parent)
    except OSError as error:
        raise as_store_error(error, path) from error
    return missing


def remove_durably(path: Path) -> None:
    """Remove a file, if it is there, so that no power cut brings it back."""
    with writing(path):
        if path.exists():
            path.unlink()
            sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make durable what any process wrote to a file, the dead ones too; or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the system about a path of the cache into errors of this package."""
    try:
        yield
    except StoreError:  # translated already; some of them are errors of the system too
        raise
    except OSError as error:
        raise as_store_error(error, path) from error


def as_store_error(error: OSError, path: Path) -> StoreError:
    """The error of this package for an error of the system."""
    if error.errno in DISK_FULL:
        return DiskFullError("the disk is full", where=str(path), why=str(error))
    if error.errno == errno.EIO:
        fix = "check the disk, then run the same command again: committed work is kept"
        return StoreError("the disk reports an error", where=str(path), why=str(error), fix=fix)
    reason = "read-only" if error.errno in READ_ONLY else "not usable"
    return CacheReadOnlyError(
        f"the cache folder cannot be written: {path}",
        where=str(path),
        why=f"{reason}: {error}",
        fix="change its permissions or mount it for writing; or build into another folder with --out",
    )
