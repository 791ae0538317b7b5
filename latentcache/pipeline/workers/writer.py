"""Commit entries from a thread of their own, and say which of them are durable.

Guarantee: ``committed`` is called after the commit has returned, never before. Batches are committed in the order in
which they were put: once a job comes out, all entries that were put with it or before it are durable. A commit comes
at 16 MiB, after two seconds, after ``commit_every`` items or when the worker is idle. Only this thread uses LMDB.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from latentcache.pipeline.workers.batching import TrackedJob
from latentcache.store.entry import NewEntry
from latentcache.store.lock import check_owner
from latentcache.store.paths import OPEN_SUFFIX, CachePaths
from latentcache.store.shard import ShardWriter

#: Smaller commits cost more fsyncs, larger ones more memory; 8 to 16 MiB was cheapest in CPU per byte.
COMMIT_BYTES = 16 << 20
COMMIT_S = 2.0
#: Size at which a shard is sealed and the next one begins.
SHARD_BYTES = 1 << 30
#: The same if shards are sent to a URL when they are sealed: bytes, and seconds.
_SENT_BYTES, _SENT_S = 256 << 20, 600.0
#: Batches waiting for the writer; more would only hide a slow disk in memory.
_QUEUE_BATCHES = 8
_Batch = tuple[Sequence[NewEntry], Sequence[TrackedJob]]
#: Returned in place of a batch when a commit is due. An empty batch from a caller is another object.
_LATE: _Batch = ((), ())


class WriterThread:
    """The writer of one worker. Its shard is opened when the first entry arrives.

    A block of more than ``commit_every`` items is a commit of its own. Full shards are ``name-1``, ``name-2``, ...;
    the last one is ``name``. ``sealed`` takes each sealed shard: shards are smaller then, and an idle writer seals.
    After a commit without an entry it takes None, unless a shard is open.
    """

    def __init__(
        self,
        shards: Path,
        name: str,
        committed: Callable[[Sequence[NewEntry], Sequence[TrackedJob]], None],
        *,
        owner: str = "",
        commit_every: int | None = None,
        sealed: Callable[[Path | None], None] | None = None,
    ) -> None:
        self._shards, self._name, self._committed, self._owner = shards, name, committed, owner
        self._most = commit_every or 1 << 62
        self._on_sealed = sealed
        self._queue: queue.Queue[_Batch | None] = queue.Queue(_QUEUE_BATCHES)
        self._error: BaseException | None = None
        self._shard: ShardWriter | None = None
        self._waiting: list[NewEntry] = []
        self._jobs: list[TrackedJob] = []
        self._bytes = self._items = self._shard_bytes = self._sealed = 0
        self._since = self._opened = time.monotonic()
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
            while (batch := self._next()) is not None:
                entries, jobs = batch
                for entry in entries:
                    if self._items + len(entry.item_keys) > self._most:
                        self._commit()
                    self._waiting.append(entry)
                    self._bytes += len(entry.value)
                    self._items += len(entry.item_keys)
                self._jobs += jobs
                is_late = time.monotonic() - self._since >= COMMIT_S
                if is_late or not (entries or jobs) or self._bytes >= COMMIT_BYTES or self._items >= self._most:
                    self._commit()
                if self._on_sealed is not None and not (entries or jobs) and batch is not _LATE:
                    self._seal(is_last=False)
            self._commit()
            self._seal(is_last=True)
        except BaseException as error:  # noqa: BLE001 - raised by put() and finish() in the worker's loop
            self._error = error
            if self._shard is not None:
                self._shard.close()

    def _next(self) -> _Batch | None:
        """Return the next batch; an empty one: a commit is due; None: there is no more."""
        held = bool(self._waiting or self._jobs)
        try:
            return self._queue.get(timeout=max(self._since + COMMIT_S - time.monotonic(), 0.001) if held else None)
        except queue.Empty:
            return _LATE
        finally:
            if not held:
                self._since = time.monotonic()

    def _commit(self) -> None:
        if not (self._waiting or self._jobs):
            return
        if self._waiting:
            self._check_owner()
            if self._shard is None:
                self._shard = ShardWriter(self._shards / f"{self._name}{OPEN_SUFFIX}")
                self._opened = time.monotonic()
            self._shard.write(self._waiting)
            self._shard_bytes += self._bytes
        self._committed(self._waiting, self._jobs)
        self._waiting, self._jobs, self._bytes, self._items = [], [], 0, 0
        most, age = (SHARD_BYTES, math.inf) if self._on_sealed is None else (_SENT_BYTES, _SENT_S)
        if self._shard is None or self._shard_bytes >= most or time.monotonic() - self._opened >= age:
            self._seal(is_last=False)

    def _seal(self, *, is_last: bool) -> None:
        """Seal the open shard, if there is one."""
        folder = None
        if self._shard is not None:
            self._check_owner()
            self._sealed += not is_last
            folder = self._shard.seal("" if is_last else f"{self._name}-{self._sealed}")
            self._shard = None
            self._shard_bytes = 0
        if self._on_sealed is not None:
            self._on_sealed(folder)

    def _check_owner(self) -> None:
        """Raise if another build may have sealed the open shard, or may write one of its name."""
        check_owner(CachePaths(self._shards.parent).building, self._owner)
