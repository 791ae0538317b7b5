"""Memory of a build, and differences of its latents from references, for ``bench_build``."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from build_data import latents_settings, opened, placed
from build_systems import Bench
from diffusers import AutoencoderKL
from PIL import Image, ImageOps

from latentcache import BuildSettings, build_cache, open_cache
from latentcache.images.resize import resize_crop

#: Interval of memory samples; each costs about 0.3 ms per process.
_LOOK_S = 0.01
#: Number of images whose pixels and latents are compared.
_COMPARED = 40


class Watch:
    """Samples the proportional memory of this process and its children inside ``with``."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._before = held_bytes()
        self._peak = self._before

    @property
    def gained(self) -> int:
        """Peak bytes above those at the start."""
        return self._peak - self._before

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._peak = max(self._peak, held_bytes())


def held_bytes() -> int:
    """Sum the proportional set size of this process and its children; a page shared by n counts 1/n."""
    pids = ["self"]
    for task in Path("/proc/self/task").iterdir():
        pids += _text(task / "children").split()
    return sum(_pss(pid) for pid in pids)


def memory_of(tool: str, bench: Bench, system: str) -> int:
    """Return the peak bytes of one system in a new process, above its start."""
    words = [sys.executable, tool, "--memory-of", bench.name, system, str(bench.data.parent)]
    found: int = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return found


def stored_as_referred(folder: Path) -> dict[str, float]:
    """Compute the largest differences of a float32 build from references, for some of the images.

    Latents: from each image encoded alone by the autoencoder's own ``encode``, in standard deviations.
    Pixels: from Pillow's decoder and resize, in levels, and the fraction of different samples.
    """
    settings = latents_settings(str(folder / "vae"), storage="float32", resample="lanczos-u8")
    cache = folder / "stored"
    build_cache(BuildSettings(data=folder / "data", out=cache, fields={"latents": settings}, device="cpu"))
    recipe, _ = opened(settings)
    vae = AutoencoderKL.from_pretrained(folder / "vae", local_files_only=True).eval()
    stored = _stored(cache)
    latent_error, levels, differing = 0.0, 0, 0.0
    paths = sorted((folder / "data").iterdir())
    for path in paths[:: max(len(paths) // _COMPARED, 1)]:
        pixels, placement = placed(path, recipe)
        cut = resize_crop(pixels, placement, "lanczos-u8")
        with torch.inference_mode():
            images = torch.from_numpy(cut).permute(2, 0, 1)[None].float().div(127.5).sub(1)
            expected = vae.encode(images).latent_dist.mode()[0].numpy()
        apart = np.abs(expected - stored[path.name])
        latent_error = max(latent_error, float(apart.max() / expected.std()))
        if path.suffix == ".jpg":
            off = np.abs(cut.astype(np.int16) - _by_pillow(path, placement))
            levels, differing = max(levels, int(off.max())), max(differing, np.count_nonzero(off) / off.size)
    return {
        "latents, largest difference in standard deviations": latent_error,
        "pixels, largest difference in levels": float(levels),
        "pixels, largest fraction that differs": differing,
    }


def _stored(cache: Path) -> dict[str, Any]:
    """Map each sample name to its latent."""
    found = {}
    for batch in open_cache(cache).read(scaled=False).loader(batch_size=8, seed=0, remainder="partial"):
        for name, latent in zip(batch["names"], batch["latents"], strict=True):
            found[name] = latent.float().numpy().copy()
    return found


def _by_pillow(path: Path, placement: Any) -> Any:
    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    resize, size = placement.resize, placement.bucket
    image = image.resize((resize.width, resize.height), Image.Resampling.LANCZOS)
    box = (placement.left, placement.top, placement.left + size.width, placement.top + size.height)
    return np.asarray(image.crop(box)).astype(np.int16)


def _pss(pid: str) -> int:
    for line in _text(Path("/proc") / pid / "smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _text(path: Path) -> str:
    """Read a file of /proc; empty if its process has ended."""
    try:
        return path.read_text("ascii")
    except OSError:
        return ""
