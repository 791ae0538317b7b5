"""A budget of bytes that decoding threads share: memory is bounded by pixels, not by a count of pictures."""

from __future__ import annotations

import os
import threading

_GIB = 1 << 30


def default_budget_bytes() -> int:
    """A quarter of the machine's memory, at most 4 GiB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory // 4, 4 * _GIB)


class ByteBudget:
    """Blocks a thread that wants more bytes than are left.

    One request may exceed the whole budget (a 100-megapixel picture on a small machine); it is granted when
    nothing else is held, so the largest picture and not the number of threads decides the peak.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = 0
        self._wanted: list[int] = []
        self._closed = False
        self._free = threading.Condition()

    def starving(self, kept: int) -> bool:
        """Whether threads wait for bytes and will go on waiting until some of ``kept`` is released.

        Args:
            kept: Bytes that the caller holds for finished work; when more is held, somebody is still at work.
        """
        with self._free:
            waiting = bool(self._wanted) and self._held <= kept
            return waiting and not any(self._fits(size) for size in self._wanted)

    def acquire(self, size: int) -> bool:
        """Take ``size`` bytes, waiting for them; False when the budget was closed meanwhile."""
        with self._free:
            self._wanted.append(size)
            self._free.wait_for(lambda: self._closed or self._fits(size))
            self._wanted.remove(size)
            if self._closed:
                return False
            self._held += size
            return True

    def release(self, size: int) -> None:
        """Give bytes back."""
        with self._free:
            self._held -= size
            self._free.notify_all()

    def close(self) -> None:
        """Wake every waiting thread and grant nothing more."""
        with self._free:
            self._closed = True
            self._free.notify_all()

    def _fits(self, size: int) -> bool:
        return not self._held or self._held + size <= self.limit
