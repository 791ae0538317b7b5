"""Follows a build: fills in keys and places of a generation to be as its entries arrive, and waits for them.

Guarantee: a row that is there is a committed entry of a sealed shard, checked when it is read like any other; a
sample that cannot be used after all, or that does not come in time, is an error that names it. Nothing is written.
Cost: one look at two folders per poll, and about 200 bytes of memory per entry that arrived.
"""

from __future__ import annotations

import atexit
import contextlib
import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import (
    CacheDamagedError,
    CacheNotFoundError,
    LatentcacheError,
    MissingEntryError,
    NotYetEncodedError,
)
from latentcache.identity.key import EntryKey
from latentcache.store.coming import load_announced, log_path, read_arrivals, sealed_since
from latentcache.store.generation import Generation, load_generation
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_in_words

#: Seconds between two looks; a build seals a shard every few seconds.
POLL_S = 0.25
_ABSENT, _GONE = -1, -2


class Arrivals:
    """What has arrived of a generation to be. Picklable; each process looks for itself.

    Args:
        layout: The cache.
        generation: As it was announced; its keys, shards and offsets are filled in here.
        timeout_s: How long one batch waits for its entries, seconds.
    """

    def __init__(self, layout: CacheLayout, generation: Generation, *, timeout_s: float) -> None:
        self._layout, self._timeout_s = layout, timeout_s
        self.shards: list[str] = []
        self._rows, self._samples = generation.rows, generation.samples
        self._before, self._buckets = generation.number - 1, generation.buckets
        self._part, self._root = generation.recipe.key_part, str(generation.manifest["source"]["root"])
        order = np.argsort(self._rows.sample, kind="stable")
        ends = np.cumsum(np.bincount(self._rows.sample, minlength=len(self._samples.names)))
        self._rows_of = np.split(order, ends[:-1]) if len(ends) else []
        self._log, self._log_place = log_path(layout, str(generation.manifest["log"])), 0
        self._located: dict[bytes, tuple[int, int]] = {}
        self._wanted: dict[bytes, list[int]] = {}
        self._ended = False
        for sample in np.flatnonzero(self._samples.content.any(axis=1)).tolist():
            self._known(sample, self._samples.content[sample].tobytes())
        self._ready()

    def _ready(self) -> None:
        self._lock, self._leave = threading.Lock(), threading.Event()
        atexit.register(self._leave.set)  # a thread that waits here must not hold up the end of the interpreter

    @property
    def arrived(self) -> int:
        """Rows whose entries are there, as of the last look."""
        return int((self._rows.shard >= 0).sum())

    def wait(self, rows: Sequence[int] | NDArray[np.integer]) -> None:
        """Return when the entries of these rows are there.

        Raises:
            MissingEntryError: A sample cannot be used after all.
            NotYetEncodedError: Time is up; the sample is named, and whether the build still runs.
        """
        deadline = time.monotonic() + self._timeout_s
        while missing := [int(row) for row in rows if self._rows.shard[row] < 0]:
            self._refuse_gone(missing)
            self.poll()
            if all(self._rows.shard[row] >= 0 for row in missing):
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
                if content is None:
                    self._rows.shard[self._rows_of[sample]] = _GONE
                else:
                    self._known(sample, content)
            for folder in sealed_since(self._layout, self.shards):
                self._take(folder)
            if ended:
                self._finish()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_leave")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._ready()

    def _known(self, sample: int, content: bytes) -> None:
        """A sample's content, and so the keys of its rows."""
        self._samples.content[sample] = np.frombuffer(content, dtype=np.uint8)
        for row in self._rows_of[sample].tolist():
            bucket = self._buckets[int(self._rows.bucket[row])]
            key = EntryKey(content=content, bucket=bucket, recipe=self._part).pack()
            self._rows.key[row] = np.frombuffer(key, dtype=np.uint8)
            place = self._located.get(key)
            if place is None:
                self._wanted.setdefault(key, []).append(row)
            else:
                self._place(row, *place)

    def _take(self, folder: Path) -> None:
        """The entries of a sealed shard. One that cannot be read is left to the build to mend."""
        try:
            index = load_index(folder)
        except LatentcacheError:
            return
        number = len(self.shards)
        self.shards.append(folder.name)
        for key, offset in zip(index.keys(), index.rows["offset"].tolist(), strict=True):
            self._located.setdefault(key, (number, offset))
            for row in self._wanted.pop(key, ()):
                self._place(row, number, offset)

    def _place(self, row: int, shard: int, offset: int) -> None:
        self._rows.offset[row] = offset
        self._rows.shard[row] = shard  # last: other threads look at this one

    def _has_ended(self) -> bool:
        with contextlib.suppress(LatentcacheError):
            return self._layout.current_generation() > self._before
        return False

    def _finish(self) -> None:
        """The build has ended: whatever its generation does not have will not come."""
        try:
            final = load_generation(self._layout.root)
        except (CacheNotFoundError, CacheDamagedError):
            return
        number = {name: position for position, name in enumerate(final.samples.names)}
        for sample, name in enumerate(self._samples.names):
            rows = self._rows_of[sample]
            if (self._rows.shard[rows] >= 0).all():
                continue
            if name in number:
                self._known(sample, final.samples.content[number[name]].tobytes())
        self._rows.shard[self._rows.shard == _ABSENT] = _GONE
        self._ended = True

    def _refuse_gone(self, rows: Sequence[int]) -> None:
        gone = next((row for row in rows if self._rows.shard[row] == _GONE), None)
        if gone is not None:
            raise MissingEntryError(
                f"{self._name(gone)} could not be used by the build that is under way",
                where=str(self._layout.root),
                why="it was planned, and then refused",
                fix=f"latentcache info {shlex.quote(str(self._layout.root))} --quarantine "
                '(or loader(on_bad="substitute") to go on without it)',
            )

    def _late(self, row: int) -> NotYetEncodedError:
        running = self._builder()
        root = shlex.quote(str(self._layout.root))
        return NotYetEncodedError(
            f"{self._name(row)} was not encoded within {self._timeout_s:g} s",
            where=str(self._layout.root),
            why=f"{self.arrived} of {len(self._rows.shard)} entries are there, and the build {running}",
            fix="wait longer with open_cache(..., timeout_s=...)"
            if running.startswith("runs")
            else f"latentcache build {shlex.quote(self._root)} --out {root} --stream",
        )

    def _name(self, row: int) -> str:
        return str(self._samples.names[int(self._rows.sample[row])])

    def _builder(self) -> str:
        """Whether the build still runs, as far as its lock file tells."""
        holder = builder_in_words(self._layout.lock)
        return f"runs as {holder}" if holder else "is not running"


def follow(layout: CacheLayout, *, timeout_s: float) -> Generation | None:
    """The generation that a build under way will publish, filled in as it arrives; None where none is announced.

    Args:
        layout: The cache.
        timeout_s: How long one batch waits for its entries, seconds.

    Raises:
        CacheFormatError: Announced by a newer version.
        CacheDamagedError: The announcement is damaged.
    """
    announced = load_announced(layout)
    if announced is None:
        return None
    arrivals = Arrivals(layout, announced, timeout_s=timeout_s)
    return replace(announced, shards=arrivals.shards, arrivals=arrivals)
