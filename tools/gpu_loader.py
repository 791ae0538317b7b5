"""The loader beside a training step on a device, for ``bench_gpu``: waits, and the cost of copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_models import Scene
from gpu_timing import Row, seconds_per_call, wait
from read_limits import BATCH, payloads, write_caches

from latentcache import open_cache
from latentcache.loader.loader import Loader

#: A product of 4096 x 4096 in bfloat16 takes about 0.2 ms of an H100, so a step takes about 4 ms.
_WIDTH, _PRODUCTS, _EPOCHS, _MIB = 4096, 20, 3, 256


def loader_beside_steps(scene: Scene, folder: Path) -> Iterator[Row]:
    """Return a row per latent size: steps alone, with the loader, and with a plain copy; the wait for a batch."""
    width, mib, sizes = (64, 4, (32,)) if scene.tiny else (_WIDTH, _MIB, (512, 128, 32))
    weights = torch.randn(width, width, device=scene.device, dtype=torch.bfloat16)

    def step(latents: torch.Tensor) -> None:
        for _ in range(_PRODUCTS):
            weights @ weights
        latents.float().square().mean()

    for kib in sizes:
        home = folder / f"loader{kib}"
        home.mkdir()
        write_caches(home, kib, payloads(kib, mib * 1024 // kib))
        loader = open_cache(home / "cache").loader(batch_size=BATCH, remainder="drop", device=scene.device)
        batch = next(iter(loader))["latents"]
        alone = seconds_per_call(scene, lambda latents=batch: step(latents))  # type: ignore[misc]
        fed, waits = _fed(scene, loader, lambda found: step(found["latents"]))
        plain = open_cache(home / "cache").loader(batch_size=BATCH, remainder="drop")
        copied, _ = _fed(scene, plain, lambda found: step(found["latents"].to(scene.device)))
        median, late = np.percentile(waits, (50, 90)).tolist()
        yield (
            {"KiB": kib, "step alone, ms": 1000 * alone, "step with loader, ms": 1000 * fed}
            | {"copied in the step, ms": 1000 * copied, "wait, ms": median, "wait p90, ms": late}
        )


def _fed(scene: Scene, loader: Loader, step: Callable[[dict[str, Any]], None]) -> tuple[float, list[float]]:
    """Measure seconds per step with the loader, and milliseconds of each wait, after a first epoch."""
    waits: list[float] = []
    started = 0.0
    for epoch in range(_EPOCHS):
        if epoch == 1:  # verifies checksums and allocates buffers
            wait(scene)
            waits.clear()
            started = time.perf_counter()
        loader.set_epoch(epoch)
        before = time.perf_counter()
        for found in loader:
            waits.append(1000 * (time.perf_counter() - before))
            step(found)
            wait(scene)
            before = time.perf_counter()
    return (time.perf_counter() - started) / len(waits), waits
