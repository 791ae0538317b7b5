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
from typing import Any

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
        self._slots: deque[list[Any]] = deque(maxlen=slots)

    def take(self, num_bytes: int) -> Bytes:
        """(num_bytes,) of memory that nobody else refers to, 128 bytes into a page."""
        slot = self._free(num_bytes) or _slot(num_bytes)
        owner, start = slot
        view: Bytes = owner[start : start + num_bytes]
        self._slots.append(slot)  # only now: the view counts, so nobody takes it for free
        return view

    def _free(self, num_bytes: int) -> list[Any] | None:
        """The slot used last of those that fit and are not referred to, taken out of the ring."""
        passed: list[list[Any]] = []
        found = None
        for _ in range(len(self._slots) if _COUNTS_ARE_EXACT else 0):
            try:
                slot = self._slots.pop()
            except IndexError:  # other threads are looking at the rest
                break
            if _holders(slot) == _ALONE and num_bytes <= len(slot[0]) - _PAGE <= 2 * num_bytes:
                found = slot
                break
            passed.append(slot)
        while passed:  # in their order: a slot that is busy now is the next to be in the cache when it is free
            self._slots.append(passed.pop())
        return found


def _slot(num_bytes: int) -> list[Any]:
    """New memory: the array that owns it, and where in it a page and a bit begin."""
    owner = np.empty(num_bytes + _PAGE, dtype=np.uint8)
    return [owner, (IN_PAGE - owner.ctypes.data) % _PAGE]


def _holders(slot: list[Any]) -> int:
    """References to the array in a slot, as the interpreter counts them."""
    return sys.getrefcount(slot[0])


#: What :func:`_holders` says of an array that nothing but its slot refers to.
_ALONE = _holders([np.empty(1)])
#: Without the interpreter's lock a count proves nothing; then no slot is ever taken for free.
_COUNTS_ARE_EXACT = getattr(sys, "_is_gil_enabled", lambda: True)()
