"""Copy pixels to a device and latents back without waiting for it.

Host memory is page-locked on CUDA and comes from torch's pool, which reuses a block only after its copies have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from latentcache.encoders.faults import Guard
from latentcache.encoders.protocol import EncodedBatch


@dataclass(frozen=True, slots=True)
class Download:
    """A batch on its way to host memory: see ``PendingBatch``."""

    latents: Tensor
    finite: Tensor
    event: torch.cuda.Event | None
    """End of the copies; None: they have ended."""
    guard: Guard
    subject: str

    def done(self) -> bool:
        """True if the copies have ended; the error of a failed device is raised by ``result``."""
        try:
            return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True

    def result(self) -> EncodedBatch:
        """The latents, in memory of their own."""
        return self.guard.run(self._arrays, self.subject)

    def _arrays(self) -> EncodedBatch:
        latents, finite = self.latents.numpy(), self.finite.numpy()
        if self.event is not None:
            self.event.synchronize()
            latents, finite = latents.copy(), finite.copy()
        return EncodedBatch(latents=latents, finite=finite)


def up(images: Sequence[NDArray[np.uint8]], device: torch.device) -> Tensor:
    """Images (H, W, 3) of one size as (B, H, W, 3) on a device; their memory is free after the call."""
    slab = _host((len(images), *images[0].shape), torch.uint8, device)
    np.stack(images, out=slab.numpy())
    return slab.to(device, non_blocking=True)


def down(latents: Tensor, finite: Tensor, guard: Guard, subject: str) -> Download:
    """Begin to copy a batch to host memory, once it is computed."""
    device = latents.device
    if device.type != "cuda":
        return Download(latents.cpu(), finite.cpu(), None, guard, subject)
    latents, finite = (_host(one.shape, one.dtype, device).copy_(one, non_blocking=True) for one in (latents, finite))
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # whoever waits sleeps: the core belongs to the decoders
    return Download(latents, finite, event, guard, subject)


def _host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.empty(tuple(shape), dtype=dtype)
    with torch.cuda.device(device):  # a thread begins on device 0, and would open it for this alone
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
