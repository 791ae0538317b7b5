"""Reads ahead: threads make the next batches while the caller works on this one.

Guarantee: the same results in the same order as without them; an error is raised at the result it belongs to; at
most ``depth`` results wait or are being made. The threads end when the iterator is exhausted, closed or forgotten,
and before the interpreter does. A process forked in the middle has no such threads: there the iterator goes on
without. Nothing here takes a lock that a fork could leave held. A caller who does nothing between two results makes
them himself: a thread has nothing to hide behind then, and handing a result over costs more. docs/adr/0016.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

#: Less than this between two results is no work to hide behind: what it costs to hand over a result and the
#: interpreter's lock, 20 to 130 us.
_HAND_OVER_S = 100e-6
#: So often in a row.
_HASTY = 3

#: Each makes a result of its own: one reads while the other checks or describes. docs/adr/0016.
THREADS = 2

Item = TypeVar("Item")
Made = TypeVar("Made")


class _Desk(Generic[Item, Made]):
    """What the caller and the threads share: permits, which are positions of items, go one way, results the other."""

    def __init__(self, make: Callable[[Item], Made], items: Sequence[Item]) -> None:
        self.make, self.items, self.closed = make, items, False
        self.permitted = 0
        self.permits: SimpleQueue[int | None] = SimpleQueue()
        self.results: SimpleQueue[tuple[int, Made | None, BaseException | None]] = SimpleQueue()
        self.early: dict[int, tuple[int, Made | None, BaseException | None]] = {}

    def work(self) -> None:
        """A thread: one result per permit, until one fails or the caller leaves."""
        while (position := self.permits.get()) is not None and not self.closed:
            try:
                self.results.put((position, self.make(self.items[position]), None))
            except BaseException as error:  # noqa: BLE001 -- the caller raises it
                self.results.put((position, None, error))
                break
        if self.closed:  # else the caller still wants them
            self.clear()

    def permit(self, start: int, end: int) -> None:
        """Let threads make what was not permitted yet, from ``start`` to before ``end``."""
        for position in range(max(start, self.permitted), min(end, len(self.items))):
            self.permitted = position + 1
            self.permits.put(position)

    def take(self, position: int) -> Made:
        """The result at a position, which the caller asks for in order."""
        result = self.early.pop(position, None) or self.results.get()
        while result[0] != position:  # another thread was quicker with a later one
            self.early[result[0]] = result
            result = self.results.get()
        _, made, error = result
        if error is not None:
            try:
                raise error
            finally:
                del error, result  # its traceback refers to this frame
        return made  # type: ignore[return-value]  # without an error it was made

    def close(self, threads: int) -> None:
        """Tell so many threads to end after what they are doing."""
        self.closed = True
        for _ in range(threads):
            self.permits.put(None)

    def clear(self) -> None:
        """Let go of what nobody takes any more, in a thread that is in nobody's way and is waited for at the end."""
        self.early.clear()
        with contextlib.suppress(Empty):
            while True:
                self.results.get_nowait()


def read_ahead(
    make: Callable[[Item], Made], items: Sequence[Item], depth: int, *, threads: int = 1
) -> Generator[Made]:
    """``map(make, items)``, made up to ``depth`` results ahead by threads; by the caller itself where it is 0.

    Args:
        make: Called once per item; in any order, if there are several threads.
        items: All of them.
        depth: Results that may wait for the caller.
        threads: How many make results at once; no more than ``depth``.
    """
    if depth < 1 or len(items) < 2:
        yield from map(make, items)
        return
    desk, forks, hasty = _Desk(make, items), _forks, 0
    desk.permit(0, depth)
    started: list[threading.Thread] = []
    try:
        for _ in range(min(threads, depth)):
            started.append(_started(desk))  # noqa: PERF401 -- the second may fail to start
        for position, item in enumerate(items):
            ahead = forks == _forks
            ready = [desk.take(position) if ahead and position < desk.permitted else make(item)]
            if ahead and hasty < _HASTY:
                desk.permit(position + 1, position + 1 + depth)
            delivered = time.perf_counter()
            yield ready.pop()  # nothing here holds it meanwhile
            hasty = hasty + 1 if time.perf_counter() - delivered < _HAND_OVER_S else 0
    finally:
        if forks == _forks:
            desk.close(min(threads, depth))
            desk.clear()  # not left to a thread: no join here, which may be anywhere that garbage is collected
    for thread in started if forks == _forks else ():
        thread.join()  # what they read from is in nobody's hands now


def _started(desk: _Desk[Any, Any]) -> threading.Thread:
    for thread, its in list(_RUNNING.items()):
        if its() is None and not thread.is_alive():  # without a desk it has begun, and has nothing left to do
            _RUNNING.pop(thread, None)
    thread = threading.Thread(target=desk.work, name="latentcache-read-ahead", daemon=True)
    _RUNNING[thread] = weakref.ref(desk)
    try:
        thread.start()
    except RuntimeError:  # no more threads
        _RUNNING.pop(thread, None)
        raise
    return thread


#: How often this process was forked off from another on the way from its interpreter's start.
_forks = 0
#: Threads are held until they are dead, so that the end of the process waits for each; a desk is held by its thread
#: until that has done its work, and not longer: it refers to files and tensors.
_RUNNING: dict[threading.Thread, weakref.ref[_Desk[Any, Any]]] = {}


def _end_all() -> None:
    """Before the interpreter goes: a thread that came back into torch afterwards could abort the process."""
    running = list(_RUNNING.items())
    for _, its in running:  # all of them first: threads of one desk take what is meant for each other
        if (desk := its()) is not None:
            desk.close(1)
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
