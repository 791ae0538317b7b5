"""The parts of ``bench_gpu`` that build caches: whole builds against other loops, builds that run out of memory."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from build_data import placed
from build_peers import Planned, diffusers_loop
from build_systems import Kept, inside
from gpu_models import MODELS, Scene, encoder_half, latents_of, make
from gpu_timing import Row
from PIL import Image
from torch import Tensor

from latentcache import BuildSettings, RecipeSettings, build_cache
from latentcache.encoders.opening import open_encoder
from latentcache.encoders.protocol import Encoder, Pixels
from latentcache.errors import DeviceMemoryError
from latentcache.geometry.placement import place
from latentcache.geometry.sizes import Size
from latentcache.pipeline.recipes import resolve_recipe
from latentcache.pipeline.report import BuildReport, Silent
from latentcache.pipeline.resize import resize_crop
from latentcache.recipe import Recipe

BATCH = 8
#: The other loops are several times slower: rates are per picture, so they are given fewer.
PEER_PART = 5
_PICTURES = Path(__file__).with_name("gpu_images.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A model on disk, open once, and the recipe of its builds."""

    scene: Scene
    folder: Path
    recipe_settings: RecipeSettings
    recipe: Recipe
    encoder: Encoder

    def build(
        self, data: Path, *, resample: str, observer: Silent | None = None, batch: int | None = BATCH
    ) -> BuildReport:
        """One build into a fresh folder, with the encoder that is open; without a batch it finds the best one."""
        cache = self.folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        said = RecipeSettings(
            model=self.recipe_settings.model,
            resolutions=self.recipe_settings.resolutions,
            compute_dtype=self.recipe_settings.compute_dtype,
            resample=resample,
        )
        settings = BuildSettings(data=data, out=cache, recipe=said, device=self.scene.device, batch_size=batch)
        with inside(self.encoder):
            return build_cache(settings, observer=observer)


def prepared(scene: Scene, folder: Path) -> Ready:
    """Save the SDXL autoencoder and open it as a build does."""
    model = folder / "model"
    make(MODELS[0], scene).save_pretrained(model, safe_serialization=True)  # type: ignore[operator]
    dtype = "bfloat16" if scene.cuda else "float32"
    settings = RecipeSettings(
        model=str(model), resolutions=(scene.pick(1024, 128),), compute_dtype=dtype, resample="auto"
    )
    recipe, description = resolve_recipe(settings, None, cached_model=None, has_cuda=scene.cuda)
    opened = cast("Encoder", Kept(open_encoder(description, device=scene.device)))
    return Ready(scene=scene, folder=folder, recipe_settings=settings, recipe=recipe, encoder=opened)


def whole_builds(scene: Scene, folder: Path, left: Callable[[], float]) -> list[Row]:
    """2 and 12 megapixels: the encoder alone, a build, a DataLoader loop, a build with Pillow alone."""
    ready, rows = prepared(scene, folder), []
    for label, side, count in scene.pick((("2 MP", 1414, 1600), ("12 MP", 3464, 300)), (("2 MP", 160, 10),)):
        draw(folder / label, count, side)
        found: list[Row] = []
        for name, (pictures, work) in _systems(ready, folder / label, count).items():
            about = {"pictures": label, "system": name}
            in_time = left() > 0
            found.append(about | (_measured(scene, pictures, work) if in_time else {"not run": "no time left"}))
        alone = found[0].get("img/s", 0.0)
        for row in found:
            if "img/s" in row and alone:
                row |= {"efficiency": row["img/s"] / alone, "resample": ready.recipe.pixels.resample}
        rows += found
    return rows


