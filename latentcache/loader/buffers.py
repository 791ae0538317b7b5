"""Memory for batches, used again as soon as nothing refers to it.

Fresh memory costs more than the copy into it: a page fault every 4 KiB. So buffers are kept, and a batch of another
resolution finds a buffer too. Guarantee: memory that a tensor, a view of it, its ``numpy()`` or its storage still
refers to is never handed out again. Each buffer is handed out through an array of its own, and every view refers to
that array. When it dies, its weak reference puts the buffer back. So no reference is counted, and free-threaded
Python reuses memory too.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
#: Batches begin this far into a page, as most payloads do in their file: the kernel copies page by page.
_IN_PAGE = 128
_PAGE = 4096
#: A free buffer serves requests down to this part of its size.
_LARGEST_WASTE = 4
#: Free buffers for each that is used at once. Free-threaded Python drops references in bursts: with five sizes in
#: turn and 8 kept batches 6.3 % of all batches got new memory at 1, 1.7 % at 2 and 0.35 % at 3.
_SPARE = 3


class BufferPool:
    """Buffers of several sizes. Threads may share the pool. It has no lock, so a fork cannot deadlock on one.

    ``used``: buffers that are used at once. ``pinned``: page-locked memory, for a CUDA device.
    """

    def __init__(self, used: int, *, pinned: bool = False) -> None:
        self._keep, self._pinned = _SPARE * used, pinned
        self._free: dict[int, memoryview] = {}  # by identity, the one used last at the end
        self._loans: dict[int, _Loan] = {}
        self.fresh = 0
        """Buffers that were allocated."""

    def take(self, num_bytes: int) -> Bytes:
        """(num_bytes,) of memory that nothing else refers to."""
        size = size_class(num_bytes)
        memory = self._reused(size)
        if memory is None:
            self.fresh += 1
            memory = _allocated(size, self._pinned)
        root: Bytes = np.frombuffer(memory, dtype=np.uint8)  # views end here: its base is not an array
        loan = _Loan(root, self._returned)
        loan.memory = memory
        self._loans[id(loan)] = loan
        return root[:num_bytes]

    def _reused(self, size: int) -> memoryview | None:
        """The buffer used last of those that fit: it may still be in the processor's cache."""
        for key in reversed(list(self._free)):  # of keys: tuples would let a collection of garbage change it midway
            memory = self._free.get(key)
            fits = memory is not None and size <= len(memory) <= _LARGEST_WASTE * size
            if fits and self._free.pop(key, None) is not None:
                return memory
        return None

    def _returned(self, loan: weakref.ref[Bytes]) -> None:
        """Nothing refers to a buffer any more."""
        buffer_loan = self._loans.pop(id(loan), None)
        if buffer_loan is not None:
            self._free[id(buffer_loan.memory)] = buffer_loan.memory
            for key in list(self._free)[: -self._keep]:
                self._free.pop(key, None)


class _Loan(weakref.ref):  # type: ignore[type-arg]
    """A buffer that was handed out."""

    __slots__ = ("memory",)
    memory: memoryview


def size_class(num_bytes: int) -> int:
    """The number of bytes rounded up to one of eight steps per power of two, at least a page."""
    step = max(1 << max(num_bytes.bit_length() - 4, 0), _PAGE)
    return -(-max(num_bytes, 1) // step) * step


def _allocated(size: int, pinned: bool) -> memoryview:
    """New memory that begins at the usual place in a page."""
    if pinned:
        owner = torch.empty(size + _PAGE, dtype=torch.uint8, pin_memory=True).numpy()
    else:
        owner = np.empty(size + _PAGE, dtype=np.uint8)
    start = (_IN_PAGE - owner.ctypes.data) % _PAGE
    return owner[start : start + size].data
