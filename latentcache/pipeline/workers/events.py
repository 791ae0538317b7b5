"""The event file: one line per durable commit, for programs that follow a build from outside.

Guarantee: a line is written with a single ``write``, after its commit has returned. A line that a full disk cuts
short is taken back.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from latentcache.errors import DiskFullError, LatentcacheError, UsageError
from latentcache.store.atomic_io import DISK_FULL


class EventLog:
    """Appends events to a file; without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._descriptor: int | None = None
        if path is None:
            return
        try:
            # A pipe that nobody reads is an error at once, and would be waited for without O_NONBLOCK.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._descriptor = os.open(path, flags, 0o644)
            os.set_blocking(self._descriptor, True)
        except OSError as error:
            raise self._failed(error) from error

    def commit(self, keys: Sequence[bytes]) -> None:
        """Append one line for keys that are durable."""
        if self._descriptor is None:
            return
        line = (json.dumps({"event": "commit", "keys": [key.hex() for key in keys]}) + "\n").encode("ascii")
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise self._failed(error) from error
        if written < len(line):
            with contextlib.suppress(OSError):  # a pipe
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise _full(self._path, f"{written} of {len(line)} bytes of an event were written")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _failed(self, error: OSError) -> LatentcacheError:
        if error.errno in DISK_FULL:
            return _full(self._path, str(error))
        return UsageError(
            f"--events={self._path}: cannot be written",
            where=str(self._path),
            why=str(error),
            fix="give another --events FILE",
        )


def _full(path: Path | None, why: str) -> DiskFullError:
    return DiskFullError("the disk is full", where=str(path), why=why)
