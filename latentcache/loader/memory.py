"""Memory of batches: buffers on the host that are used again, and copies to a device.

Fresh memory costs more than the copy into it: a page fault every 4 KiB. So buffers are kept, and a batch of another
resolution finds a buffer too. Guarantee: memory that a tensor, a view of it, its ``numpy()`` or its storage still
refers to is never handed out again. Each buffer is handed out through an array of its own, and every view refers to
that array. When it dies, its weak reference puts the buffer back. So no reference is counted, and free-threaded
Python reuses memory too.

Batches are copied to a device beside the computation. Guarantee: a batch that is handed out is complete for all that
the caller's current stream does afterwards. Host memory is used again only after the copy out of it has ended. Device
memory is used again only after the stream that the batch was handed to is done with it. ``send`` runs in the thread
that makes batches: tensors are copied and finished (scaled, cast) on a stream of this object, and an event marks the
end. ``receive`` runs where batches are used: the current stream waits for the event, and the tensors are recorded on
it. Nothing waits on the CPU.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from latentcache.errors import DeviceError, UsageError
from latentcache.loader.formats import Batch

Bytes = NDArray[np.uint8]
#: Batches begin this far into a page, as most payloads do in their file: the kernel copies page by page.
_IN_PAGE = 128
_PAGE = 4096
#: A free buffer serves requests down to this part of its size.
_LARGEST_WASTE = 4
#: Free buffers for each that is used at once. Free-threaded Python drops references in bursts: with five sizes in
#: turn and 8 kept batches 6.3 % of all batches got new memory at 1, 1.7 % at 2 and 0.35 % at 3.
_SPARE = 3
Finish = Callable[[Batch], Batch]
InFlight = tuple[Batch, Any]
"""A batch on its way, and the event (``torch.cuda.Event``) at the end of the device's work on it, or None."""
#: Copies that may be under way before ``send`` waits for the oldest.
_IN_FLIGHT = 4


class BufferPool:
    """Buffers of several sizes. Threads may share the pool. It has no lock, so a fork cannot deadlock on one.

    ``used``: buffers that are used at once. ``pinned``: page-locked memory, for a CUDA device.
    """

    def __init__(self, used: int, *, pinned: bool = False) -> None:
        self._keep = _SPARE * used
        self._pinned = pinned
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


class Transfer:
    """The way of batches to one device. Picklable; each process opens its own stream (given by tests alone)."""

    def __init__(self, device: str | torch.device = "cpu", *, stream: CudaStream | Any = None) -> None:
        self.device = _checked(device)
        self._stream = stream
        self._under_way: deque[tuple[Any, Batch]] = deque()

    def send(self, batch: Batch, finish: Finish) -> InFlight:
        """Begin to copy the tensors of a batch, which ``finish`` completes there; it may never be received."""
        if self._stream is None and self.device.type == "cpu":
            return finish(batch), None
        if get_worker_info() is not None:
            raise UsageError(
                f"device='{self.device}': not possible in a worker of a DataLoader",
                why="device memory does not travel between processes, and a forked one cannot use CUDA",
                fix="iterate over the loader itself (it reads ahead), or use a loader with device='cpu' in workers",
            )
        if self._stream is None and self.device.type != "cuda":
            return finish(moved(batch, self.device)), None
        stream = self._stream = self._stream or CudaStream(self.device)
        while self._under_way and (len(self._under_way) >= _IN_FLIGHT or self._under_way[0][0].query()):
            try:
                event, _ = self._under_way.popleft()  # its host memory is free from here on
            except IndexError:  # another thread was quicker
                break
            event.synchronize()
        copied, event = stream.copy(batch, finish)
        self._under_way.append((event, batch))
        return copied, event

    def receive(self, copied: InFlight) -> Batch:
        """The batch, on the device, for the caller's current stream."""
        batch, event = copied
        if event is not None and self._stream is not None:
            self._stream.join([value for value in batch.values() if isinstance(value, torch.Tensor)], event)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        # Opening does not touch the device: the process may be one that cannot use it.
        return {"device": self.device, "_stream": None, "_under_way": deque()}


def moved(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
    """The batch with its tensors on a device; keys, one tensor per field, stay on the CPU."""
    return {
        name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


class CudaStream:
    """Copies on a stream of its own of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    def copy(self, batch: Batch, finish: Finish) -> tuple[Batch, Any]:
        """Begin to copy and finish the tensors of a batch; the event is where all of it has ended."""
        with torch.cuda.stream(self._stream):
            copied = finish(moved(batch, self._device, non_blocking=True))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return copied, event

    def join(self, tensors: list[torch.Tensor], event: Any) -> None:
        """Order what the caller does on the device from now on after the event, and hold the tensors until then."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(current)


def _checked(device: str | torch.device) -> torch.device:
    """The device, with its number, if torch can use it here."""
    try:
        chosen = torch.device(device)
        if chosen.type == "meta":
            raise ValueError("it holds no data")
        return chosen if chosen.type == "cpu" else torch.empty(0, device=chosen).device
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise DeviceError(
            f"device={str(device)!r}: torch cannot use it",
            why=str(error).splitlines()[0],
            fix="device='cpu', or install a torch build for this device",
        ) from error
