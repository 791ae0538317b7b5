"""Reads ahead: threads make the next batches while the caller works on this one; the disk begins even earlier.

Guarantee: the same results in the same order as without threads; an error is raised at the result it belongs to; at
most ``depth`` results wait or are being made, and one more for each further thread. The threads end when the iterator
is exhausted, closed or forgotten, and before the interpreter does. A process forked in the middle has no such
threads: there the iterator goes on without. Nothing here takes a lock that a fork could leave held. A caller that
waits longer than it works makes results itself, all of them if they are made faster than they are handed over.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from latentcache.errors import LatentcacheError
from latentcache.store.reader import Place

#: Places of a batch that are looked at; once so many batches in a row were found in memory, one batch of so many.
_LOOKS, _CALM, _SELDOM = 4, 8, 32
#: Kernels fetch no more than this for one piece of advice where a disk has the usual setting of 128 KiB.
_PIECE_BYTES = 128 << 10
_HAS_ADVICE = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")
#: Seconds of making a result below which handing it over costs as much.
_BRIEF_S = 0.0005
#: Results that wait while one thread is enough: a second one would take the processor from the caller.
_ENOUGH = 2
#: Where a look puts the byte that it finds.
_BYTE = (bytearray(1),)

Item = TypeVar("Item")
Made = TypeVar("Made")


class _Queue(Generic[Item, Made]):
    """What the caller and the threads share: positions of items that may be made go one way, results the other."""

    def __init__(self, make: Callable[[Item], Made], items: Sequence[Item]) -> None:
        self.make, self.items, self.closed = make, items, False
        self.allowed = 0
        self.positions: SimpleQueue[int | None] = SimpleQueue()
        self.results: SimpleQueue[tuple[int, Made | None, BaseException | None]] = SimpleQueue()
        self.calls: SimpleQueue[None] = SimpleQueue()
        self.early: dict[int, tuple[int, Made | None, BaseException | None]] = {}

    def work(self, *, helps: bool = False) -> None:
        """A thread: one result per position, until one fails or the caller leaves; a helper makes one when called."""
        while (position := self._next(helps)) is not None and not self.closed:
            try:
                self.results.put((position, self.make(self.items[position]), None))
            except BaseException as error:  # noqa: BLE001 -- the caller raises it
                self.results.put((position, None, error))
                break
        if self.closed:  # else the caller still wants them
            self.clear()

    def _next(self, helps: bool) -> int | None:
        while helps:
            self.calls.get()
            with contextlib.suppress(Empty):
                return self.positions.get_nowait()
        return self.positions.get()

    def allow(self, start: int, end: int) -> None:
        """Let threads make results from ``start`` to before ``end``."""
        for position in range(max(start, self.allowed), min(end, len(self.items))):
            self.allowed = position + 1
            self.positions.put(position)

    def take(self, position: int, *, helps: bool) -> Made:
        """The result at a position; the caller asks for them in order.

        Args:
            position: Which.
            helps: The caller makes a result itself, in place of the second thread: nothing is handed over, and two
                threads want the interpreter's lock and not three.
        """
        with contextlib.suppress(Empty):
            while position not in self.early:
                self._put(self.results.get_nowait())
        if helps and position not in self.early:
            self._help()
        elif not helps and self.results.qsize() + len(self.early) < _ENOUGH and self.calls.empty():
            self.calls.put(None)
        while position not in self.early:
            self._put(self.results.get())
        _, made, error = self.early.pop(position)
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return made  # type: ignore[return-value]  # without an error it was made

    def _put(self, result: tuple[int, Made | None, BaseException | None]) -> None:
        self.early[result[0]] = result

    def _help(self) -> None:
        """Make the next result that no thread has begun."""
        with contextlib.suppress(Empty):
            position = self.positions.get_nowait()
            if position is None:
                return
            try:
                self._put((position, self.make(self.items[position]), None))
            except Exception as error:  # noqa: BLE001 -- raised when the caller comes to it
                self._put((position, None, error))

    def close(self, threads: int) -> None:
        """Tell so many threads to end after what they are doing."""
        self.closed = True
        for _ in range(threads):
            self.positions.put(None)
            self.calls.put(None)

    def clear(self) -> None:
        """Let go of results that are not taken any more."""
        self.early.clear()
        with contextlib.suppress(Empty):
            while True:
                self.results.get_nowait()


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
        """True if it is hasty and results are made faster than threads could hand them over."""
        return self._worked < self._waited < 2 * _BRIEF_S


def read_ahead(
    make: Callable[[Item], Made], items: Sequence[Item], depth: int, *, threads: int = 1
) -> Generator[Made]:
    """``map(make, items)``, made up to ``depth`` results ahead by threads; by the caller itself if it is 0.

    Args:
        make: Called once per item; in any order, if there are several threads.
        items: All of them.
        depth: Results that may wait for the caller while no further one is begun.
        threads: How many make results at once; no more than ``depth``.
    """
    if depth < 1 or len(items) < 2:
        yield from map(make, items)
        return
    queue, forks, threads, pace = _Queue(make, items), _forks, min(threads, depth), _Pace()
    ahead = depth + threads - 1  # so that a thread never waits for the caller to take what another one made
    queue.allow(0, ahead)
    started: list[threading.Thread] = []
    try:
        for number in range(threads):
            started.append(_started(queue, helps=number > 0))  # noqa: PERF401 -- the second may fail to start
        for position, item in enumerate(items):
            here = forks == _forks
            pace.asked()
            if here and position < queue.allowed:
                ready = [queue.take(position, helps=threads > 1 and pace.hasty)]
            else:
                ready = [make(item)]
            pace.served()
            if here and not pace.alone:
                queue.allow(position + 1, position + 1 + ahead)
            yield ready.pop()  # nothing here holds it meanwhile
    finally:
        if forks == _forks:
            queue.close(threads)
            queue.clear()  # not left to a thread: no join here, which may be anywhere that garbage is collected
    for thread in started if forks == _forks else ():
        thread.join()  # nothing reads any more once the last result was taken


def begin_ahead(begin: Callable[[Item], Made], items: Sequence[Item], depth: int) -> Generator[Made]:
    """``map(begin, items)`` by the caller, called ``depth`` items ahead; what it begins goes on meanwhile.

    An error is raised at the result it belongs to.
    """
    waiting: deque[tuple[Made | None, Exception | None]] = deque()
    for position in range(len(items)):
        while len(waiting) <= depth and position + len(waiting) < len(items):
            try:
                waiting.append((begin(items[position + len(waiting)]), None))
            except Exception as error:  # noqa: BLE001 -- raised when the caller comes to it
                waiting.append((None, error))
        ready: list[Any] = list(waiting.popleft())
        if ready[1] is not None:
            raise ready[1]
        yield ready.pop(0)  # nothing here holds it meanwhile


def _started(queue: _Queue[Any, Any], *, helps: bool) -> threading.Thread:
    for thread, its in list(_RUNNING.items()):
        if its() is None and not thread.is_alive():
            _RUNNING.pop(thread, None)
    thread = threading.Thread(target=queue.work, kwargs={"helps": helps}, name="latentcache-read-ahead", daemon=True)
    _RUNNING[thread] = weakref.ref(queue)
    try:
        thread.start()
    except RuntimeError:  # no more threads
        _RUNNING.pop(thread, None)
        raise
    return thread


#: How often this process was forked off from another on the way from its interpreter's start.
_forks = 0
#: Threads are held until they are dead, so that the end of the process waits for each; a queue is held by its thread
#: until that has done its work, and not longer: it refers to files and tensors.
_RUNNING: dict[threading.Thread, weakref.ref[_Queue[Any, Any]]] = {}


def _end_all() -> None:
    """Before the interpreter goes: a thread that came back into torch afterwards could abort the process."""
    running = list(_RUNNING.items())
    for _, its in running:  # all of them first: threads of one queue take what is meant for each other
        if (queue := its()) is not None:
            queue.close(1)
    for thread, _ in running:
        with contextlib.suppress(RuntimeError):  # not started
            thread.join()


def _forked() -> None:
    """In the child: none of the threads is here."""
    global _forks
    _forks += 1
    _RUNNING.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forked)


class Readahead:
    """Has the kernel fetch the batches of one iteration that the page cache does not hold. Threads may share it.

    Decides nothing about what is read, only when the disk begins; nothing here can fail a read. A file system that
    cannot say what is in memory is asked once: what is in memory itself (tmpfs) is never announced, everything else
    once, in the first iteration (overlayfs, NFS).

    Args:
        places_of: Where the bytes of a step are.
        steps: Steps of the iteration.
        ahead: Steps that are announced before they are read.
        blind: Announce also if the file system cannot say what is in memory; for a first iteration.
    """

    def __init__(
        self, places_of: Callable[[int], Sequence[Place]], steps: int, *, ahead: int = 2, blind: bool = True
    ) -> None:
        self._places_of, self._steps, self._ahead, self._blind = places_of, steps, ahead, blind
        self._next = self._calm = 0
        self._assumed: dict[int, bool] = {}

    def before(self, step: int) -> None:
        """Announce the next steps, this one first; each is announced once."""
        last = min(step + self._ahead + 1, self._steps) if _HAS_ADVICE else 0
        for coming in range(max(step, self._next), last):
            self._next = coming + 1
            if self._calm >= _CALM and coming % _SELDOM:
                continue  # in memory until now: look at one step of several
            with contextlib.suppress(OSError, LatentcacheError):  # the read says what is wrong, and of which entry
                places = self._places_of(coming)
                if all(self._in_memory(place) for place in places[:: -(-len(places) // _LOOKS) or 1]):
                    self._calm += 1
                else:
                    self._calm = 0
                    announce(places)

    def _in_memory(self, place: Place) -> bool:
        """True if memory holds the last byte of a place, as far as can be known."""
        file, start, length = place
        if file not in self._assumed:
            found = is_cached(file, start + max(length - 1, 0))
            if found is not None:
                return found
            self._assumed[file] = not self._blind or _is_tmpfs(file)
        return self._assumed[file]


def announce(places: Sequence[Place]) -> None:
    """Have the kernel begin to fetch bytes.

    Raises:
        OSError: A file cannot be read.
    """
    for file, start, length in sorted(places):
        for piece in range(start, start + length, _PIECE_BYTES):
            os.posix_fadvise(file, piece, min(_PIECE_BYTES, start + length - piece), os.POSIX_FADV_WILLNEED)


def is_cached(file: int, place: int) -> bool | None:
    """True if a byte can be read without waiting for a disk; None if the file system cannot say.

    Raises:
        OSError: It cannot be read at all.
    """
    try:
        os.preadv(file, _BYTE, place, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        if error.errno == errno.EOPNOTSUPP:
            return None
        raise
    return True


def _is_tmpfs(file: int) -> bool:
    """True if a file is in memory and on no disk: such files and no others have seals (fcntl(2))."""
    try:
        fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True
