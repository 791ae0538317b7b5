"""Reads ahead: the next batches are begun early, a thread makes them while the caller works, the disk begins first.

Guarantee: the same results in the same order as without a thread. An error is raised at the result it belongs to. At
most ``depth`` results wait, and one more is begun. A caller that asks again at once makes results itself: to hand one
over would cost as much. One that works for a while finds the next one made. The thread ends when the iterator is
exhausted, closed or forgotten, and before the interpreter does. A forked process starts a thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

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
#: Seconds that the thread waits before it works, at most and as a part of the caller's work. The caller got a batch
#: and drops the last one, for which torch releases the interpreter's lock: a thread that works at once takes it then.
#: With this the median wait of a step of 20 ms fell from 0.25-0.3 to 0.1 ms.
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


class _Ahead(Generic[Made]):
    """Results in order, made by the caller or by a thread ahead of it; never by both at once."""

    def __init__(self, works: Iterable[Work[Made]], depth: int) -> None:
        self._works, self._depth, self.process = iter(works), depth, os.getpid()
        self._begun = deque[Work[Made]]()
        self._waiting = deque[Future[Made]]()
        self._pool = ThreadPoolExecutor(1, "latentcache-read-ahead")

    def take(self) -> Made:
        """The next result, or its error; _EndError if there is none."""
        while self._waiting and self._waiting[-1].cancel():
            self._waiting.pop()
        return self._waiting.popleft().result() if self._waiting else self._make()

    def make_ahead(self, pause: float) -> None:
        """Have the thread make what may wait, after a pause in seconds."""
        while len(self._waiting) < self._depth:
            self._waiting.append(self._pool.submit(self._make, pause))

    def _make(self, pause: float = 0.0) -> Made:
        time.sleep(pause)
        begun = self._begun
        while not begun or len(begun) + len(self._waiting) <= self._depth:
            work = next(self._works, None)
            if work is None:
                break
            with contextlib.suppress(Exception):  # raised when the caller comes to it
                work.begin()
            begun.append(work)
        if not begun:
            raise _EndError
        return begun.popleft().finish()

    def end(self, *, wait: bool = False) -> None:
        """Have the thread end after what it is doing."""
        self._pool.shutdown(wait=wait, cancel_futures=True)


def read_ahead(source: Callable[[int], Iterable[Work[Made]]], depth: int) -> Generator[Made]:
    """The result of each work, made ahead of the caller.

    ``source`` gives the works from a number on, and is asked again in a forked process. ``depth`` results may wait
    while one more is begun; 0 makes each when it is asked for.
    """
    served, worked, ahead = 0, 0.0, _Ahead(source(0), depth)
    try:
        while True:
            if ahead.process != os.getpid():  # forked: what was begun is in another process
                ahead = _Ahead(source(served), depth)
            made = [ahead.take()]
            if depth and worked > _WORKS_S:
                ahead.make_ahead(min(worked / _PAUSE_PART, _PAUSE_S))
            served, left = served + 1, time.perf_counter()
            yield made.pop()  # nothing here holds it meanwhile
            worked = (worked + time.perf_counter() - left) / 2
    except _EndError:
        ahead.end(wait=True)
    finally:
        if ahead.process == os.getpid() and not sys.is_finalizing():  # at exit the thread has ended already
            ahead.end()  # no join here, which may be anywhere that garbage is collected


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
