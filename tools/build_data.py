"""Drawn images, a small autoencoder and preloaded batches for ``bench_build`` and ``bench_gpu``.

Each scene is drawn once and saved in several crops, which is faster than drawing every image.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from make_images import draw, invent
from PIL import Image

from latentcache.encoders.pixels import Pixels
from latentcache.encoders.vae.builtin import Encoder
from latentcache.encoders.vae.describe import ModelDescription, describe
from latentcache.encoders.vae.producer import open_encoder
from latentcache.fields.latents import LatentsRecipe, LatentsSettings
from latentcache.fields.protocol import DescribeContext
from latentcache.geometry.sizes import Placement, Size, place_in
from latentcache.images.decode import decode
from latentcache.images.resize import resize_crop

ASPECTS = ((1, 1), (4, 3), (3, 4))
RESOLUTION = 256
BATCH = 8
#: Side of a square of one and of twelve megapixels.
SMALL_SIDE, LARGE_SIDE = 1000, 3464
#: Side of the images whose second build is timed.
TINY_SIDE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Number of images of each kind."""

    jpegs: int = 192
    """JPEGs of about one megapixel."""
    large: int = 24
    """JPEGs of about twelve megapixels."""
    pngs: int = 8
    odd: int = 4
    """Rotated by EXIF, grey, transparent and WebP images."""

    @property
    def images(self) -> int:
        """Total number of images."""
        return self.jpegs + self.large + self.pngs + self.odd


def latents_settings(model: str, *, storage: str | None = None, resample: str | None = None) -> LatentsSettings:
    """Return buckets of 256 x 256, 224 x 288 and 288 x 224."""
    return LatentsSettings(
        model=model, resolutions=(RESOLUTION,), bucket_step=32, storage_dtype=storage, resample=resample
    )


def opened(settings: LatentsSettings, device: str = "cpu") -> tuple[LatentsRecipe, Encoder]:
    """Return the recipe of these settings, and its encoder."""
    found = describe(settings, DescribeContext(device=device))
    assert isinstance(found.recipe, LatentsRecipe)
    model = ModelDescription(**found.producer, spec=found.recipe.encoder)
    return found.recipe, open_encoder(model, device=device)


def draw_data(folder: Path, counts: Counts) -> list[Path]:
    """Return the images in the order of their names."""
    folder.mkdir(parents=True)
    for number in range(counts.jpegs):
        _cut(number, SMALL_SIDE).save(folder / f"a{number:04}.jpg", quality=90)
    for number in range(counts.large):
        _cut(number, LARGE_SIDE).save(folder / f"b{number:04}.jpg", quality=90)
    for number in range(counts.pngs):
        _cut(counts.jpegs + number, SMALL_SIDE).save(folder / f"c{number:04}.png", compress_level=3)
    for number in range(counts.odd):
        _save_odd(_cut(counts.jpegs + counts.pngs + number, SMALL_SIDE), folder / f"d{number:04}", number)
    return sorted(folder.iterdir())


def draw_tiny(folder: Path, count: int) -> None:
    """Draw small JPEGs for builds that only detect changes."""
    folder.mkdir(parents=True)
    image = _scene(0, SMALL_SIDE)
    across = image.width - TINY_SIDE
    for number in range(count):
        left, top = number % across, number // across
        box = (left, top, left + TINY_SIDE, top + TINY_SIDE)
        image.crop(box).save(folder / f"{number:06}.jpg", quality=80)


def small_vae(folder: Path) -> str:
    """Save a seeded AutoencoderKL of two small levels without attention."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = AutoencoderKL(
        block_out_channels=[8, 16], norm_num_groups=4, latent_channels=4, mid_block_add_attention=False, **blocks
    )
    vae.save_pretrained(folder, safe_serialization=True)
    return str(folder)


def placed(path: Path, recipe: LatentsRecipe) -> tuple[Pixels, Placement]:
    """Decode an image (H, W, 3) and place it as a build does."""
    pixels = decode(path.read_bytes(), recipe.pixels)
    (table,) = recipe.geometry.tables()
    size = Size(pixels.shape[0], pixels.shape[1])
    return pixels, place_in(size, table.nearest(size))


def batches_in_memory(data: Path, recipe: LatentsRecipe, batch: int = BATCH) -> list[Pixels]:
    """Decode and resize the batches (B, H, W, 3) that a build makes of these files."""
    by_bucket: dict[Size, list[Pixels]] = {}
    for path in sorted(data.iterdir()):
        pixels, placement = placed(path, recipe)
        by_bucket.setdefault(placement.bucket, []).append(resize_crop(pixels, placement, recipe.pixels.resample))
    return [np.stack(items[i : i + batch]) for items in by_bucket.values() for i in range(0, len(items), batch)]


@lru_cache(maxsize=2 * len(ASPECTS))
def _scene(number: int, side: int) -> Image.Image:
    return draw(invent(ASPECTS[number], side, np.random.default_rng(number)), np.random.default_rng(number))


def _cut(number: int, side: int) -> Image.Image:
    """Draw the scene of this number's aspect with a different crop per file."""
    image, shift = _scene(number % len(ASPECTS), side), number // len(ASPECTS)
    return image.crop((shift, shift, image.width, image.height))


def _save_odd(image: Image.Image, path: Path, number: int) -> None:
    kind = number % 4
    if kind == 0:
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(path.with_suffix(".jpg"), quality=90, exif=exif)
    elif kind == 1:
        image.convert("L").save(path.with_suffix(".jpg"), quality=90)
    elif kind == 2:
        clear = image.convert("RGBA")
        clear.putalpha(180)
        clear.save(path.with_suffix(".png"), compress_level=3)
    else:
        image.save(path.with_suffix(".webp"), quality=85, method=0)
