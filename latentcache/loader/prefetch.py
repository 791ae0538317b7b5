"""Reads ahead: one thread makes the next batches while the caller works on this one.

Guarantee: the same results in the same order as without it; an error is raised at the result it belongs to; at
most ``depth`` results wait. The thread ends when the iterator is exhausted, closed or forgotten, and before the
interpreter does. A process forked in the middle has no such thread: there the iterator goes on without one.
Nothing here takes a lock that a fork could leave held.
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
    """What the caller and the thread share: permits go one way, results the other."""

    def __init__(self, make: Callable[[Item], Made], items: Sequence[Item], depth: int) -> None:
        self.make, self.items, self.closed = make, items, False
        self.permits: SimpleQueue[None] = SimpleQueue()
        self.results: SimpleQueue[tuple[Made | None, BaseException | None]] = SimpleQueue()
        for _ in range(depth):
            self.permits.put(None)

    def work(self) -> None:
        """The thread: one result per permit, until the items end, one fails or the caller leaves."""
        for item in self.items:
            self.permits.get()
            if self.closed:
                return
            try:
                self.results.put((self.make(item), None))
            except BaseException as error:  # noqa: BLE001 -- the caller raises it
                self.results.put((None, error))
                return

    def close(self) -> None:
        """Tell the thread to end after what it is doing."""
        self.closed = True
        self.permits.put(None)


def read_ahead(make: Callable[[Item], Made], items: Sequence[Item], depth: int) -> Generator[Made]:
    """``map(make, items)``, made up to ``depth`` results ahead by a thread; by the caller itself where it is 0.

    Args:
        make: Called once per item, in order, in the thread.
        items: All of them.
        depth: Results that may wait for the caller.
    """
    if depth < 1 or len(items) < 2:
        yield from map(make, items)
        return
    desk, forks = _Desk(make, items, depth), _forks
    thread = threading.Thread(target=desk.work, name="latentcache-read-ahead", daemon=True)
    _RUNNING[thread] = desk
    thread.start()
    try:
        for item in items:
            yield _next_of(desk) if forks == _forks else make(item)
    finally:
        if forks == _forks:
            desk.close()


def _next_of(desk: _Desk[Item, Made]) -> Made:
    made, error = desk.results.get()
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame
    desk.permits.put(None)
    return made  # type: ignore[return-value]  # without an error it was made


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
