"""Reads ahead: threads make the next batches, the disk begins with what memory lacks, a store with what it lacks.

Guarantee: the same results in the same order as without threads. An error is raised at the result it belongs to. At
most ``depth`` results wait. The threads end when the iterator is exhausted, closed or forgotten.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Condition
from typing import NamedTuple, TypeVar

import numpy as np

from latentcache.errors import UsageError
from latentcache.loader.formats import Batch
from latentcache.loader.memory import BufferPool
from latentcache.plan.numbers import human_bytes
from latentcache.plan.samples import BatchIndex, Blocks, EpochPlan, SampleIndex
from latentcache.store.gather import Ints
from latentcache.store.reader import ByteRange, ShardFile
from latentcache.store.remote.disk_cache import DiskCache
from latentcache.store.snapshot import Snapshot

#: Threads that read: one moves 0.7 of what ``memcpy`` moves, because it copies out of the system's page cache.
_THREADS = 2
#: Byte ranges of a batch that are looked at.
_LOOKS = 2
#: Kernels fetch no more than this for one piece of advice where a disk has the usual setting of 128 KiB.
_PIECE_BYTES = 128 << 10
_HAS_ADVICE = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")
_BYTE = (bytearray(1),)
#: A shard of which a window reads less than this part is not fetched whole, unless the disk has room for all shards.
_FEW = 8

Made = TypeVar("Made")


def read_ahead(works: Iterable[Callable[[], Made]], depth: int, *, in_order: bool = False) -> Generator[Made]:
    """The result of each work, made ahead of the caller.

    ``depth`` results may wait; 0 makes each when it is asked for. ``in_order`` makes one at a time.

    Raises:
        UsageError: A forked process goes on with an iteration of its parent.
    """
    if depth == 0:
        for work in works:
            yield work()
        return
    left = iter(works)
    process = os.getpid()
    pool = ThreadPoolExecutor(1 if in_order else _THREADS, "latentcache-read-ahead")
    waiting: deque[Future[Made]] = deque()
    try:
        waiting.extend(pool.submit(work) for work in islice(left, depth))
        while waiting:
            waiting.extend(pool.submit(work) for work in islice(left, 1))
            yield waiting.popleft().result()  # nothing here holds it meanwhile
            if process != os.getpid():
                raise UsageError(
                    "an iteration of a loader goes on in a forked process",
                    why="its reading threads are in the parent process",
                    fix="call iter(loader) in this process",
                )
    finally:
        if not sys.is_finalizing() and process == os.getpid():  # at exit the threads have ended already
            pool.shutdown(wait=False, cancel_futures=True)  # no join here, which may be anywhere


def read_soon(ranges: Sequence[ByteRange]) -> None:
    """Have the kernel fetch the bytes of a batch, all at once, if one of some ranges is not in memory.

    Decides nothing about what is read; nothing here can fail a read.
    """
    looks = ranges[:: -(-len(ranges) // _LOOKS) or 1]
    with contextlib.suppress(OSError):  # the read says what is wrong, and of which entry
        if _HAS_ADVICE and not all(is_cached(file, at + max(size - 1, 0)) for file, at, size in looks):
            announce(ranges)


def announce(ranges: Sequence[ByteRange]) -> None:
    """Have the kernel begin to fetch bytes. OSError if a file cannot be read."""
    for file, start, length in sorted(ranges):
        for piece in range(start, start + length, _PIECE_BYTES):
            os.posix_fadvise(file, piece, min(_PIECE_BYTES, start + length - piece), os.POSIX_FADV_WILLNEED)


def is_cached(file: int, offset: int) -> bool:
    """True if a byte can be read without waiting for a disk; False also if the file system cannot say."""
    try:
        os.preadv(file, _BYTE, offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            return False
        raise
    return True


class ShardUse(NamedTuple):
    """The shards that n items are in, all of one field of one part."""

    part: int
    snapshot: Snapshot
    at: Ints
    """(n,) positions of their samples among those that were asked for."""
    shard: Ints
    """(n,) positions in the shards of the snapshot."""
    num_bytes: Ints
    """(n,) bytes of the items."""


class Reader:
    """What a loader reads: samples of caches, or rows of tokens."""

    index: SampleIndex
    snapshots: Sequence[Snapshot]
    """The snapshot of each part."""
    excluded = 0
    """Samples that lack a field that was asked for."""
    has_labels = False
    buffers = 1
    """Buffers of a batch."""

    def check_format(self, name: str | None) -> str | None:
        """The format, if it fits; raises UsageError."""
        raise NotImplementedError

    def notes(self, title: str) -> list[str]:
        """Sentences on samples that are not served as a user expects."""
        return []

    def read(self, batch: BatchIndex, pool: BufferPool, *, on_device: bool) -> Batch:
        """The batch of an index."""
        raise NotImplementedError

    def complete(self, batch: Batch, form: str | None) -> Batch:
        """The batch before it goes to a device."""
        return batch

    def finish(self, batch: Batch, form: str | None, *, on_device: bool) -> Batch:
        """The batch where it is used."""
        return batch

    def uses(self, rows: Ints) -> Iterable[ShardUse]:
        """The shards of some samples, field by field."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the files; they are opened again when more is read."""
        raise NotImplementedError