def _systems(ready: Ready, data: Path, count: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name -> how many pictures it encodes, and what does it. The encoder has run once before its clock starts."""
    plan = _plan(data, ready.recipe, count)
    batches = _batches(plan[: 16 * BATCH], ready.recipe)
    fewer = plan[: count // PEER_PART]
    _encode(ready, batches[:1])
    return {
        "encoder alone": (sum(map(len, batches)), lambda: _encode(ready, batches)),
        "latentcache": (count, lambda: _whole(ready, data, ready.recipe.pixels.resample, count)),
        "latentcache, batch auto": (count, lambda: _whole(ready, data, ready.recipe.pixels.resample, count, None)),
        "DataLoader, file per latent": (len(fewer), lambda: _loop(ready, fewer)),
        "latentcache, Pillow only": (count, lambda: _pillow(ready, data, count)),
    }


def memory_drill(scene: Scene, folder: Path) -> list[Row]:
    """A batch that cannot fit, and two calls that fail though they could: every picture must come out."""
    data = folder / "drill"
    draw(data, scene.pick(600, 10), scene.pick(1414, 160))
    ready = prepared(scene, folder)
    rows = []
    for name, batch, fails in (("too large a batch", scene.pick(512, 8), ()), ("two failures", 4, (2, 5))):
        talk = _Talk()
        limit = 4 if scene.tiny and not fails else None
        scarce = cast("Encoder", Scarce(ready.encoder, fails=fails, most=limit))
        poor = Ready(
            scene=scene, folder=folder, recipe_settings=ready.recipe_settings, recipe=ready.recipe, encoder=scarce
        )
        started = time.perf_counter()
        report = poor.build(data, resample=ready.recipe.pixels.resample, observer=talk, batch=batch)
        rows.append(
            {
                "drill": name,
                "batch": batch,
                "pictures": report.samples,
                "encoded": report.encoded,
                "lost": report.samples - report.encoded,
                "halvings": sum("out of memory" in message for message in talk.messages),
                "seconds": time.perf_counter() - started,
            }
        )
    return rows


def draw(data: Path, count: int, side: int) -> None:
    """JPEGs in three aspect ratios, drawn by as many processes as there are cores."""
    data.mkdir()
    processes = min(len(os.sched_getaffinity(0)), count)
    words = [sys.executable, str(_PICTURES), str(data), str(count), str(side), str(processes)]
    running = [subprocess.Popen([*words, str(number)]) for number in range(processes)]
    statuses = [process.wait() for process in running]
    if any(statuses):
        raise RuntimeError("pictures could not be drawn")


class Scarce:
    """An encoder whose device has less memory than it seems.

    Args:
        encoder: The real one.
        fails: Numbers of the calls that fail, from 0.
        most: Pictures that fit.
    """

    def __init__(self, encoder: Encoder, *, fails: Sequence[int], most: int | None) -> None:
        self._encoder, self._fails, self._most, self._calls = encoder, fails, most, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode(self, pixels: Pixels, *, precise: bool = False) -> Any:
        """As the encoder, or no memory."""
        self._check(len(pixels))
        return self._encoder.encode(pixels, precise=precise)

    def submit(self, pictures: Sequence[Pixels], *, precise: bool = False) -> Any:
        """As the encoder, or no memory; of encoders that have it."""
        self._check(len(pictures))
        return cast("Any", self._encoder).submit(pictures, precise=precise)

    def _check(self, pictures: int) -> None:
        if pictures < 2:
            return
        self._calls += 1
        if self._calls - 1 in self._fails or (self._most is not None and pictures > self._most):
            raise DeviceMemoryError("no memory left on the device for a drill")


@dataclass(slots=True)
class _Talk(Silent):
    messages: list[str] = field(default_factory=list)

    def warned(self, message: str) -> None:
        self.messages.append(message)


def _measured(scene: Scene, pictures: int, work: Callable[[], object]) -> Row:
    with _utilisation(scene) as busy:
        wall, cpu = time.perf_counter(), _cpu_seconds()
        work()
        wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
    found = {"img/s": pictures / wall, "CPU ms/img": 1000 * cpu / pictures, "host cores": cpu / wall}
    samples = busy()
    return found | ({"GPU busy %": float(np.mean(samples))} if samples else {})


@contextlib.contextmanager
def _utilisation(scene: Scene) -> Iterator[Callable[[], list[int]]]:
    """What nvidia-smi says of the device every 200 ms, after the end; nothing where it is missing."""
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


def _plan(data: Path, recipe: Recipe, count: int) -> list[Planned]:
    """The cuts of all pictures, from their headers."""
    (table,) = recipe.geometry.tables()
    found = []
    for path in sorted(data.iterdir())[:count]:
        with Image.open(path) as picture:
            found.append(Planned(path=path, placement=place(Size(picture.height, picture.width), table)))
    return found


def _batches(plan: Sequence[Planned], recipe: Recipe) -> list[Pixels]:
    """Pictures of the first bucket, decoded and cut, in batches."""
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


def _whole(ready: Ready, data: Path, resample: str, count: int, batch: int | None = BATCH) -> None:
    report = ready.build(data, resample=resample, batch=batch)
    if report.encoded != count:
        raise RuntimeError(f"the build encoded {report.encoded} of {count}")


def _pillow(ready: Ready, data: Path, count: int) -> None:
    with patch("latentcache.pipeline.decode.turbo_pixels", lambda *_: None):
        _whole(ready, data, "lanczos-pil", count)


def _loop(ready: Ready, plan: Sequence[Planned]) -> None:
    scene, out = ready.scene, ready.folder / "files"
    shutil.rmtree(out, ignore_errors=True)
    dtype = torch.bfloat16 if scene.cuda else torch.float32
    module = encoder_half(MODELS[0], scene, dtype, last=False)

    def encode(images: Tensor) -> Tensor:
        return latents_of(MODELS[0], module, images.to(dtype)).float()

    diffusers_loop(plan, out, encode, batch=BATCH, workers=scene.pick(8, 1), device=scene.device)


def _cpu_seconds() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
