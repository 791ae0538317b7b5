"""Batches on a device: copied beside the computation, from page-locked memory, in the order that makes them safe.

Guarantee: a batch that is handed out is complete for everything that the caller's current stream does afterwards;
page-locked memory is used again only after the copy out of it has ended; device memory of a batch is used again only
after the stream that it was handed to is done with it. On the CPU a batch is handed out as it was made.

How: ``send`` runs where batches are made (the thread that reads ahead): tensors are put into a slot of page-locked
memory, copied on a stream of this object, and an event marks the end. ``receive`` runs where batches are used: the
current stream waits for the event, and the tensors are recorded on it. Nothing waits on the CPU, but for a slot whose
copy has not ended when all are in use. Cost: one copy in memory, one over the bus, ``slots`` batches of page-locked
memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch.utils.data import get_worker_info

from latentcache.errors import DeviceError, UsageError

#: Tensors begin on this boundary in a slot: the widest type and the bus like it.
ALIGNMENT = 256


class Mark(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Lane(Protocol):
    """One way to a device: memory it can copy from, copies beside the computation, and the order between both."""

    def locked(self, num_bytes: int) -> torch.Tensor:
        """(num_bytes,) uint8 in host memory that the device reads by itself."""

    def copy(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Mark]:
        """Begin to copy; the mark is where all of it has ended."""

    def join(self, tensors: list[torch.Tensor], mark: Mark) -> None:
        """What the caller does on the device from now on comes after the mark, and holds the tensors until then."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch on its way."""

    batch: dict[str, Any]
    tensors: list[torch.Tensor]
    mark: Mark | None


class Transfer:
    """The way of batches to one device. Picklable; each process opens its own.

    Args:
        device: Where tensors are delivered.
        slots: Batches whose page-locked memory is kept.
        lane: How they get there; by default as the device needs it.

    Raises:
        UsageError: No such kind of device.
        DeviceError: The device is not there.
    """

    def __init__(self, device: str | torch.device = "cpu", *, slots: int = 3, lane: Lane | None = None) -> None:
        self.device, self._staging, self._lane = _checked(device), Staging(slots), lane

    @property
    def active(self) -> bool:
        """Whether tensors go anywhere."""
        return self._lane is not None or self.device.type != "cpu"

    def send(self, batch: dict[str, Any]) -> Sent:
        """Begin to copy a batch; it may be dropped without being received.

        Args:
            batch: Its tensors, whatever they are called, are copied; the rest is handed on.

        Raises:
            UsageError: In a worker of a ``DataLoader``: device memory does not travel between processes.
        """
        if not self.active:
            return Sent(batch, [], None)
        _refuse_workers(self.device)
        names = [name for name, value in batch.items() if isinstance(value, torch.Tensor)]
        if self._lane is None and self.device.type != "cuda":
            moved = {name: batch[name].to(self.device) for name in names}
            return Sent(batch | moved, [], None)
        lane = self._lane = self._lane or CudaLane(self.device)
        staged, slot = self._staging.take([batch[name] for name in names], lane)
        tensors, slot.mark = lane.copy(staged)
        self._staging.give_back(slot)  # only now: whoever takes it waits for the mark
        return Sent(batch | dict(zip(names, tensors, strict=True)), tensors, slot.mark)

    def receive(self, sent: Sent) -> dict[str, Any]:
        """The batch, on the device, for the caller's current stream."""
        if sent.mark is not None and self._lane is not None:
            self._lane.join(sent.tensors, sent.mark)
        return sent.batch

    def __getstate__(self) -> Mapping[str, Any]:
        return {"device": self.device, "_staging": Staging(self._staging.slots), "_lane": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)  # the device is not touched: the process may be one that cannot use it


class Slot:
    """One piece of page-locked memory and the end of the last copy out of it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.mark: Mark | None = None


class Staging:
    """A ring of page-locked memory. The copy out of a slot ends before anything is written into it again.

    A slot that is taken is in nobody else's hands, so threads may share the ring without a lock.

    Args:
        slots: How many pieces to keep.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free: deque[Slot] = deque(maxlen=slots)

    def take(self, tensors: list[torch.Tensor], lane: Lane) -> tuple[list[torch.Tensor], Slot]:
        """The tensors in page-locked memory, and the slot they lie in, to be given back with its mark."""
        places = list(accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors), initial=0))
        slot = self._slot(places.pop(), lane)
        staged = []
        for tensor, place in zip(tensors, places, strict=True):
            part = slot.memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            staged.append(part.copy_(tensor))
        return staged, slot

    def give_back(self, slot: Slot) -> None:
        """For use again, when its copy has ended."""
        self._free.append(slot)

    def _slot(self, num_bytes: int, lane: Lane) -> Slot:
        """The oldest slot if it is done with or no more may be made; else, or if it is too small, a new one."""
        try:
            slot = self._free.popleft()
        except IndexError:
            return Slot(lane.locked(num_bytes))
        if slot.mark is not None and not slot.mark.query():
            if len(self._free) + 1 < self.slots:
                self._free.appendleft(slot)
                return Slot(lane.locked(num_bytes))
            slot.mark.synchronize()
        return slot if slot.memory.nbytes >= num_bytes else Slot(lane.locked(num_bytes))


class CudaLane:
    """Copies on a stream of its own of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    def locked(self, num_bytes: int) -> torch.Tensor:
        """See :class:`Lane`."""
        with torch.cuda.device(self._device):  # a thread begins on device 0, and would open it for this alone
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Mark]:
        """See :class:`Lane`."""
        with torch.cuda.stream(self._stream):
            moved = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(self._stream)
        return moved, mark

    def join(self, tensors: list[torch.Tensor], mark: Any) -> None:
        """See :class:`Lane`."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(current)


def _checked(device: str | torch.device) -> torch.device:
    """The device, with its number, if torch can use it here."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"no kind of device: {device!r}", why=str(error).splitlines()[0], fix="cpu or cuda"
        ) from error
    if chosen.type == "cpu":
        return chosen
    if chosen.type == "meta":
        raise UsageError("device='meta' holds no data", fix="cpu or cuda")
    try:
        return torch.empty(0, device=chosen).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            f"torch cannot use the device {device}",
            why=str(error).splitlines()[0],
            fix="device='cpu', or install a torch build for this device",
        ) from error


def _refuse_workers(device: torch.device) -> None:
    if get_worker_info() is not None:
        raise UsageError(
            f"device='{device}' in a worker of a DataLoader",
            why="device memory does not travel between processes, and a forked one cannot use CUDA",
            fix="iterate over the loader itself (it reads ahead), or give the workers a loader with device='cpu'",
        )
