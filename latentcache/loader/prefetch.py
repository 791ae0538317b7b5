"""Reads ahead: a thread makes the next batches while the caller works on this one; the disk begins even earlier.

Guarantee: the same results in the same order as without a thread; an error is raised at the result it belongs to; at
most ``depth`` results wait or are being made. The thread ends when the iterator is exhausted, closed or forgotten,
and before the interpreter does. A process forked in the middle has no such thread: the iterator goes on without.
Nothing here takes a lock that a fork could leave held. A caller that waits longer than it works makes results itself,
all of them if they are made faster than they are handed over.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from latentcache.store.reader import Place

#: Places of a batch that are looked at; once so many batches in a row were found in memory, one batch of so many.
_LOOKS, _CALM, _SELDOM = 4, 8, 32
#: Batches that are announced before they are begun.
_ANNOUNCED = 2
#: Kernels fetch no more than this for one piece of advice where a disk has the usual setting of 128 KiB.
_PIECE_BYTES = 128 << 10
_HAS_ADVICE = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")
#: Seconds of making a result below which handing it over costs as much.
_BRIEF_S = 0.0005
#: Where a look puts the byte that it finds.
_BYTE = (bytearray(1),)

Made_co = TypeVar("Made_co", covariant=True)
Made = TypeVar("Made")


class Work(Protocol[Made_co]):
    """What makes one result."""

    def places(self) -> Sequence[Place]:
        """Where its bytes are, as far as they are known."""

    def begin(self) -> None:
        """Begin with what goes on by itself."""

    def finish(self) -> Made_co:
        """The result. May be called again in a forked process."""


class Failed:
    """Work that failed before it was begun: the error comes at its place."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def places(self) -> Sequence[Place]:
        """None."""
        return ()

    def begin(self) -> None:
        """Nothing to do."""

    def finish(self) -> Any:
        """Raise the error."""
        raise self._error


class _Job(Generic[Made]):
    """A piece of work that is done once, by whoever comes first."""

    def __init__(self, work: Work[Made]) -> None:
        self._work, self._free = work, [work]
        self._made: SimpleQueue[tuple[Made | None, BaseException | None]] = SimpleQueue()

    def do(self) -> bool:
        """Do it here; False: it is begun or done already."""
        try:
            work = self._free.pop()
        except IndexError:
            return False
        try:
            self._made.put((work.finish(), None))
        except BaseException as error:  # noqa: BLE001 -- the caller raises it
            self._made.put((None, error))
        return True

    @property
    def done(self) -> bool:
        """True if the result waits."""
        return not self._made.empty()

    def take(self, *, alone: bool) -> Made:
        """The result; ``alone``: a thread that has begun with it is in another process."""
        if alone and not self.done:
            return self._work.finish()
        self.do()
        made, error = self._made.get()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return made  # type: ignore[return-value]  # without an error it was made


_Jobs = SimpleQueue[_Job[Any] | None]


class _Pace:
    """How fast the caller asks: seconds between results, and until it had one; the last ones count most."""

    def __init__(self) -> None:
        self._worked = self._waited = 0.0
        self._at = time.perf_counter()

    def asked(self) -> None:
        """The caller wants a result."""
        begun, self._at = self._at, time.perf_counter()
        self._worked = self._worked / 2 + self._at - begun

    def served(self) -> None:
        """It has one."""
        begun, self._at = self._at, time.perf_counter()
        self._waited = self._waited / 2 + self._at - begun

    @property
    def hasty(self) -> bool:
        """True if it waits longer than it works."""
        return self._worked < self._waited

    @property
    def alone(self) -> bool:
        """True if it is hasty and results are made faster than a thread could hand them over."""
        return self._worked < self._waited < 2 * _BRIEF_S


