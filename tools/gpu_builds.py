"""The parts of ``bench_gpu`` that build caches: whole builds against other loops, builds that run out of memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from build_data import opened, placed
from build_peers import Planned, diffusers_loop
from build_systems import Kept, inside
from gpu_models import MODELS, Scene, encoder_half, latents_of, make
from gpu_timing import Row
from PIL import Image
from process_costs import cpu_seconds
from torch import Tensor

from latentcache import BuildSettings, build_cache
from latentcache.encoders.pixels import Pixels
from latentcache.encoders.vae.builtin import Encoder
from latentcache.errors import DeviceMemoryError
from latentcache.fields.latents import LatentsRecipe, LatentsSettings
from latentcache.geometry.sizes import Size, place_in
from latentcache.images.resize import resize_crop
from latentcache.pipeline.publish import BuildReport, Silent

BATCH = 8
#: Fewer images for other ways, which are several times slower; rates are per image.
SLOW_PART = 4
_IMAGES = Path(__file__).with_name("gpu_images.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A model on disk, its open encoder, and the recipe of its builds."""

    scene: Scene
    folder: Path
    settings: LatentsSettings
    recipe: LatentsRecipe
    encoder: Encoder

    def build(self, data: Path, *, resample: str, observer: Silent | None = None, batch: int = BATCH) -> BuildReport:
        """Build into a new folder with the open encoder."""
        cache = self.folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        fields = {"latents": replace(self.settings, resample=resample)}
        settings = BuildSettings(data=data, out=cache, fields=fields, device=self.scene.device, batch_size=batch)
        with inside(self.encoder):
            return build_cache(settings, observer=observer)


def prepared(scene: Scene, folder: Path) -> Ready:
    """Save the SDXL autoencoder and open it as a build does."""
    model = folder / "model"
    make(MODELS[0], scene).save_pretrained(model, safe_serialization=True)  # type: ignore[operator]
    dtype = "bfloat16" if scene.cuda else "float32"
    sides = (scene.pick(1024, 128),)
    settings = LatentsSettings(model=str(model), resolutions=sides, compute_dtype=dtype, resample="auto")
    recipe, encoder = opened(settings, scene.device)
    kept = cast("Encoder", Kept(encoder))
    return Ready(scene=scene, folder=folder, settings=settings, recipe=recipe, encoder=kept)


def whole_builds(scene: Scene, folder: Path, left: Callable[[], float]) -> Iterator[Row]:
    """Measure 2 and 12 megapixels: the encoder alone, a build, a DataLoader loop."""
    ready = prepared(scene, folder)
    for label, side, count in scene.pick((("2 MP", 1414, 800), ("12 MP", 3464, 200)), (("2 MP", 160, 10),)):
        draw(folder / label, count, side)
        alone = 0.0
        for name, (images, work) in _systems(ready, folder / label, count).items():
            row: Row = {"images": label, "system": name}
            if left() > 0:
                row |= _measured(scene, images, work)
                alone = alone or row["img/s"]
                row |= {"efficiency": row["img/s"] / alone, "resample": ready.recipe.pixels.resample}
            yield row if "img/s" in row else row | {"not run": "no time left"}


