"""Batches on a device: copied beside the computation, from page-locked memory, in the order that makes them safe.

Guarantee: a batch that is handed out is complete for everything that the caller's current stream does afterwards.
Host memory is used again only after the copy out of it has ended. Device memory is used again only after the stream
that the batch was handed to is done with it. On the CPU a batch is handed out as it was made.

``send`` runs in the thread that makes batches: tensors are copied and finished (scaled, cast) on a stream of this
object, and an event marks the end. ``receive`` runs where batches are used: the current stream waits for the event,
and the tensors are recorded on it. Nothing waits on the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import get_worker_info

from latentcache.errors import DeviceError, UsageError
from latentcache.loader.formats import Batch

Finish = Callable[[Batch], Batch]
#: Copies that may be under way before ``send`` waits for the oldest.
_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch on its way."""

    batch: Batch
    event: Any = None
    """Event at the end of the device's work on the batch, as ``torch.cuda.Event``."""


class Transfer:
    """The way of batches to one device. Picklable; each process opens its own stream (given by tests alone)."""

    def __init__(self, device: str | torch.device = "cpu", *, stream: CudaStream | Any = None) -> None:
        self.device, self._stream = _checked(device), stream
        self._under_way: deque[tuple[Any, Batch]] = deque()

    def send(self, batch: Batch, finish: Finish) -> InFlight:
        """Begin to copy the tensors of a batch, which ``finish`` completes there; it may never be received."""
        if self._stream is None and self.device.type == "cpu":
            return InFlight(finish(batch))
        if get_worker_info() is not None:
            raise UsageError(
                f"device='{self.device}': not possible in a worker of a DataLoader",
                why="device memory does not travel between processes, and a forked one cannot use CUDA",
                fix="iterate over the loader itself (it reads ahead), or use a loader with device='cpu' in workers",
            )
        if self._stream is None and self.device.type != "cuda":
            return InFlight(finish(moved(batch, self.device)))
        stream = self._stream = self._stream or CudaStream(self.device)
        while self._under_way and (len(self._under_way) >= _IN_FLIGHT or self._under_way[0][0].query()):
            try:
                event, _ = self._under_way.popleft()  # its host memory is free from here on
            except IndexError:  # another thread was quicker
                break
            event.synchronize()
        copied, event = stream.copy(batch, finish)
        self._under_way.append((event, batch))
        return InFlight(copied, event)

    def receive(self, copied: InFlight) -> Batch:
        """The batch, on the device, for the caller's current stream."""
        if copied.event is not None and self._stream is not None:
            self._stream.join(
                [value for value in copied.batch.values() if isinstance(value, torch.Tensor)], copied.event
            )
        return copied.batch

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
