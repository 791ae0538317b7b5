"""Copy pixels to a device and latents back without waiting for it.

Host memory is page-locked on CUDA and comes from torch's pool, which reuses a block only after its copies have ended.
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


def up(images: Sequence[NDArray[np.uint8]], device: torch.device) -> Tensor:
    """Images (H, W, 3) of one size as (B, H, W, 3) on a device; their memory is free after the call."""
    slab = _host((len(images), *images[0].shape), torch.uint8, device)
    np.stack(images, out=slab.numpy())
    return slab.to(device, non_blocking=True)


def down(*tensors: Tensor) -> Download:
    """Begin to copy tensors to host memory, once they are computed."""
    device = tensors[0].device
    if device.type != "cuda":
        return Download(tuple(tensor.cpu() for tensor in tensors), None)
    found = tuple(_host(one.shape, one.dtype, device).copy_(one, non_blocking=True) for one in tensors)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # whoever waits sleeps: the core belongs to the decoders
    return Download(found, event)


def _host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.empty(tuple(shape), dtype=dtype)
    with torch.cuda.device(device):  # a thread begins on device 0, and would open it for this alone
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
