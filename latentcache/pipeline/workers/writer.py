"""Commit entries from a thread of their own, and say which of them are durable.

Guarantee: ``committed`` is called after the commit has returned, never before, and what was put comes out in its
order: a job that was put with or after its entries is settled when it comes out. A commit comes at 16 MiB, after two
seconds, after ``commit_every`` items or when the worker has nothing else to do; LMDB is touched by this thread alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from latentcache.pipeline.workers.tracking import TrackedJob
from latentcache.store.entry import NewEntry
from latentcache.store.paths import OPEN_SUFFIX
from latentcache.store.shard import ShardWriter

#: Smaller commits cost more fsyncs, larger ones more memory; 8 to 16 MiB was cheapest in CPU per byte.
COMMIT_BYTES = 16 << 20
COMMIT_S = 2.0
#: Seconds until a shard that readers wait for is sealed, and the part of the time so far if that is more.
ROLL_S, ROLL_PART = 2.0, 1 / 20
#: Batches waiting for the writer; more would only hide a slow disk in memory.
_QUEUE_BATCHES = 8
_Batch = tuple[Sequence[NewEntry], Sequence[TrackedJob]]


class WriterThread:
    """The writer of one worker.

    Args:
        shards: Folder of all shards.
        name: Of the shard to write; opened when the first entry arrives.
        committed: Called with the entries of each durable commit and the jobs that it settles, in the writer thread.
        commit_every: Items per commit at most.
        rolling: Seal a shard (``name-1``, ``name-2``, ...) every few seconds, for readers that follow the build:
            every :data:`ROLL_S` at first, later every :data:`ROLL_PART` of the time so far, about a hundred shards in
            ten hours.
    """

    def __init__(
        self,
        shards: Path,
        name: str,
        committed: Callable[[Sequence[NewEntry], Sequence[TrackedJob]], None],
        *,
        commit_every: int | None = None,
        rolling: bool = False,
    ) -> None:
        self._shards, self._name, self._committed = shards, name, committed
        self._most, self._rolling = commit_every, rolling
        self._queue: queue.Queue[_Batch | None] = queue.Queue(_QUEUE_BATCHES)
        self._error: BaseException | None = None
        self._sealed = 0
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, entries: Sequence[NewEntry], jobs: Sequence[TrackedJob] = ()) -> None:
        """Hand entries and settled jobs over; waits while the disk is behind. Nothing: commit without waiting."""
        self._put((entries, jobs))
        self.check()

    def finish(self) -> None:
        """Commit the rest and seal the shard. May be called again, from any thread."""
        self._put(None)
        self._thread.join()
        self.check()

    def _put(self, batch: _Batch | None) -> None:
        while self._thread.is_alive():
            try:
                self._queue.put(batch, timeout=0.2)
            except queue.Full:
                continue
            return

    def check(self) -> None:
        """Raise the error of a writer that failed since the last call."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - raised by put() and finish() in the worker's loop
            self._error = error

    def _loop(self) -> None:
        shard: ShardWriter | None = None
        waiting: list[NewEntry] = []
        jobs: list[TrackedJob] = []
        began = made = since = time.monotonic()
        try:
            while True:
                held = bool(waiting or jobs)
                batch = self._next(since + COMMIT_S - time.monotonic() if held else None)
                since = since if held else time.monotonic()
                entries, settled = batch or ((), ())
                waiting += entries
                jobs += settled
                if waiting and shard is None:
                    shard, made = ShardWriter(self._shards / f"{self._name}{OPEN_SUFFIX}"), time.monotonic()
                if (waiting or jobs) and (not (entries or settled) or self._due(waiting, since)):
                    self._commit(shard, waiting, jobs)
                    waiting, jobs = [], []
                    now = time.monotonic()
                    if shard is not None and self._rolling and now - made >= max(ROLL_S, (now - began) * ROLL_PART):
                        self._sealed += 1
                        shard.seal(f"{self._name}-{self._sealed}")
                        shard = None
                if batch is None:
                    break
        except BaseException:
            if shard is not None:
                shard.close()
            raise
        if shard is not None:
            shard.seal()

    def _next(self, timeout: float | None) -> _Batch | None:
        """What was put; nothing: a commit is due; None: there is no more."""
        try:
            return self._queue.get(timeout=None if timeout is None else max(timeout, 0.001))
        except queue.Empty:
            return (), ()

    def _due(self, waiting: Sequence[NewEntry], since: float) -> bool:
        size = sum(len(entry.value) for entry in waiting)
        many = self._most is not None and sum(len(entry.item_keys) for entry in waiting) >= self._most
        return size >= COMMIT_BYTES or many or time.monotonic() - since >= COMMIT_S

    def _commit(self, shard: ShardWriter | None, waiting: Sequence[NewEntry], jobs: Sequence[TrackedJob]) -> None:
        portions = _portions(waiting, self._most)
        for number, portion in enumerate(portions, 1):
            if shard is not None and portion:
                shard.write(portion)
            self._committed(portion, jobs if number == len(portions) else ())


def _portions(entries: Sequence[NewEntry], most: int | None) -> list[list[NewEntry]]:
    """Entries in portions of at most so many items; an entry with more items is a portion of its own."""
    if most is None or not entries:
        return [list(entries)]
    portions: list[list[NewEntry]] = []
    items = most
    for entry in entries:
        if items + len(entry.item_keys) > most:
            portions.append([])
            items = 0
        portions[-1].append(entry)
        items += len(entry.item_keys)
    return portions
