"""Follows a build: waits for what it has said it will make, of whatever kind.

Guarantee: a row that is there is committed in a sealed shard, checked when it is read like any other; a sample that
cannot be used after all, or that does not come in time, is an error that names it. Nothing is written. What a sealed
shard holds, and whose rows that is, is known by the kind (``entry_arrivals``, ``document_arrivals``). Cost: one look
at two folders per poll.
"""

from __future__ import annotations

import atexit
import contextlib
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import LatentcacheError, MissingEntryError, NotYetEncodedError
from latentcache.store.coming import log_path, read_arrivals, sealed_since
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_in_words

#: Seconds between two looks; a build seals a shard every few seconds.
POLL_S = 0.25
#: In the place of the number of a shard or block: not there yet, and never to come.
ABSENT, GONE = -1, -2


class Expected(Protocol):
    """The rows of a generation to be, and what is known of where they lie."""

    place: NDArray[np.int32]
    """(N,) shard or block of each row, or :data:`ABSENT` or :data:`GONE`; set last, other threads look at it."""
    shards: list[str]
    """Names of the sealed shards that were taken."""
    opener: str
    """The function that opens such a cache, for messages."""
    advice: str
    """How to go on without a row, for messages; may be empty."""

    def told(self, sample: int, content: bytes | None) -> None:
        """A sample has this content; None: it cannot be used after all."""

    def take(self, folder: Path) -> None:
        """A shard was sealed. One that cannot be read is left to the build to mend, and not among ``shards``."""

    def finish(self) -> bool:
        """The build has ended: what its generation does not have will not come. Whether that is settled."""

    def name(self, row: int) -> str:
        """The sample of a row, for messages."""


class Arrivals:
    """What has arrived of a generation to be. Picklable; each process looks for itself.

    Args:
        layout: The cache.
        expected: Its rows, filled in here.
        manifest: Of the announcement.
        timeout_s: How long one batch waits for its entries, seconds.
    """

    def __init__(
        self, layout: CacheLayout, expected: Expected, manifest: Mapping[str, Any], *, timeout_s: float
    ) -> None:
        self._layout, self._expected, self._timeout_s = layout, expected, timeout_s
        self._before, self._root = int(manifest["before"]), str(manifest["source"]["root"])
        self._log, self._log_place = log_path(layout, str(manifest["log"])), 0
        self._ended = False
        self._ready()

    def _ready(self) -> None:
        self._lock, self._leave = threading.Lock(), threading.Event()
        atexit.register(self._leave.set)  # a thread that waits here must not hold up the end of the interpreter

    @property
    def arrived(self) -> int:
        """Rows whose entries are there, as of the last look."""
        return int((self._expected.place >= 0).sum())

    @property
    def shards(self) -> list[str]:
        """Sealed shards, as of the last look."""
        return self._expected.shards

    def wait(self, rows: Sequence[int] | NDArray[np.integer]) -> None:
        """Return when the entries of these rows are there.

        Raises:
            MissingEntryError: A sample cannot be used after all.
            NotYetEncodedError: Time is up; the sample is named, and whether the build still runs.
        """
        deadline, place = time.monotonic() + self._timeout_s, self._expected.place
        while missing := [int(row) for row in rows if place[row] < 0]:
            self._refuse_gone(missing)
            self.poll()
            if all(place[row] >= 0 for row in missing):
                return
            self._refuse_gone(missing)
            if time.monotonic() >= deadline or self._leave.is_set():
                raise self._late(missing[0])
            self._leave.wait(min(POLL_S, max(deadline - time.monotonic(), 0.0)))

    def poll(self) -> None:
        """Look once for what has come since the last look."""
        with self._lock:
            if self._ended:
                return
            ended = self._has_ended()
            found, self._log_place = read_arrivals(self._log, self._log_place)
            for sample, content in found:
                self._expected.told(sample, content)
            for folder in sealed_since(self._layout, self._expected.shards):
                self._expected.take(folder)
            if ended:
                self._ended = self._expected.finish()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_leave")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._ready()

    def _has_ended(self) -> bool:
        with contextlib.suppress(LatentcacheError):
            return self._layout.current_generation() > self._before
        return False

    def _refuse_gone(self, rows: Sequence[int]) -> None:
        gone = next((row for row in rows if self._expected.place[row] == GONE), None)
        if gone is not None:
            raise MissingEntryError(
                f"{self._expected.name(gone)} could not be used by the build that is under way",
                where=str(self._layout.root),
                why="it was planned, and then refused",
                fix=f"latentcache info {shlex.quote(str(self._layout.root))} --quarantine{self._expected.advice}",
            )

    def _late(self, row: int) -> NotYetEncodedError:
        running = self._builder()
        root = shlex.quote(str(self._layout.root))
        return NotYetEncodedError(
            f"{self._expected.name(row)} was not encoded within {self._timeout_s:g} s",
            where=str(self._layout.root),
            why=f"{self.arrived} of {len(self._expected.place)} entries are there, and the build {running}",
            fix=f"wait longer with {self._expected.opener}(..., timeout_s=...)"
            if running.startswith("runs")
            else f"latentcache build {shlex.quote(self._root)} --out {root} --stream",
        )

    def _builder(self) -> str:
        """Whether the build still runs, as far as its lock file tells."""
        holder = builder_in_words(self._layout.lock)
        return f"runs as {holder}" if holder else "is not running"
