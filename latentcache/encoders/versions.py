"""Versions of installed libraries and CUDA devices of this machine. No library is imported before it is asked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any


def installed(names: Iterable[str]) -> dict[str, str]:
    """Library -> version; empty for one that is not installed."""
    return {name: _version(name) for name in names}


def cuda_count() -> int:
    """Number of CUDA devices that this process may use, asked of the driver; 0 if there is no driver."""
    return _driver_number("cuDeviceGetCount")


def on_cuda(device: str) -> bool:
    """True if ``--device`` means CUDA: by name, or ``auto`` on a machine that seems to have a usable device."""
    return device.startswith("cuda") or (device == "auto" and (Path("/dev/nvidia0").exists() or cuda_count() > 0))


def cuda_version() -> str:
    """Newest version of CUDA that the driver supports, such as 12.8; empty if there is no driver."""
    version = _driver_number("cuDriverGetVersion")
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""


def device_report(device: str = "auto") -> dict[str, Any]:
    """Describe the device of this process: ``usable``, and ``cuda`` that torch was built for."""
    import torch

    report: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "usable": False}
    if device.startswith("cpu") or not torch.cuda.is_available():
        return report
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return report | {"usable": True, "name": name, "free_bytes": free, "total_bytes": total}


def _driver_number(function: str) -> int:
    number = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        succeeded = getattr(driver, function)(ctypes.byref(number)) == 0
    except (OSError, AttributeError):
        succeeded = False
    return number.value if succeeded else 0


@cache
def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # 15 ms that most commands do not need

    try:
        return version(name)
    except PackageNotFoundError:
        return ""
