"""Timing of device work for ``bench_gpu``, and its ceilings."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import Scene

_CALLS = 3
Row = dict[str, Any]
"""One line of a table: name of the column -> value."""


class PartTimeoutError(Exception):
    """A part exceeded its time."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``PartTimeoutError`` in the main thread after a timeout; a running kernel is not interrupted."""

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise PartTimeoutError(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait(scene: Scene) -> None:
    """Wait for the device."""
    if scene.cuda:
        torch.cuda.synchronize()


def seconds_per_call(scene: Scene, work: Callable[[], object], *, least_s: float = 0.25) -> float:
    """Measure seconds per call after a warm-up: at least three calls and a quarter of a second."""
    work()
    wait(scene)
    calls, started = 0, time.perf_counter()
    while calls < _CALLS or time.perf_counter() - started < least_s:
        work()
        calls += 1
        wait(scene)
        if scene.tiny:
            break
    return (time.perf_counter() - started) / calls


def peak_mib(scene: Scene, work: Callable[[], object]) -> float:
    """Measure the additional MiB of a call on the device; 0 without a device."""
    if not scene.cuda:
        return 0.0
    wait(scene)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    wait(scene)
    return (torch.cuda.max_memory_allocated() - before) / (1 << 20)


def calibrate(scene: Scene) -> list[Row]:
    """Measure ceilings: matrix product and convolution in bf16, copies on the device and to it."""
    size = scene.pick(8192, 64)
    a, b = (torch.randn(size, size, device=scene.device, dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * size**3 / seconds_per_call(scene, lambda: a @ b) / 1e12
    side = scene.pick(512, 16)
    channels = scene.pick(256, 8)
    x = torch.randn(4, channels, side, side, device=scene.device, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(channels, channels, 3, 3, device=scene.device, dtype=torch.bfloat16)
    weight = weight.contiguous(memory_format=torch.channels_last)
    flops = 2 * 9 * channels**2 * x.shape[0] * side**2
    conv = flops / seconds_per_call(scene, lambda: F.conv2d(x, weight, padding=1)) / 1e12
    length = scene.pick(1 << 30, 1 << 16)
    source = torch.empty(length, device=scene.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = 2 * length / seconds_per_call(scene, lambda: target.copy_(source)) / 1e9
    host = torch.empty(length, dtype=torch.uint8, pin_memory=scene.cuda)
    upload = length / seconds_per_call(scene, lambda: target.copy_(host, non_blocking=True)) / 1e9
    return [
        {"what": "bf16 matrix product", "found": matmul, "unit": "TFLOP/s"},
        {"what": "bf16 convolution 3x3, channels last", "found": conv, "unit": "TFLOP/s"},
        {"what": "copy on the device, read and written", "found": copy, "unit": "GB/s"},
        {"what": "copy to the device, pinned", "found": upload, "unit": "GB/s"},
    ]


def ceiling(rows: list[Row]) -> float:
    """Return FLOP/s of the matrix product; 0 if not measured."""
    return next((row["found"] * 1e12 for row in rows if row["what"] == "bf16 matrix product"), 0.0)
