"""Reads ahead: threads make the next batches while the caller works on this one.

Guarantee: the same results in the same order as without them; an error is raised at the result it belongs to; at
most ``depth`` results wait or are being made. The threads end when the iterator is exhausted, closed or forgotten,
and before the interpreter does. A process forked in the middle has no such threads: there the iterator goes on
without. Nothing here takes a lock that a fork could leave held.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


class _Desk(Generic[Item, Made]):
    """What the caller and the threads share: permits, which are positions of items, go one way, results the other."""

    def __init__(self, make: Callable[[Item], Made], items: Sequence[Item], depth: int, threads: int) -> None:
        self.make, self.items, self.depth, self.threads, self.closed = make, items, depth, threads, False
        self.permits: SimpleQueue[int | None] = SimpleQueue()
        self.results: SimpleQueue[tuple[int, Made | None, BaseException | None]] = SimpleQueue()
        self.early: dict[int, tuple[int, Made | None, BaseException | None]] = {}
        for position in range(min(depth, len(items))):
            self.permits.put(position)

    def work(self) -> None:
        """A thread: one result per permit, until the items end, one fails or the caller leaves."""
        while (position := self.permits.get()) is not None and not self.closed:
            if position == len(self.items) - 1:
                self.dismiss()
            try:
                self.results.put((position, self.make(self.items[position]), None))
            except BaseException as error:  # noqa: BLE001 -- the caller raises it
                self.results.put((position, None, error))
                return

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
        if position + self.depth < len(self.items):
            self.permits.put(position + self.depth)
        return made  # type: ignore[return-value]  # without an error it was made

    def close(self) -> None:
        """Tell the threads to end after what they are doing."""
        self.closed = True
        self.dismiss()

    def dismiss(self) -> None:
        """Let no thread wait for a permit that does not come."""
        for _ in range(self.threads):
            self.permits.put(None)


def read_ahead(
    make: Callable[[Item], Made], items: Sequence[Item], depth: int, *, threads: int = 1
) -> Generator[Made]:
    """``map(make, items)``, made up to ``depth`` results ahead by threads; by the caller itself where it is 0.

    Args:
        make: Called once per item; in order, by one thread, in any order by several.
        items: All of them.
        depth: Results that may wait for the caller.
        threads: How many make results at once; no more than ``depth``.
    """
    if depth < 1 or len(items) < 2:
        yield from map(make, items)
        return
    desk, forks = _Desk(make, items, depth, min(threads, depth)), _forks
    started = [_started(desk) for _ in range(desk.threads)]
    try:
        for position, item in enumerate(items):
            yield desk.take(position) if forks == _forks else make(item)  # nothing here holds it meanwhile
    finally:
        if forks == _forks:
            desk.close()
    for thread in started if forks == _forks else ():
        thread.join()  # what they read from is in nobody's hands now


def _started(desk: _Desk[Any, Any]) -> threading.Thread:
    thread = threading.Thread(target=desk.work, name="latentcache-read-ahead", daemon=True)
    _RUNNING[thread] = desk
    thread.start()
    return thread


#: How often this process was forked off from another on the way from its interpreter's start.
_forks = 0
_RUNNING: weakref.WeakKeyDictionary[threading.Thread, _Desk[Any, Any]] = weakref.WeakKeyDictionary()


def _end_all() -> None:
    """Before the interpreter goes: a thread that came back into torch afterwards could abort the process."""
    for thread, desk in list(_RUNNING.items()):
        desk.close()
        with contextlib.suppress(RuntimeError):  # not started
            thread.join()


def _forked() -> None:
    """In the child: none of the threads is here."""
    global _forks
    _forks += 1
    _RUNNING.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forked)
