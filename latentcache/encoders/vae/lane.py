"""How pixels get to a device and latents back from it, beside the computation.

Decides which memory a batch travels through. Guarantee: what ``up`` returns is complete for everything that the
current stream does afterwards; ``down`` copies what that stream has computed by then; host memory is used again only
after the copy out of it, or into it, has ended; device memory only after the stream that was given it is done.
The host waits for nothing, but for a slab whose copy has not ended when all are in use. Cost: one copy in memory of
pixels (0.065 ms for 3 MB) and of latents, and page-locked memory for three batches of pixels.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

#: Slabs of pixels: one being filled, one being copied, one whose batch is being computed.
SLABS = 3


class Mark(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Lane(Protocol):
    """One way to a device and back."""

    def locked(self, num_bytes: int) -> Tensor:
        """(num_bytes,) uint8 in host memory that the device can copy from and to by itself."""

    def up(self, slab: Tensor) -> tuple[Tensor, Mark]:
        """Begin to copy host memory to the device; the mark is where the copy has ended."""

    def down(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Mark:
        """Begin to copy tensors of the device, once they are computed, to host memory: (from, to)."""


class Slot:
    """One piece of host memory and the end of the last copy that used it."""

    __slots__ = ("mark", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.mark: Mark | None = None

    def view(self, shape: Sequence[int], dtype: torch.dtype, start: int = 0) -> Tensor:
        """Part of it as a tensor of this shape and type."""
        count = dtype.itemsize
        for side in shape:
            count *= side
        return self.memory[start : start + count].view(dtype).view(tuple(shape))


class Ring:
    """Host memory that is used again. A slot that was taken is in nobody else's hands until it is given back.

    Args:
        lane: Makes the memory.
        slots: How many are kept.
    """

    def __init__(self, lane: Lane, slots: int = SLABS) -> None:
        self._lane, self.slots = lane, slots
        self._free: deque[Slot] = deque(maxlen=slots)

    def take(self, num_bytes: int) -> Slot:
        """A slot of at least so many bytes; its last copy has ended."""
        try:
            slot = self._free.popleft()
        except IndexError:
            return Slot(self._lane.locked(num_bytes))
        if slot.mark is not None and not slot.mark.query():
            if len(self._free) + 1 < self.slots:
                self._free.appendleft(slot)
                return Slot(self._lane.locked(num_bytes))
            slot.mark.synchronize()
        return slot if slot.memory.nbytes >= num_bytes else Slot(self._lane.locked(num_bytes))

    def give_back(self, slot: Slot, mark: Mark | None = None) -> None:
        """For use again once the device has come to the mark."""
        slot.mark = mark
        self._free.append(slot)

    def clear(self) -> None:
        """Forget all memory."""
        self._free.clear()


class Reached:
    """The mark of what had ended when it was made."""

    def query(self) -> bool:
        """Always."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class PlainLane:
    """Copies that have ended when they return: the CPU, where nothing is copied up, and devices that are not CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def locked(self, num_bytes: int) -> Tensor:
        """See :class:`Lane`."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def up(self, slab: Tensor) -> tuple[Tensor, Mark]:
        """See :class:`Lane`."""
        return slab.to(self._device), Reached()

    def down(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Mark:
        """See :class:`Lane`."""
        for source, target in pairs:
            target.copy_(source)
        return Reached()


class CudaLane:
    """Copies on two streams of their own of one CUDA device, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def locked(self, num_bytes: int) -> Tensor:
        """See :class:`Lane`."""
        with torch.cuda.device(self._device):  # a thread begins on device 0, and would open it for this alone
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def up(self, slab: Tensor) -> tuple[Tensor, Mark]:
        """See :class:`Lane`."""
        with torch.cuda.stream(self._up):
            moved = slab.to(self._device, non_blocking=True)
            mark = self._marked(self._up)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(mark)
        moved.record_stream(current)
        return moved, mark

    def down(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Mark:
        """See :class:`Lane`."""
        computed = self._marked(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            self._down.wait_event(computed)
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._down)
            return self._marked(self._down)

    def _marked(self, stream: Any) -> torch.cuda.Event:
        mark: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        mark.record(stream)  # who waits for it sleeps: the core belongs to the decoders
        return mark


class Stopwatch:
    """Seconds that the device works between two calls: its own clock on CUDA, where the host is far ahead."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._device = device
        self._start, self._end = self._now(), self._now()

    def stop(self) -> None:
        """All work was given to the device."""
        self._end = self._now()

    def seconds(self) -> float:
        """To be asked when the device has done it."""
        return float(self._start.elapsed_time(self._end) / 1000 if self._on_cuda else self._end - self._start)

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def lane_to(device: torch.device) -> Lane:
    """The way to a device."""
    return CudaLane(device) if device.type == "cuda" else PlainLane(device)
