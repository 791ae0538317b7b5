"""Errors of torch and of devices, in the words of this package. No torch here.

A lack of memory halves the batch, a lost device ends the work, and any other error is a fault of the model or of a
size. Guarantee: the translated error has no context, so no frame keeps a tensor alive. After a lack of memory the
unused blocks of the allocator are freed, here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from latentcache.errors import DeviceError, DeviceMemoryError, EncoderError, LatentcacheError
from latentcache.value import Value

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_OUT_OF_MEMORY = ("outofmemoryerror", "out of memory", "not enough memory", "can't allocate memory")
_DEVICE_FAILED = ("cuda error", "cudnn", "cublas", "nccl", "device-side assert", "hip error", "acceleratorerror")


class Translator(Value):
    """Runs the work of one encoder on one device and translates its errors."""

    device: torch.device
    name: str
    """Class of the encoder."""
    label: str
    """The model, as the user called it."""
    fix: str = ""
    """Advice if the model fails on an input."""

    def run(self, action: Callable[[], T], subject: str) -> T:
        """Result of the action; raises DeviceMemoryError, DeviceError, or EncoderError if the model failed."""
        failure: LatentcacheError
        try:
            return action()
        except (MemoryError, RuntimeError, ValueError) as error:
            failure = self._translated(subject, error)
        if isinstance(failure, DeviceMemoryError) and self.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        raise failure  # outside ``except``: no frame of the failed call is kept

    def _translated(self, subject: str, error: Exception) -> LatentcacheError:
        text, why = f"{type(error).__name__}: {error}".lower(), first_line(error)
        if isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY):
            return DeviceMemoryError(f"no memory left on the device for {subject}", why=why)
        if any(sign in text for sign in _DEVICE_FAILED):
            return DeviceError(f"the device {self.device} failed on {subject}", why=why)
        return EncoderError(f"{self.name} cannot encode {subject}", where=self.label, why=why, fix=self.fix)


def first_line(error: BaseException) -> str:
    """First line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
