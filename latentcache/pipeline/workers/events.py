"""The event file: one line per durable commit, for programs that follow a build from outside.

Guarantee: a line is written with a single ``write``, after its commit has returned. A line that a full disk cuts
short is taken back.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from latentcache.errors import UsageError
from latentcache.store.atomic_io import writing


class EventLog:
    """Appends events to a file; without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._descriptor = path, -1
        if path is not None:
            try:
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except OSError as error:
                words = f"--events={path}: cannot be written"
                raise UsageError(words, where=str(path), why=str(error), fix="give another --events FILE") from error

    def commit(self, keys: Sequence[bytes]) -> None:
        """Append one line for keys that are durable."""
        if self._path is None:
            return
        line = (json.dumps({"event": "commit", "keys": [key.hex() for key in keys]}) + "\n").encode("ascii")
        with writing(self._path):
            written = os.write(self._descriptor, line)
            if written < len(line):
                with suppress(OSError):  # a pipe
                    os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes of an event were written")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._path is not None:
            os.close(self._descriptor)
