"""What this machine has: versions of installed libraries, and CUDA devices. Imports no library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from pathlib import Path


def installed(names: Iterable[str]) -> dict[str, str]:
    """Library -> version; empty for one that is not installed."""
    return {name: _version(name) for name in names}


def cuda_count() -> int:
    """Number of CUDA devices that this process may use, asked of the driver; 0 if there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    except (OSError, AttributeError):
        pass
    return 0


def on_cuda(device: str) -> bool:
    """True if ``--device`` means CUDA: by name, or ``auto`` on a machine that seems to have a usable device."""
    return device.startswith("cuda") or (device == "auto" and (Path("/dev/nvidia0").exists() or cuda_count() > 0))


def cuda_version() -> str:
    """Newest version of CUDA that the driver supports, such as 12.8; empty if there is no driver."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return f"{version.value // 1000}.{version.value % 1000 // 10}"
    except (OSError, AttributeError):
        pass
    return ""


@cache
def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # 15 ms that most commands do not need

    try:
        return version(name)
    except PackageNotFoundError:
        return ""
