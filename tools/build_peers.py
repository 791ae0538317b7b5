"""Loops that people write instead of a cache builder, as ``bench_build`` runs them beside one.

``diffusers_loop`` is the precompute step of many training scripts: a ``DataLoader`` whose workers open, resize and
normalize images with Pillow, one file with ``torch.save`` for each latent. ``sequential_loop`` is the same with
latents appended to large files, as mosaicml's ``precompute_latents.py`` does. Both are flattered: buckets are known
beforehand, pages are warm, nothing is hashed, checked or made durable, and libraries are imported before the clock
starts. Pixels are cut as a build cuts them, so all systems encode the same batches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from latentcache.geometry.sizes import Placement, Size

WORKERS = 2
#: Size limit of a file of the sequential loop.
SHARD_BYTES = 64 << 20

Encode = Callable[[Tensor], Tensor]
"""Normalized images (B, 3, H, W) in, latents (B, C, h, w) out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One image and its crop."""

    path: Path
    placement: Placement


class Images(Dataset[tuple[Tensor, str]]):
    """Load images as normalized floats, (3, H, W) in [-1, 1], with Pillow and two transforms."""

    def __init__(self, plan: Sequence[Planned]) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        planned = self.plan[index]
        resize, crop = planned.placement.resize, planned.placement
        with Image.open(planned.path) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
        image = image.resize((resize.width, resize.height), Image.Resampling.LANCZOS)
        box = (crop.left, crop.top, crop.left + crop.bucket.width, crop.top + crop.bucket.height)
        pixels = torch.from_numpy(np.array(image.crop(box))).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div(255).sub_(0.5).div_(0.5), planned.path.stem


class BucketBatches:
    """Batches of one size, in the order of the files."""

    def __init__(self, plan: Sequence[Planned], batch: int) -> None:
        by_bucket: dict[Size, list[int]] = {}
        for number, planned in enumerate(plan):
            by_bucket.setdefault(planned.placement.bucket, []).append(number)
        self.batches = [rows[i : i + batch] for rows in by_bucket.values() for i in range(0, len(rows), batch)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def sleeping(delay_ms: int) -> Encode:
    """Pause like the stub encoder, then compute block means."""

    def encode(images: Tensor) -> Tensor:
        time.sleep(delay_ms / 1000 * len(images))
        means = F.avg_pool2d(images, 8)
        return torch.cat([means, means.mean(1, keepdim=True)], dim=1)

    return encode


def with_vae(folder: str) -> Encode:
    """Draw a sample of the posterior."""
    vae = AutoencoderKL.from_pretrained(folder, local_files_only=True).eval()

    def encode(images: Tensor) -> Tensor:
        sample: Tensor = vae.encode(images).latent_dist.sample()
        return sample

    return encode


def diffusers_loop(
    plan: Sequence[Planned], out: Path, encode: Encode, *, batch: int, workers: int = WORKERS, device: str = "cpu"
) -> int:
    """Write one file with ``torch.save`` per latent; return their number."""
    out.mkdir()
    done = 0
    for latents, names in _encoded(plan, encode, batch, workers, device):
        for latent, name in zip(latents, names, strict=True):
            torch.save(latent.clone(), out / f"{name}.pt")
            done += 1
    return done


def sequential_loop(
    plan: Sequence[Planned], out: Path, encode: Encode, *, batch: int, workers: int = WORKERS, device: str = "cpu"
) -> int:
    """Append latents to large files with an index; return their number."""
    out.mkdir()
    index: list[dict[str, Any]] = []
    file, number = (out / "0.bin").open("wb"), 0
    for latents, names in _encoded(plan, encode, batch, workers, device):
        for latent, name in zip(latents.numpy(), names, strict=True):
            if file.tell() >= SHARD_BYTES:
                file.close()
                number += 1
                file = (out / f"{number}.bin").open("wb")
            index.append({"name": name, "file": number, "offset": file.tell(), "shape": latent.shape})
            file.write(latent.tobytes())
    file.close()
    (out / "index.json").write_text(json.dumps(index), "utf-8")
    return len(index)


@torch.inference_mode()
def _encoded(
    plan: Sequence[Planned], encode: Encode, batch: int, workers: int, device: str
) -> Iterator[tuple[Tensor, Sequence[str]]]:
    """Yield latents on the host, batch by batch."""
    loader = DataLoader(
        Images(plan), batch_sampler=BucketBatches(plan, batch), num_workers=workers, pin_memory=device != "cpu"
    )
    for images, names in loader:
        yield encode(images.to(device, non_blocking=True)).cpu(), names
