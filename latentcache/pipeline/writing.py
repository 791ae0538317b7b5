"""The writer thread: takes entries, commits them in batches, and says which keys are durable.

Guarantee: ``committed`` is called after the commit has returned, never before. A commit comes at 16 MiB, after
two seconds, or after ``commit_every`` entries, whichever is first; LMDB is touched by this thread alone.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from latentcache.store.entry import NewEntry
from latentcache.store.shard import ShardWriter

#: Smaller commits cost more fsyncs, larger ones more memory; 8 to 16 MiB was cheapest in CPU per byte.
COMMIT_BYTES = 16 << 20
COMMIT_S = 2.0
#: Seconds until a shard that readers wait for is sealed, and the part of the time so far where that is more.
ROLL_S, ROLL_PART = 2.0, 1 / 20
#: Batches waiting for the writer; more would only hide a slow disk in memory.
_QUEUE_BATCHES = 8


class WriterThread:
    """One writer for one shard.

    Args:
        shard: Makes the shard; called in the writer thread, when the first entry arrives.
        committed: Called with the entries of each durable commit, in the writer thread.
        commit_every: Entries per commit at most.
        rolling: Seal the shard again and again, for readers that follow: every :data:`ROLL_S` at first, later every
            so many parts of the time it took so far, so that there are about a hundred shards after ten hours.
    """

    def __init__(
        self,
        shard: Callable[[], ShardWriter],
        committed: Callable[[Sequence[NewEntry]], None],
        *,
        commit_every: int | None = None,
        rolling: bool = False,
    ) -> None:
        self._make, self._committed, self._most, self._rolling = shard, committed, commit_every, rolling
        self._queue: queue.Queue[list[NewEntry] | None] = queue.Queue(_QUEUE_BATCHES)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, entries: list[NewEntry]) -> None:
        """Hand entries over; waits while the disk is behind.

        Raises:
            StoreError: The writer failed.
        """
        while True:
            self._raise()
            try:
                self._queue.put(entries, timeout=0.2)
            except queue.Full:
                continue
            return

    def finish(self) -> None:
        """Commit what is left and seal the shard.

        Raises:
            StoreError: The writer failed; what was committed before stays.
        """
        while self._thread.is_alive():
            try:
                self._queue.put(None, timeout=0.2)
            except queue.Full:
                continue
            break
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - handed to the build by put() and finish()
            self._error = error

    def _loop(self) -> None:
        shard: ShardWriter | None = None
        waiting: list[NewEntry] = []
        began = made = since = time.monotonic()
        try:
            while True:
                entries, ended = self._next(since + COMMIT_S - time.monotonic() if waiting else None)
                if not waiting:
                    since = time.monotonic()
                waiting += entries
                if waiting and shard is None:
                    shard, made = self._make(), time.monotonic()
                if shard is not None and waiting and (ended or self._due(waiting, since)):
                    self._commit(shard, waiting)
                    waiting = []
                    now = time.monotonic()
                    if self._rolling and now - made >= max(ROLL_S, (now - began) * ROLL_PART):
                        shard.seal(secrets.token_hex(8))
                        shard = None
                if ended:
                    break
        except BaseException:
            if shard is not None:
                shard.close()
            raise
        if shard is not None:
            shard.seal()

    def _next(self, timeout: float | None) -> tuple[list[NewEntry], bool]:
        """What was handed over, and whether it was the last."""
        try:
            entries = self._queue.get(timeout=None if timeout is None else max(timeout, 0.001))
        except queue.Empty:
            return [], False
        return (entries, False) if entries is not None else ([], True)

    def _due(self, waiting: Sequence[NewEntry], since: float) -> bool:
        size = sum(len(entry.value) for entry in waiting)
        many = self._most is not None and len(waiting) >= self._most
        return size >= COMMIT_BYTES or many or time.monotonic() - since >= COMMIT_S

    def _commit(self, shard: ShardWriter, waiting: Sequence[NewEntry]) -> None:
        step = self._most or len(waiting)
        for start in range(0, len(waiting), step):
            batch = waiting[start : start + step]
            shard.write(batch)
            self._committed(batch)
