"""What torch raises on a device, in this package's words.

Decides what is a lack of memory (halve the batch and go on), a lost device (end the work) and a fault of the model
or of a size. Guarantee: the error that leaves has no context, so no frame keeps a tensor alive; after a lack of
memory the allocator's unused blocks are given back, here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from latentcache.errors import DeviceError, DeviceMemoryError, EncoderError, LatentcacheError
from latentcache.recipe import EncoderSpec

T = TypeVar("T")
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")
_DEVICE_FAILED = ("cuda error", "cudnn", "cublas", "nccl", "device-side assert", "hip error", "acceleratorerror")


@dataclass(frozen=True, slots=True)
class Guard:
    """Runs work of one encoder on one device.

    Args:
        device: Where it runs.
        spec: What the encoder is.
        label: What the user called the model.
    """

    device: torch.device
    spec: EncoderSpec
    label: str

    def run(self, action: Callable[[], T], subject: str) -> T:
        """What the action gives.

        Raises:
            DeviceMemoryError: It does not fit.
            DeviceError: The device failed.
            EncoderError: The model cannot do it.
        """
        failure: LatentcacheError
        try:
            return action()
        except (torch.OutOfMemoryError, MemoryError) as error:
            failure = _memory_error(subject, error)
        except (RuntimeError, ValueError) as error:
            failure = self._translated(subject, error)
        if isinstance(failure, DeviceMemoryError) and self.device.type == "cuda":
            torch.cuda.empty_cache()
        raise failure  # outside ``except``: no frame of the failed call is kept

    def _translated(self, subject: str, error: Exception) -> LatentcacheError:
        text = f"{type(error).__name__}: {error}".lower()
        if any(sign in text for sign in _OUT_OF_MEMORY):
            return _memory_error(subject, error)
        if any(sign in text for sign in _DEVICE_FAILED):
            return DeviceError(f"the device {self.device} failed on {subject}", why=first_line(error))
        return EncoderError(
            f"{self.spec.family} cannot encode {subject}",
            where=self.label,
            why=first_line(error),
            fix=f"use sides that are multiples of {self.spec.multiple}, or another model",
        )


def first_line(error: BaseException) -> str:
    """What an error says first."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _memory_error(subject: str, error: Exception) -> DeviceMemoryError:
    return DeviceMemoryError(f"no memory left on the device for {subject}", why=first_line(error))