def blocks_of(reader: Reader, count: int, samples: int) -> Blocks:
    """The samples of a reader by the shard of their largest field, for windows of so many."""
    shard = np.zeros(count, dtype=np.int32)
    largest = dict[int, int]()
    begins = np.cumsum([0, *(len(snapshot.shards) for snapshot in reader.snapshots)]).tolist()
    for use in reader.uses(np.arange(count)):
        total = int(use.num_bytes.sum())
        if total > largest.get(use.part, -1):
            largest[use.part] = total
            shard[use.at] = begins[use.part] + use.shard
    return Blocks(shard=shard, samples=samples)


class ShardFeed:
    """Has the shards of a window on the disk while it is read, and those of the next one if there is room."""

    def __init__(self, reader: Reader, plan: EpochPlan) -> None:
        self._reader, self._plan, self._changed, self._window = reader, plan, Condition(), -1
        window = np.zeros(len(plan), dtype=np.int64) if plan.window is None else plan.window
        self._begins = np.append(np.flatnonzero(np.diff(window, prepend=-1)), len(plan))
        """(windows + 1,) the first step of each."""
        self._held: dict[int, list[Future[ShardFile]]] = {}
        disks = [snapshot.disk_cache for snapshot in reader.snapshots if snapshot.disk_cache is not None]
        self._is_active = bool(disks)
        self._is_limited = any(disk.max_bytes is not None for disk in disks)
        self._begun, self._running = 0, list[int]()
        """Steps that threads have begun, and the windows of those that they read now."""

    def reach(self, step: int) -> None:
        """A step is read next. Raises UsageError if the first window needs more bytes than there may be."""
        if self._is_active:
            with self._changed:
                self._advance(self._window_of(step))

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """As :meth:`reach`, for threads, which begin the steps of an iteration in their order.

        With limited room a window begins when no thread reads the one before, so that its shards can go.
        """
        if not self._is_active:
            yield
            return
        window = self._window_of(step)
        with self._changed:
            self._changed.wait_for(lambda: self._begun == step)
            self._changed.wait_for(lambda: not self._is_limited or all(other == window for other in self._running))
            self._begun += 1
            self._running.append(window)
            self._changed.notify_all()
            try:
                self._advance(window)
            except BaseException:
                self._running.remove(window)
                raise
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(window)
                self._changed.notify_all()

    def _window_of(self, step: int) -> int:
        return int(np.searchsorted(self._begins, step, side="right")) - 1

    def _advance(self, window: int) -> None:
        if window <= self._window:
            return
        needed = self._needed(window)
        used_again = [disk.want(shard) for disk, shard in needed if disk.has(shard)]  # not removed for a new shard
        self._held = {number: shards for number, shards in self._held.items() if number >= window}
        if self._window < 0:
            self._check_room(needed)
        self._window = window
        self._hold(window, needed)
        del used_again
        following = self._needed(window + 1)
        together = {disk: _bytes([*needed, *following], disk) for disk, _ in following}
        if all(total <= (disk.max_bytes or total) for disk, total in together.items()):
            self._hold(window + 1, following)

    def _hold(self, window: int, shards: Sequence[tuple[DiskCache, str]]) -> None:
        if window not in self._held:  # those on the disk first, so that no new one takes their room
            ordered = sorted(shards, key=lambda use: not use[0].has(use[1]))
            self._held[window] = [disk.want(shard) for disk, shard in ordered]

    def _needed(self, window: int) -> list[tuple[DiskCache, str]]:
        """The shards to have on the disk for a window, in the order of their first use."""
        if window + 1 >= len(self._begins):
            return []
        first, last = self._plan.starts[self._begins[window : window + 2]].tolist()
        uses = dict[tuple[DiskCache, str], tuple[int, int]]()
        for use in self._reader.uses(self._plan.rows[first:last]):
            disk = use.snapshot.disk_cache
            numbers, begins, inverse = np.unique(use.shard, return_index=True, return_inverse=True)
            counts = np.bincount(inverse, use.num_bytes).astype(np.int64)
            for number, begin, count in zip(numbers.tolist(), use.at[begins].tolist(), counts.tolist(), strict=True):
                if disk is not None:
                    before, used = uses.get(key := (disk, use.snapshot.shards[number]), (begin, 0))
                    uses[key] = min(begin, before), used + count
        return [
            (disk, shard)
            for (disk, shard), (_, used) in sorted(uses.items(), key=lambda item: item[1])
            if disk.max_bytes is None or used * _FEW >= disk.size(shard)
        ]

    def _check_room(self, shards: Sequence[tuple[DiskCache, str]]) -> None:
        for disk in {disk for disk, _ in shards}:
            total = _bytes(shards, disk)
            if disk.max_bytes is not None and total > disk.max_bytes:
                samples = int(self._plan.starts[self._begins[1]]) * disk.max_bytes // total // 2
                raise UsageError(
                    f"{human_bytes(total)} of shards are read at a time, more than disk_cache_bytes={disk.max_bytes}",
                    where=disk.url,
                    why="samples are shuffled over more shards than there is room for",
                    fix=f"loader(..., shuffle_block={max(samples, 1)}), or more bytes",
                )


def _bytes(shards: Iterable[tuple[DiskCache, str]], disk: DiskCache) -> int:
    return sum(disk.size(shard) for owner, shard in dict.fromkeys(shards) if owner is disk)
