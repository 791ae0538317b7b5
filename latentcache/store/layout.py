"""Where things lie inside a cache folder, and how a file is put there so that a crash leaves old or new, never half.

CACHE/generations/000007/   manifest.json and the columns
CACHE/CURRENT               the generation that readers open
CACHE/shards/<id>.open/     LMDB environment being written; readers ignore it
CACHE/shards/<id>/          sealed: data.mdb, index.npy, shard.json, never written again
CACHE/quarantine/           shards too damaged to be used, kept for a look
CACHE/reports/              what the last run of each command said; nothing reads it back
CACHE/BUILDING              present from the start of a build to its end: what it set out to do
CACHE/builder.lock          our own lock, held by the process that builds
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.errors import CacheDamagedError, CacheNotFoundError, CacheReadOnlyError, DiskFullError

#: Error numbers that mean "no space": LMDB reports a full disk as EIO.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Error numbers that mean "not yours to write".
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
OPEN_SUFFIX = ".open"
_CURRENT = re.compile(rb"[0-9]{6,}\n")


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The paths of one cache."""

    root: Path

    @property
    def current(self) -> Path:
        """The file that names the generation readers open."""
        return self.root / "CURRENT"

    @property
    def building(self) -> Path:
        """The marker of a build that has not ended."""
        return self.root / "BUILDING"

    @property
    def lock(self) -> Path:
        """The builder's lock file; never deleted."""
        return self.root / "builder.lock"

    @property
    def shards(self) -> Path:
        """Folder of the shards."""
        return self.root / "shards"

    @property
    def quarantine(self) -> Path:
        """Folder of shards that cannot be used."""
        return self.root / "quarantine"

    @property
    def reports(self) -> Path:
        """Folder of the reports."""
        return self.root / "reports"

    def generation(self, number: int) -> Path:
        """Folder of one generation."""
        return self.root / "generations" / f"{number:06d}"

    def sealed_shards(self) -> list[Path]:
        """Sealed shards in the order of their names."""
        return [path for path in self._shard_folders() if path.suffix != OPEN_SUFFIX]

    def check_shards(self) -> None:
        """See that the shards can be listed: what cannot be looked at must not pass for nothing.

        Raises:
            CacheDamagedError: There is a folder of shards, and it cannot be read.
        """
        try:
            os.listdir(self.shards)  # noqa: PTH208 - nothing but the error is wanted
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unreadable(self.shards, error) from error

    def open_shards(self) -> list[Path]:
        """Shards that are being written, or were when their builder died."""
        return [path for path in self._shard_folders() if path.suffix == OPEN_SUFFIX]

    def current_generation(self) -> int:
        """Number of the generation readers open, 0 when no build has ended yet.

        Raises:
            CacheNotFoundError: This folder is no cache.
            CacheDamagedError: ``CURRENT`` does not name a generation.
        """
        try:
            text = read_file(self.current)
        except FileNotFoundError:
            if self.building.exists() or self.shards.is_dir():
                return 0
            raise CacheNotFoundError(
                f"no cache at {self.root}",
                where=str(self.root),
                why="the folder has neither CURRENT nor shards/" if self.root.is_dir() else "no such folder",
                fix="make one with `latentcache build DATA`, or check the path",
            ) from None
        except NotADirectoryError as error:
            raise CacheNotFoundError(
                f"no cache at {self.root}", where=str(self.root), why=str(error), fix="check the path"
            ) from error
        except OSError as error:
            raise _unreadable(self.current, error) from error
        if not _CURRENT.fullmatch(text) or not int(text):
            newest = max(self.generations(), default=0)
            raise CacheDamagedError(
                "CURRENT names no generation",
                where=str(self.current),
                why=f"expected six digits and a line end, found {text[:40]!r}",
                fix=f"echo {newest:06d} > {self.current}" if newest else f"rm {self.current}, then build again",
            )
        return int(text)

    def generations(self) -> list[int]:
        """Numbers of the generations that were written whole, current or not, upwards."""
        manifests = (self.root / "generations").glob("*/manifest.json")
        return sorted(int(path.parent.name) for path in manifests if path.parent.name.isdecimal())

    def _shard_folders(self) -> list[Path]:
        return sorted(path for path in self.shards.glob("*") if path.is_dir())


def open_file(path: Path | str) -> int:
    """Descriptor of a regular file, for reading; a pipe or a device in its place neither hangs nor goes on for ever.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_file(path: Path) -> bytes:
    """All bytes of a regular file. Errors as :func:`open_file`."""
    with os.fdopen(open_file(path), "rb") as file:
        return file.read()


def write_atomically(path: Path, data: bytes) -> None:
    """Write, fsync, rename, fsync the folder: after a power cut the file is the old one or the new one.

    Raises:
        DiskFullError: No space.
        CacheReadOnlyError: The folder cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise as_store_error(error, path) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """One JSON object, ASCII, put there atomically. Errors as :func:`write_atomically`."""
    write_atomically(path, json_bytes(value))


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """One JSON object as it is written: ASCII, one value a line."""
    return json.dumps(value, indent=1, ensure_ascii=True).encode("ascii") + b"\n"


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object.

    Raises:
        CacheDamagedError: Missing, unreadable or no JSON object.
    """
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(value, dict):
        raise CacheDamagedError(f"{path.name} holds no JSON object", where=str(path))
    return value


def _unreadable(path: Path, error: Exception) -> CacheDamagedError:
    """What cannot be read. Where permission is all that is missing, nothing may advise to remove it."""
    fix = f"chmod -R u+rX {shlex.quote(str(path.parent))}" if isinstance(error, PermissionError) else ""
    return CacheDamagedError(f"{path.name} cannot be read", where=str(path), why=str(error), fix=fix)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, each durable in the folder above it.

    Raises:
        CacheReadOnlyError: The parent cannot be written, or is a file.
        DiskFullError: No space.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync_folder(folder.parent)
    except OSError as error:
        raise as_store_error(error, path) from error


def sync_folder(path: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_store_error(error: OSError, path: Path) -> DiskFullError | CacheReadOnlyError:
    """The error of ours that says what the operating system meant."""
    if error.errno in DISK_FULL:
        return DiskFullError("the disk is full", where=str(path), why=str(error))
    reason = "read-only" if error.errno in READ_ONLY else "not usable"
    return CacheReadOnlyError(
        f"the cache folder cannot be written: {path}",
        where=str(path),
        why=f"{reason}: {error}",
        fix="give another folder with --out, or change its permissions",
    )
