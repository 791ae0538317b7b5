"""A build on a CUDA device, compared with the same build on the CPU. Run with ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from latentcache import open_cache
from latentcache.fields.latents import LatentsSettings
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.settings import BuildSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

#: Relative to the latents' standard deviation: bfloat16 encodes deviate about 2 % rms from float32.
TOLERANCE = {"float32": 0.02, "float16": 0.02, "bfloat16": 0.2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae")
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        norm_num_groups=8,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("cuda") / "data", np.random.default_rng(0)
    folder.mkdir()
    for number, size in enumerate([(256, 256), (192, 320), (320, 192)] * 4):
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


def latents(cache: Path) -> dict[str, torch.Tensor]:
    batches = open_cache(cache).read(scaled=False, dtype=torch.float32).loader(batch_size=2)
    return {name: z for batch in batches for name, z in zip(batch["names"], batch["latents"], strict=True)}


def build(images: Path, out: Path, model: Path, device: str, compute_dtype: str, batch_size: int = 4) -> Path:
    latents = LatentsSettings(model=str(model), resolutions=(256,), compute_dtype=compute_dtype)
    fields = {"latents": latents}
    settings = BuildSettings(data=images, out=out, fields=fields, device=device, batch_size=batch_size)
    assert build_cache(settings).encoded == 12
    return out


@pytest.mark.parametrize("compute_dtype", ["float32", "float16", "bfloat16"])
def test_cuda_and_cpu_agree(images: Path, model: Path, tmp_path: Path, compute_dtype: str) -> None:
    expected = latents(build(images, tmp_path / "cpu", model, "cpu", "float32"))
    found = latents(build(images, tmp_path / "cuda", model, "cuda", compute_dtype))
    deviation = torch.stack([z.std() for z in expected.values()]).mean()
    for name, z in expected.items():
        assert (found[name] - z).abs().max() < 5 * TOLERANCE[compute_dtype] * deviation