def read_ahead(works: Iterable[Work[Made]], depth: int, *, threaded: bool = True) -> Generator[Made]:
    """The result of each, begun up to ``depth`` ahead of the caller.

    Args:
        works: Asked for in the caller's thread.
        depth: Results that may wait for the caller while no further one is begun; 0 makes each when it is asked for.
        threaded: True to have a thread make results; False if what is begun goes on by itself.
    """
    if not threaded or depth < 1:
        yield from _begun_ahead(works, depth)
        return
    coming, waiting, pace, forks = iter(works), deque[_Job[Made]](), _Pace(), _forks
    jobs: _Jobs = SimpleQueue()
    thread: threading.Thread | None = None
    ready: list[Made] = []
    try:
        while True:
            while len(waiting) < depth and (work := next(coming, None)) is not None:
                waiting.append(_Job(work))
                if forks == _forks and not pace.alone:
                    thread = thread or _started(jobs)
                    jobs.put(waiting[-1])
            if ready:
                yield ready.pop()  # nothing here holds it meanwhile
            if not waiting:
                break
            pace.asked()
            job = waiting.popleft()
            if not job.do() and pace.hasty and not job.done:
                any(other.do() for other in waiting)  # the next one, until the thread is done with this one
            ready.append(job.take(alone=forks != _forks))
            pace.served()
            del job
    finally:
        if thread is not None and forks == _forks:
            _end(jobs)
        waiting.clear()  # not left to a thread: no join here, which may be anywhere that garbage is collected
    if thread is not None and forks == _forks:
        thread.join()  # nothing reads any more once the last result was taken


def _begun_ahead(works: Iterable[Work[Made]], depth: int) -> Generator[Made]:
    """What is begun goes on by itself; with a depth of 0 nothing is begun ahead."""
    waiting: deque[Work[Made]] = deque()
    for work in works:
        waiting.append(_begun(work) if depth else work)
        if len(waiting) > depth:
            yield waiting.popleft().finish()
    while waiting:
        yield waiting.popleft().finish()


def _begun(work: Work[Made]) -> Work[Made]:
    try:
        work.begin()
    except Exception as error:  # noqa: BLE001 -- raised when the caller comes to it
        return Failed(error)
    return work


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job.do()
        del job


def _end(jobs: _Jobs) -> None:
    """Have a thread end after what it is doing."""
    with contextlib.suppress(Empty):
        while True:
            jobs.get_nowait()
    jobs.put(None)


def _started(jobs: _Jobs) -> threading.Thread:
    for thread in list(_RUNNING):
        if not thread.is_alive():
            _RUNNING.pop(thread, None)
    thread = threading.Thread(target=_serve, args=(jobs,), name="latentcache-read-ahead", daemon=True)
    thread.start()
    _RUNNING[thread] = jobs
    return thread


#: How often this process was forked off from another on the way from its interpreter's start.
_forks = 0
#: Threads are held until they are dead, so that the end of the process waits for each.
_RUNNING: dict[threading.Thread, _Jobs] = {}


def _end_all() -> None:
    """Before the interpreter goes: a thread that came back into torch afterwards could abort the process."""
    for thread, jobs in list(_RUNNING.items()):
        _end(jobs)
        thread.join()


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
    coming: deque[Work[Made]] = deque()
    calm = 0
    for number, work in enumerate(works):
        if _HAS_ADVICE and (calm < _CALM or not number % _SELDOM):
            with contextlib.suppress(OSError):  # the read says what is wrong, and of which entry
                places = work.places()
                looks = places[:: -(-len(places) // _LOOKS) or 1]
                calm = calm + 1 if all(is_cached(file, at + max(size - 1, 0)) for file, at, size in looks) else 0
                if not calm:
                    announce(places)
        coming.append(work)
        if len(coming) > _ANNOUNCED:
            yield coming.popleft()
    yield from coming


def announce(places: Sequence[Place]) -> None:
    """Have the kernel begin to fetch bytes.

    Raises:
        OSError: A file cannot be read.
    """
    for file, start, length in sorted(places):
        for piece in range(start, start + length, _PIECE_BYTES):
            os.posix_fadvise(file, piece, min(_PIECE_BYTES, start + length - piece), os.POSIX_FADV_WILLNEED)


def is_cached(file: int, place: int) -> bool:
    """True if a byte can be read without waiting for a disk; False also if the file system cannot say.

    Raises:
        OSError: It cannot be read at all.
    """
    try:
        os.preadv(file, _BYTE, place, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            return False
        raise
    return True
