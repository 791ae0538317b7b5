"""Parts of ``bench_gpu``: where a batch spends its time, each encoder with and without kernels, the GPU tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_models import MODELS, Model, Scene, encoder_half, images, latents_of
from gpu_timing import Row, peak_mib, seconds_per_call, wait
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from latentcache.encoders.vae.fused import Kernels

BF16 = torch.bfloat16
#: Rows of a profile.
_MOST = 14
_TESTS = Path(__file__).parents[1] / "tests" / "gpu"


def profiles(scene: Scene) -> Iterator[Row]:
    """Return the operations of an SDXL batch of 8 that take most of the device, with torch and with the kernels."""
    batch, side = scene.pick(8, 1), scene.pick(1024, 64)
    for way, module, kernels in _ways(scene, MODELS[0]):
        values = images(scene, batch, side, BF16, last=True)
        with torch.inference_mode(), kernels:
            latents_of(MODELS[0], module, values)
            wait(scene)
            with profile(activities=[ProfilerActivity.CUDA if scene.cuda else ProfilerActivity.CPU]) as found:
                latents_of(MODELS[0], module, values)
                wait(scene)
        kind = "self_device_time_total" if scene.cuda else "self_cpu_time_total"
        times = sorted(((getattr(event, kind) / 1000, event.key) for event in found.key_averages()), reverse=True)
        total = sum(time for time, _ in times)
        yield {"way": way, "operation": "all", "ms": total, "%": 100.0}
        for time, name in times[:_MOST]:
            yield {"way": way, "operation": name[:90], "ms": time, "%": 100 * time / total}


def before_after(scene: Scene, left: Callable[[], float]) -> Iterator[Row]:
    """Measure every encoder as a build runs it, with torch and with the kernels: rate, memory, distance."""
    for model in MODELS:
        for batch in scene.pick((8, 1), (1,)):
            if left() > 0:
                yield from _compared(scene, model, batch, scene.pick(1024, 64))
            else:
                yield {"model": model.name, "batch": batch, "not run": "no time left"}


def gpu_tests(scene: Scene, left: Callable[[], float]) -> Iterator[Row]:
    """Run ``pytest -m gpu``; without a device its tests are collected only."""
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", str(_TESTS)]
    words += [] if scene.cuda else ["--collect-only"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=max(left(), 60), cwd=_TESTS.parents[1])
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    for line in lines[-30:]:
        if line.startswith(("FAILED", "ERROR")) or line == lines[-1]:
            yield {"tests": line[:200], "exit status": done.returncode}


def _compared(scene: Scene, model: Model, batch: int, side: int) -> Iterator[Row]:
    exact = _exact(scene, model, side)
    before = 0.0
    for way, module, kernels in _ways(scene, model):
        row: Row = {"model": model.name, "side": side, "batch": batch, "way": way}
        values = images(scene, batch, side, BF16, last=not model.clips)
        try:
            with torch.inference_mode(), kernels:
                rate = batch / seconds_per_call(scene, lambda: latents_of(model, module, values))  # noqa: B023
                memory = peak_mib(scene, lambda: latents_of(model, module, values))  # noqa: B023
                apart = latents_of(model, module, values[:1]).float() - exact
        except Exception as error:  # noqa: BLE001 - a kernel that fails is a row
            yield row | {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
            continue
        before = before or rate
        rms = float(apart.square().mean().sqrt() / exact.std())
        yield row | {"img/s": rate, "x before": rate / before, "MiB": memory, "rms from fp32": rms}


def _exact(scene: Scene, model: Model, side: int) -> Tensor:
    """Latents of one image in float32."""
    module = encoder_half(model, scene, torch.float32, last=False)
    with torch.inference_mode():
        return latents_of(model, module, images(scene, 1, side, torch.float32, last=False)).float()


def _ways(scene: Scene, model: Model) -> Iterator[tuple[str, nn.Module, contextlib.AbstractContextManager[Any]]]:
    """Name, module and switch of each way to run a model in bfloat16."""
    module = encoder_half(model, scene, BF16, last=not model.clips, as_conv2d=model.causal)
    yield "torch", module, contextlib.nullcontext()
    if model.class_name != "AutoencoderKL":
        return
    try:
        from latentcache.encoders.vae import kernels
    except ImportError:
        return
    yield "kernels", module, _switched_on(Kernels(module, print, kernels))


@contextlib.contextmanager
def _switched_on(kernels: Kernels) -> Iterator[None]:
    kernels.on = True
    try:
        yield
    finally:
        kernels.on = False
