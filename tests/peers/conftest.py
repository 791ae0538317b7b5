"""Commands and images of the tests of trainers."""

import diffusers
import pytest
import torch
from captioned_images import TEN, draw_captioned, draw_sets
from checkouts import SCALES
from made_pipelines import tiny_vae
from small_cache import run

__all__ = ["run"]


@pytest.fixture(scope="session")
def ten(tmp_path_factory):
    """Ten images in three buckets, with captions."""
    return draw_captioned(tmp_path_factory.mktemp("ten"), TEN)


@pytest.fixture(scope="session")
def sets(tmp_path_factory):
    """Ten images in several buckets, in two folders of kohya with repeats."""
    return draw_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="session")
def vaes(tmp_path_factory):
    """VAEs of the architectures of sd-scripts, with random weights."""
    folder = tmp_path_factory.mktemp("vaes")
    for name, (channels, scale, shift) in SCALES.items():
        torch.manual_seed(0)
        vae = tiny_vae(channels, scale, shift)
        if name == "hunyuan-image":
            levels = {"block_out_channels": (32, 32, 32, 64, 128, 128), "layers_per_block": 1}
            more = {"scaling_factor": scale, "spatial_compression_ratio": 32, "sample_size": 64}
            vae = diffusers.AutoencoderKLHunyuanImage(3, 3, channels, **levels, **more)
        vae.save_pretrained(folder / name)
    return folder
