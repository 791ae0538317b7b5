"""Memory for batches, used again only when nobody holds it any more.

Decides where a batch lies. Fresh memory costs more than the copy into it (a page fault every 4 KiB), so a few
slots are kept, the one used last first: it may still be in the processor's cache. Numpy asks for pages of 2 MiB
where a slot is large. Guarantee: memory that a tensor, a view of it, its ``numpy()`` or its storage still refers to
is never handed out again; a caller who keeps every batch gets new memory for each. What refers to a slot is counted
by the interpreter itself: each of them holds, through its base, the one array that owns the memory.
There is no lock, because a fork could inherit it held: a slot that is looked at is in nobody else's hands. Nor is the
memory kept from children (MADV_DONTFORK): a batch that a child inherits must be there.
"""

from __future__ import annotations

import sys
from collections import deque

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
#: Memory begins this far into a page, as payloads do in their file: the kernel copies page by page.
IN_PAGE = 128
_PAGE = 4096


class BatchRing:
    """At most ``slots`` pieces of memory, found again when they are free. Threads may share it.

    Args:
        slots: How many to remember: batches read ahead, one being filled, one in the caller's hands.
    """

    def __init__(self, slots: int) -> None:
        self._slots: deque[_Slot] = deque(maxlen=slots)

    def take(self, num_bytes: int) -> Bytes:
        """(num_bytes,) of memory that nobody else refers to, 128 bytes into a page."""
        return self.take_in_parts(num_bytes, 1)[0]

    def take_in_parts(self, num_bytes: int, count: int) -> tuple[Bytes, list[memoryview]]:
        """As :meth:`take`, and so many equal parts of it, to be forgotten before the memory is.

        The parts are made once for a slot: they do not count as references to it.
        """
        slot = self._free(num_bytes) or _Slot(num_bytes)
        slot.cut(num_bytes, count)
        view, parts = slot.whole[:], slot.parts
        self._slots.append(slot)  # only now: the view counts, so nobody takes it for free
        return view, parts

    def _free(self, num_bytes: int) -> _Slot | None:
        """The slot used last of those that fit and are not referred to, taken out of the ring."""
        passed: list[_Slot] = []
        found = None
        for _ in range(len(self._slots) if _COUNTS_ARE_EXACT else 0):
            try:
                slot = self._slots.pop()
            except IndexError:  # other threads are looking at the rest
                break
            if _holders(slot) == _ALONE and num_bytes <= len(slot.owner) - _PAGE <= 2 * num_bytes:
                found = slot
                break
            passed.append(slot)
        while passed:  # in their order: a slot that is busy now is the next to be in the cache when it is free
            self._slots.append(passed.pop())
        return found


class _Slot:
    """One piece of memory and what was cut from it last: the whole refers to the owner, the parts to the whole."""

    __slots__ = ("owner", "parts", "whole")

    def __init__(self, num_bytes: int) -> None:
        self.owner: Bytes = np.empty(num_bytes + _PAGE, dtype=np.uint8)
        self.whole: Bytes = self.owner[:0]
        self.parts: list[memoryview] = []

    def cut(self, num_bytes: int, count: int) -> None:
        """Have it hold so many bytes in so many parts."""
        if len(self.whole) == num_bytes and len(self.parts) == count:
            return
        start = (IN_PAGE - self.owner.ctypes.data) % _PAGE
        self.whole = self.owner[start : start + num_bytes]
        self.parts = parts_of(self.whole.data, count)


def parts_of(data: memoryview, count: int, *, skip: int = 0) -> list[memoryview]:
    """``count`` equal parts of a buffer, each without its first ``skip`` bytes."""
    size = len(data) // count
    return [data[start + skip : start + size] for start in range(0, count * size, size)]


def _holders(slot: _Slot) -> int:
    """References to the memory of a slot, as the interpreter counts them."""
    return sys.getrefcount(slot.owner)


#: What :func:`_holders` says of a slot that nobody has taken.
_ALONE = _holders(_Slot(1))
#: Without the interpreter's lock a count proves nothing; then no slot is ever taken for free.
_COUNTS_ARE_EXACT = getattr(sys, "_is_gil_enabled", lambda: True)()
