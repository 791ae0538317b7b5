"""Reads ahead: the next batches are begun early, a thread makes them while the caller works, the disk begins first.

Guarantee: the same results in the same order as without a thread. An error is raised at the result it belongs to. At
most ``depth`` results wait, and one more is begun. A caller that asks again at once makes results itself: to hand one
over would cost as much. One that works for a while finds the next one made. The thread ends when the iterator is
exhausted, closed or forgotten, and before the interpreter does. A process forked in the middle makes the rest alone.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from latentcache.store.reader import Place

#: Places of a batch that are looked at; once so many batches in a row were found in memory, one batch of so many.
_LOOKS, _CALM, _SELDOM = 4, 8, 32
#: Batches that are announced before they are begun, and more of small ones: bytes, and batches at most. Batches of
#: 1 MiB come from a disk 1.6 times as fast if 8 are announced and not 2.
_ANNOUNCED, _ANNOUNCED_BYTES, _ANNOUNCED_MOST = 2, 8 << 20, 12
#: Kernels fetch no more than this for one piece of advice where a disk has the usual setting of 128 KiB.
_PIECE_BYTES = 128 << 10
_HAS_ADVICE = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")
#: Seconds of work between two results from which a thread is worth its cost, about 0.1 ms.
_WORKS_S = 0.0005
#: Seconds that the thread waits before it works again, at most and as a part of the caller's work. The caller got a
#: batch and drops the last one, for which torch releases the interpreter's lock: a thread that works at once takes it
#: then for 0.3 to 0.8 ms. With this the median wait of a step of 4 ms fell from 0.1-0.5 to 0.06-0.1 ms.
_PAUSE_S, _PAUSE_PART = 0.0003, 8
_BYTE = (bytearray(1),)

Made_co = TypeVar("Made_co", covariant=True)
Made = TypeVar("Made")


class Work(Protocol[Made_co]):
    """Work that makes one result."""

    def places(self) -> Sequence[Place]:
        """Return the places of its bytes, as far as they are known."""

    def begin(self) -> None:
        """Begin with what goes on by itself; if that fails, :meth:`finish` does it again."""

    def finish(self) -> Made_co:
        """The result."""


class _EndError(Exception):
    """There are no more results."""


class _Queue(Generic[Made]):
    """A queue of results in order. The caller makes them, or a thread ahead of it: whoever holds the lock.

    Beside pure Python a thread gets the interpreter's lock every 5 ms at the earliest. So it makes results until
    ``depth`` of them wait before it releases the queue's lock. A caller that finds the queue empty waits meanwhile.
    One more than wait is begun.
    """

    def __init__(self, works: Iterable[Work[Made]], depth: int) -> None:
        self._works, self._depth, self._lock, self._closed = iter(works), depth, threading.Lock(), False
        self._begun = deque[Work[Made]]()
        self._ready = SimpleQueue[tuple[Made | None, BaseException | None]]()
        self._requests = SimpleQueue[float | None]()
        self._thread: threading.Thread | None = None

    def take(self) -> Made:
        """The next result, or its error; _EndError if there is none."""
        if self._ready.empty():
            if self._lock.acquire(blocking=False):
                self._make(1)
            else:
                self._requests.put(0.0)
        made, error = self._ready.get()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return made  # type: ignore[return-value]  # without an error it was made

    def make_ahead(self, pause: float) -> None:
        """Have the thread make what there is room for, after a pause in seconds."""
        if self._thread is None:
            for thread in [one for one in list(_RUNNING) if not one.is_alive()]:
                _RUNNING.pop(thread, None)
            self._thread = threading.Thread(target=self.serve, name="latentcache-read-ahead", daemon=True)
            self._thread.start()
            _RUNNING[self._thread] = self
        self._requests.put(pause)

    def serve(self) -> None:
        """Make results on each request; runs in the thread."""
        while (pause := self._requests.get()) is not None:
            time.sleep(pause)
            self._lock.acquire()
            self._make(self._depth)

    def _make(self, count: int) -> None:
        """Make results until ``count`` wait for the caller, then release the lock, which is held on entry."""
        try:
            while self._ready.qsize() < count and not self._closed:
                try:
                    self._ready.put((self._next(), None))
                except BaseException as error:  # noqa: BLE001 -- the caller raises it
                    self._ready.put((None, error))
        finally:
            self._lock.release()

    def _next(self) -> Made:
        begun = self._begun
        while len(begun) + self._ready.qsize() <= self._depth and (work := next(self._works, None)) is not None:
            with contextlib.suppress(Exception):  # raised when the caller comes to it
                work.begin()
            begun.append(work)
        if not begun:
            raise _EndError
        return begun.popleft().finish()

    def end(self, *, wait: bool = False) -> None:
        """Have the thread end after what it is doing."""
        self._closed, self._works, self._begun = True, iter(()), deque()
        self._requests.put(None)
        if wait and self._thread is not None:
            self._thread.join()
        while not self._ready.empty():
            self._ready.get()


def read_ahead(source: Callable[[int], Iterable[Work[Made]]], depth: int) -> Generator[Made]:
    """The result of each work, made ahead of the caller.

    ``source`` gives the works from a number on, and is asked again in a forked process. ``depth`` results may wait
    while one more is begun; 0 makes each when it is asked for.
    """
    served, worked, forks, queue = 0, 0.0, _forks, _Queue(source(0), depth)
    ended = _EndError  # at the end of Python the module has no names any more
    try:
        while True:
            if forks != _forks:  # what was begun is in another process
                forks, queue = _forks, _Queue(source(served), depth)
            made = [queue.take()]
            if depth and worked > _WORKS_S:
                queue.make_ahead(min(worked / _PAUSE_PART, _PAUSE_S))
            served, left = served + 1, time.perf_counter()
            yield made.pop()  # nothing here holds it meanwhile
            worked = (worked + time.perf_counter() - left) / 2
    except ended:
        queue.end(wait=True)
    finally:
        if forks == _forks:
            queue.end()  # no join here, which may be anywhere that garbage is collected


#: How often this process was forked off from another on the way from its interpreter's start.
_forks = 0
#: Threads are held until they are dead, so that the end of the process waits for each.
_RUNNING: dict[threading.Thread, _Queue[Any]] = {}


def _end_all() -> None:
    """Before the interpreter goes: a thread that came back into torch afterwards could abort the process."""
    for queue in list(_RUNNING.values()):
        queue.end(wait=True)


def _forked() -> None:
    """In the child: none of the threads is here."""
    global _forks
    _forks += 1
    _RUNNING.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forked)


def announced(works: Iterable[Work[Made]]) -> Iterator[Work[Made]]:
    """The same; the kernel fetches those that the page cache does not hold before they are begun.

    Decides nothing about what is read, only when the disk begins; nothing here can fail a read.
    """
    pending: deque[Work[Made]] = deque()
    calm, ahead = 0, _ANNOUNCED
    for number, work in enumerate(works):
        if _HAS_ADVICE and (calm < _CALM or not number % _SELDOM):
            with contextlib.suppress(OSError):  # the read says what is wrong, and of which entry
                places = work.places()
                looks = places[:: -(-len(places) // _LOOKS) or 1]
                calm = calm + 1 if all(is_cached(file, at + max(size - 1, 0)) for file, at, size in looks) else 0
                ahead = _ANNOUNCED
                if not calm:
                    announce(places)
                    small = _ANNOUNCED_BYTES // max(sum(size for *_, size in places), 1)
                    ahead = max(_ANNOUNCED, min(small, _ANNOUNCED_MOST))
        pending.append(work)
        while len(pending) > ahead:
            yield pending.popleft()
    yield from pending


def announce(places: Sequence[Place]) -> None:
    """Have the kernel begin to fetch bytes. OSError if a file cannot be read."""
    for file, start, length in sorted(places):
        for piece in range(start, start + length, _PIECE_BYTES):
            os.posix_fadvise(file, piece, min(_PIECE_BYTES, start + length - piece), os.POSIX_FADV_WILLNEED)


def is_cached(file: int, place: int) -> bool:
    """True if a byte can be read without waiting for a disk; False also if the file system cannot say."""
    try:
        os.preadv(file, _BYTE, place, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            return False
        raise
    return True
