"""The loader beside a training step on a device, for ``bench_gpu``: waits, and the cost of copies."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from gpu_models import Scene
from gpu_timing import Row, seconds_per_call, wait
from read_limits import BATCH, payloads, write_caches

from latentcache import open_cache

_WIDTH, _PRODUCTS, _EPOCHS, _MIB = 4096, 24, 3, 256


def loader_beside_steps(scene: Scene, folder: Path) -> list[Row]:
    """A row for each size of latents: steps alone, steps fed by the loader, and the wait for a batch."""
    width, mib, sizes = (64, 4, (32,)) if scene.tiny else (_WIDTH, _MIB, (512, 128, 32))
    weights = torch.randn(width, width, device=scene.device)

    def step(latents: torch.Tensor) -> None:
        for _ in range(_PRODUCTS):
            weights @ weights
        latents.float().square().mean()

    rows: list[Row] = []
    for kib in sizes:
        home = folder / f"loader{kib}"
        home.mkdir()
        write_caches(home, kib, payloads(kib, mib * 1024 // kib))
        loader = open_cache(home / "cache").loader(batch_size=BATCH, remainder="drop", device=scene.device)
        batch = next(iter(loader))["latents"]
        alone = seconds_per_call(scene, lambda latents=batch: step(latents))  # type: ignore[misc]
        waits: list[float] = []
        steps, started = 0, 0.0
        for epoch in range(_EPOCHS):
            if epoch == 1:  # the first proves the entries and makes the buffers
                wait(scene)
                steps, started = 0, time.perf_counter()
                waits.clear()
            loader.set_epoch(epoch)
            before = time.perf_counter()
            for found in loader:
                waits.append(1000 * (time.perf_counter() - before))
                step(found["latents"])
                wait(scene)
                steps += 1
                before = time.perf_counter()
        fed = (time.perf_counter() - started) / steps
        median, late = np.percentile(waits, (50, 90)).tolist()
        rows.append(
            {"KiB": kib, "step alone, ms": 1000 * alone, "step with loader, ms": 1000 * fed}
            | {"wait, ms": median, "wait p90, ms": late}
        )
    return rows
