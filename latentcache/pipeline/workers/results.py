"""Results and progress of a run, gathered in columns from the messages of its workers."""

from __future__ import annotations

import errno
import json
import os
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.fields.protocol import Failure, Job, join_noise
from latentcache.fields.table import STAT_WIDTH
from latentcache.identity.content import HASH_BYTES
from latentcache.identity.key import KEY_BYTES
from latentcache.pipeline.workers.engine import Committed, Ended, Opened, key_list
from latentcache.store.atomic_io import writing


class EventLog(AbstractContextManager["EventLog"]):
    """The file of ``--events``: one line and one ``write`` per durable commit; a line that is cut is taken back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(
                "cannot be written", argument="events", value=path, why=str(error), fix="give another file"
            ) from error

    def commit(self, keys: Sequence[bytes]) -> None:
        """Append one line for keys that are durable."""
        line = (json.dumps({"event": "commit", "keys": [key.hex() for key in keys]}) + "\n").encode("ascii")
        with writing(self._path):
            written = os.write(self._descriptor, line)
            if written < len(line):
                with suppress(OSError):  # a pipe
                    os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes of an event were written")

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)


class ReadColumns(NamedTuple):
    """Columns from reading the inputs of n jobs."""

    sample: NDArray[np.int32] = np.zeros(0, np.int32)
    """(n,) ``Job.sample``."""
    content: NDArray[np.uint8] = np.zeros((0, 0, HASH_BYTES), np.uint8)
    """(n, k, 16) of each file of a job that was reported."""
    stat: NDArray[np.uint64] = np.zeros((0, 0, STAT_WIDTH), np.uint64)
    """(n, k, 6) their stat memos; zeros if there is none."""


class RunResult:
    """Results of one or several runs of a field and outcomes of their jobs, gathered while they go on.

    ``total`` are the items of all jobs, ``cost_total`` is the cost of these jobs.
    """

    def __init__(self, field: str, total: int = 0, cost_total: int = 0, events: EventLog | None = None) -> None:
        self.field, self.total, self.cost_total, self._events = field, total, cost_total, events
        self.done = self.cost_done = 0
        """Items of jobs that are settled, and their cost: committed, found committed, or failed."""
        self.encoded = 0
        """Items that were computed and committed; once the run has ended, distinct ones."""
        self.copied = self.skipped = self.written_bytes = self.restarts = 0
        self.began = 0.0
        """``time.monotonic()`` when the first encoder was open; 0.0: nothing had to be encoded so far."""
        self.encode_s = 0.0
        """Seconds from the first open encoder to the end; 0.0: nothing was encoded."""
        self.failed: list[tuple[int, Failure]] = []
        """``Job.sample`` and why it gives no item."""
        self.waits = Counter[str](prepare=0, encode=0, write=0, idle=0)
        """Seconds, summed over workers, that the thread with the encoder spent: ``prepare`` waiting for inputs to be
        read and decoded, ``encode`` in the encoder, ``write`` waiting for the disk, ``idle`` without work."""
        self.noise: Mapping[str, Any] = {}
        self.read = ReadColumns()
        self._keys: list[bytes] = []
        self._sample, self._content, self._stat = array("i"), bytearray(), array("Q")

    def committed(self, message: Committed, settled: Mapping[int, Job]) -> None:
        """Take a commit, with the jobs that it settles."""
        self.take_keys(message.keys, message.encoded)
        self.copied += message.copied
        self.skipped += message.skipped
        self.written_bytes += message.num_bytes
        for number, stat, contents in message.read:
            if number in settled:
                self._sample.append(settled[number].sample)
                self._content += contents
                self._stat.extend(stat or [0] * (len(contents) // HASH_BYTES * STAT_WIDTH))
        for number in message.done:
            if number in settled:
                self._done(settled[number])
        for number, failure in message.failed:
            if number in settled:
                self.fail(settled[number], failure)

    def fail(self, job: Job, failure: Failure) -> None:
        """Note a job that gives no item."""
        self.failed.append((job.sample, failure))
        self._done(job)

    def opened(self, message: Opened) -> None:
        """Take note of an open encoder."""
        self.began = self.began or time.monotonic()
        self.noise = join_noise(self.noise, message.noise)

    def ended(self, message: Ended) -> None:
        """Take note of the end of a worker."""
        self.waits.update(message.waits)

    def take_keys(self, keys: bytes, encoded: int) -> None:
        """Note item keys (32 bytes each) that are durable."""
        self.encoded += encoded
        if keys:
            self._keys.append(keys)
            if self._events is not None:
                self._events.commit(key_list(keys))

    def finish(self) -> None:
        """Put the columns together."""
        keys = np.unique(np.frombuffer(b"".join(self._keys), dtype=f"S{KEY_BYTES}"))
        self.encoded = max(len(keys) - self.copied, 0)
        self.encode_s = time.monotonic() - self.began if self.began else 0.0
        if count := len(self._sample):
            self.read = ReadColumns(
                np.array(self._sample, np.int32),
                np.array(self._content, np.uint8).reshape(count, -1, HASH_BYTES),
                np.array(self._stat, np.uint64).reshape(count, -1, STAT_WIDTH),
            )

    def _done(self, job: Job) -> None:
        self.done += len(job.outputs)
        self.cost_done += job.cost
