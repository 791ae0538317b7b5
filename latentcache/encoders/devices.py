"""Devices and libraries of this machine, and errors of devices. No library is imported before it is asked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from latentcache.errors import DeviceError, DeviceMemoryError, EncoderError, LatentcacheError
from latentcache.fields.protocol import DescribeContext
from latentcache.value import Value

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_HAS_BFLOAT16 = "latentcache.encoders.devices:has_bfloat16"
_OUT_OF_MEMORY = ("outofmemoryerror", "out of memory", "not enough memory", "can't allocate memory")
_DEVICE_FAILED = ("cuda error", "cudnn", "cublas", "nccl", "device-side assert", "hip error", "acceleratorerror")


def installed(names: Iterable[str]) -> dict[str, str]:
    """Library -> version; empty for one that is not installed."""
    return {name: _version(name) for name in names}


@cache
def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # 15 ms that most commands do not need

    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def cuda_count() -> int:
    """Ask the driver for the number of CUDA devices that this process may use; 0 if there is no driver."""
    return _driver_number("cuDeviceGetCount")


def cuda_version() -> str:
    """Newest version of CUDA that the driver supports, such as 12.8; empty if there is no driver."""
    version = _driver_number("cuDriverGetVersion")
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""


def _driver_number(function: str) -> int:
    number = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        succeeded = getattr(driver, function)(ctypes.byref(number)) == 0
    except (OSError, AttributeError):
        succeeded = False
    return number.value if succeeded else 0


def on_cuda(device: str) -> bool:
    """True if ``--device`` means CUDA: by name, or ``auto`` on a machine that seems to have a usable device."""
    return device.startswith("cuda") or (device == "auto" and (Path("/dev/nvidia0").exists() or cuda_count() > 0))


def precision(requested: str | None, cached: str, half: str, context: DescribeContext) -> str:
    """Precision of an encoder: as requested, else as in the cache, else ``half`` on CUDA and float32 elsewhere.

    ``cached``: precision of an equal encoder in the cache; empty if there is none. A device that only emulates
    bfloat16 computes float32.
    """
    if requested not in (None, "auto"):
        return str(requested)
    if cached:
        return cached
    if half == "float32" or context.check or not on_cuda(context.device):
        return "float32"
    emulated = half == "bfloat16" and context.ask is not None and not context.ask(_HAS_BFLOAT16)
    return "float32" if emulated else half


# with torch


def choose_device(device: str) -> torch.device:
    """``auto`` is CUDA if torch can use it, else the CPU."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            "torch cannot use it",
            argument="device",
            value=device,
            why=first_line(error),
            fix="use --device=cpu, or install a torch build for this device",
        ) from error
    return chosen


def device_name(device: torch.device) -> str:
    """``cpu``, or kind and name of the card."""
    import torch

    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type


def has_bfloat16(device: str = "auto") -> bool:
    """True if a device computes bfloat16 and does not only emulate it, which is slower than float32."""
    import torch

    return choose_device(device).type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def device_report(device: str = "auto") -> dict[str, Any]:
    """Describe the device of this process: ``usable``, and ``cuda`` that torch was built for."""
    import torch

    report: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "usable": False}
    if device.startswith("cpu") or not torch.cuda.is_available():
        return report
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return report | {"usable": True, "name": name, "free_bytes": free, "total_bytes": total}


class Translator(Value):
    """Runs the work of one encoder on one device and translates its errors.

    A lack of memory halves the batch, a lost device ends the work, and any other error is a fault of the model or of
    a size. Guarantee: the translated error has no context, so no frame keeps a tensor alive. After a lack of memory
    the unused blocks of the allocator are freed, here and nowhere else.
    """

    device: torch.device
    name: str
    """Class of the encoder."""
    label: str
    """The model, as the user called it."""
    fix: str = ""
    """Advice if the model fails on an input."""

    def run(self, action: Callable[[], T], subject: str) -> T:
        """Run an action and return its result; raises DeviceMemoryError, DeviceError or EncoderError."""
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
        text = f"{type(error).__name__}: {error}".lower()
        why = first_line(error)
        if isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY):
            return DeviceMemoryError(f"no memory left on the device for {subject}", why=why)
        if any(sign in text for sign in _DEVICE_FAILED):
            return DeviceError(f"the device {self.device} failed on {subject}", why=why)
        return EncoderError(f"{self.name} cannot encode {subject}", where=self.label, why=why, fix=self.fix)


def first_line(error: BaseException) -> str:
    """First line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
