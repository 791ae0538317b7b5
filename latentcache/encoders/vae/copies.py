"""Copy pixels to a device and latents back beside the computation.

Guarantee: the result of ``up`` is complete for everything that the current stream does afterwards; ``down`` copies
the values that this stream has computed by then. Host memory comes from torch's pool of page-locked memory, which
reuses a block only after the copies that use it have ended. Cost: one copy in memory of pixels (0.065 ms for 3 MB)
and of latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Download:
    """Tensors on their way to host memory."""

    tensors: tuple[Tensor, ...]
    event: torch.cuda.Event | None
    """End of the copies; None: they have ended."""

    def done(self) -> bool:
        """True if the copies have ended."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def arrays(self) -> list[NDArray[Any]]:
        """The values, in memory of their own; waits for the device."""
        if self.event is None:
            return [tensor.numpy() for tensor in self.tensors]
        self.event.synchronize()
        return [tensor.numpy().copy() for tensor in self.tensors]


class Copies:
    """Copies between the host and one device; on CUDA in two streams, one for each direction.

    Args:
        device: Where the encoder runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def up(self, images: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Images (H, W, 3) of one size as (B, H, W, 3) on the device; their memory is free after the call."""
        slab = self._host((len(images), *images[0].shape), torch.uint8)
        np.stack(images, out=slab.numpy())
        if not self._cuda:
            return slab.to(self._device)
        with torch.cuda.stream(self._up):
            moved = slab.to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._up)
        moved.record_stream(current)
        return moved

    def down(self, *tensors: Tensor) -> Download:
        """Begin to copy tensors to host memory, once they are computed."""
        if not self._cuda:
            return Download(tuple(tensor.cpu() for tensor in tensors), None)
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            found = tuple(self._host(one.shape, one.dtype).copy_(one, non_blocking=True) for one in tensors)
            for tensor in tensors:
                tensor.record_stream(self._down)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._down)  # whoever waits for it sleeps: the core belongs to the decoders
        return Download(found, event)

    def _host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not self._cuda:
            return torch.empty(tuple(shape), dtype=dtype)
        with torch.cuda.device(self._device):  # a thread begins on device 0, and would open it for this alone
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