def _systems(ready: Ready, data: Path, count: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Map each system to its number of images and its function. The encoder has run once before."""
    plan = _plan(data, ready.recipe, count)
    batches = _batches(plan[: 16 * BATCH], ready.recipe)
    fewer = plan[: count // SLOW_PART]
    _encode(ready, batches[:1])
    return {
        "encoder alone": (sum(map(len, batches)), lambda: _encode(ready, batches)),
        "latentcache": (count, lambda: _whole(ready, data, ready.recipe.pixels.resample, count)),
        "DataLoader, file per latent": (len(fewer), lambda: _loop(ready, fewer)),
    }


def memory_drill(scene: Scene, folder: Path) -> Iterator[Row]:
    """Run a batch too large for memory and two calls that fail: every image must be encoded."""
    data = folder / "drill"
    draw(data, scene.pick(600, 10), scene.pick(1414, 160))
    ready = prepared(scene, folder)
    for name, batch, fails in (("too large a batch", scene.pick(512, 8), ()), ("two failures", 4, (2, 5))):
        observer = _Messages()
        limit = 4 if scene.tiny and not fails else None
        scarce = cast("Encoder", LimitedEncoder(ready.encoder, fails=fails, most=limit))
        poor = replace(ready, encoder=scarce)
        started = time.perf_counter()
        report = poor.build(data, resample=ready.recipe.pixels.resample, observer=observer, batch=batch)
        yield {
            "drill": name,
            "batch": batch,
            "images": report.samples,
            "encoded": report.encoded,
            "lost": report.samples - report.encoded,
            "halvings": sum("out of memory" in message for message in observer.messages),
            "seconds": time.perf_counter() - started,
        }


def draw(data: Path, count: int, side: int) -> None:
    """JPEGs in three aspect ratios, drawn by as many processes as there are cores."""
    data.mkdir()
    processes = min(len(os.sched_getaffinity(0)), count)
    words = [sys.executable, str(_IMAGES), str(data), str(count), str(side), str(processes)]
    running = [subprocess.Popen([*words, str(number)]) for number in range(processes)]
    statuses = [process.wait() for process in running]
    if any(statuses):
        raise RuntimeError("images could not be drawn")


class LimitedEncoder:
    """An encoder whose device pretends to have less memory.

    Args:
        encoder: The real one.
        fails: Numbers of the calls that fail, from 0.
        most: Maximum number of images.
    """

    def __init__(self, encoder: Encoder, *, fails: Sequence[int], most: int | None) -> None:
        self._encoder, self._fails, self._most, self._calls = encoder, fails, most, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def submit(self, images: Sequence[Pixels], *, precise: bool = False) -> Any:
        """Encode, or raise out of memory."""
        self._check(len(images))
        return self._encoder.submit(images, precise=precise)

    def _check(self, images: int) -> None:
        if images < 2:
            return
        self._calls += 1
        if self._calls - 1 in self._fails or (self._most is not None and images > self._most):
            raise DeviceMemoryError("no memory left on the device for a drill")


@dataclass(slots=True)
class _Messages(Silent):
    messages: list[str] = field(default_factory=list)

    def warned(self, message: str) -> None:
        self.messages.append(message)


def _measured(scene: Scene, images: int, work: Callable[[], object]) -> Row:
    with _utilization(scene) as busy:
        wall, cpu = time.perf_counter(), cpu_seconds()
        work()
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    found = {"img/s": images / wall, "CPU ms/img": 1000 * cpu / images, "host cores": cpu / wall}
    samples = busy()
    return found | ({"GPU busy %": float(np.mean(samples))} if samples else {})


@contextlib.contextmanager
def _utilization(scene: Scene) -> Iterator[Callable[[], list[int]]]:
    """Record nvidia-smi every 200 ms; empty if it is missing."""
    tool = shutil.which("nvidia-smi") if scene.cuda else None
    if tool is None:
        yield list
        return
    words = [tool, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    text: list[str] = []
    try:
        yield lambda: [int(line) for line in text[0].split() if line.isdigit()]
    finally:
        process.terminate()
        text.append(process.communicate()[0])


def _plan(data: Path, recipe: LatentsRecipe, count: int) -> list[Planned]:
    """Return the crops of all images from their headers."""
    (table,) = recipe.geometry.tables()
    found = []
    for path in sorted(data.iterdir())[:count]:
        with Image.open(path) as image:
            size = Size(image.height, image.width)
            found.append(Planned(path=path, placement=place_in(size, table.nearest(size))))
    return found


def _batches(plan: Sequence[Planned], recipe: LatentsRecipe) -> list[Pixels]:
    """Decode and crop images of the first bucket, in batches."""
    bucket = plan[0].placement.bucket
    cut = [
        resize_crop(placed(item.path, recipe)[0], item.placement, recipe.pixels.resample)
        for item in plan
        if item.placement.bucket == bucket
    ]
    return [np.stack(cut[i : i + BATCH]) for i in range(0, len(cut), BATCH)]


def _encode(ready: Ready, batches: Sequence[Pixels]) -> None:
    for batch in batches:
        ready.encoder.encode(batch)


def _whole(ready: Ready, data: Path, resample: str, count: int) -> None:
    report = ready.build(data, resample=resample)
    if report.encoded != count:
        raise RuntimeError(f"the build encoded {report.encoded} of {count}")


def _loop(ready: Ready, plan: Sequence[Planned]) -> None:
    scene, out = ready.scene, ready.folder / "files"
    shutil.rmtree(out, ignore_errors=True)
    dtype = torch.bfloat16 if scene.cuda else torch.float32
    module = encoder_half(MODELS[0], scene, dtype, last=False)

    def encode(images: Tensor) -> Tensor:
        return latents_of(MODELS[0], module, images.to(dtype)).float()

    diffusers_loop(plan, out, encode, batch=BATCH, workers=scene.pick(8, 1), device=scene.device)
