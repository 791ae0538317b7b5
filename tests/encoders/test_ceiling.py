"""Work counted without weights, against the same count of the loaded module; the ceiling on the CPU, tiny."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from latentcache.encoders.ceiling import PictureFlops, matmul_flops
from latentcache.encoders.describe import describe_model
from latentcache.encoders.opening import matmul_ceiling, open_encoder, picture_flops
from latentcache.encoders.stub import StubEncoder
from latentcache.encoders.vae import load_vae
from latentcache.geometry.sizes import Size

SIZES = [Size(64, 96), Size(320, 128), Size(512, 512)]


@pytest.mark.parametrize(
    "name", ["AutoencoderKL", "AutoencoderTiny", "AutoencoderDC", "AutoencoderKLWan", "AutoencoderKLFlux2"]
)
def test_two_sizes_give_all_others(name, tiny):
    flops = PictureFlops(describe_model(str(tiny(name))))
    for size in SIZES:
        assert flops(size) == pytest.approx(flops.counted(size), rel=0.01)


def test_a_fold_is_counted(tiny):
    described = describe_model(str(tiny("AutoencoderKLWan")))
    size = Size(64, 96)
    assert PictureFlops(described).counted(size) < 0.7 * PictureFlops(described, fold=False).counted(size)


def test_the_count_is_that_of_the_loaded_encoder(tiny, pictures):
    described = describe_model(str(tiny("AutoencoderTiny")))
    encoder = load_vae(described, device="cpu")
    with FlopCounterMode(display=False) as counter:
        encoder.encode(pictures[:1])
    assert counter.get_total_flops() == PictureFlops(described).counted(Size(64, 96)) > 0


def test_a_ceiling_is_positive_and_only_measured_on_cuda(tiny):
    assert matmul_flops("float32", device=torch.device("cpu"), side=64, seconds=0.001) > 1e6
    assert matmul_ceiling(StubEncoder()) == 0.0
    described = describe_model(str(tiny("AutoencoderTiny")))
    assert matmul_ceiling(open_encoder(described, device="cpu")) == 0.0
    assert picture_flops(described)(Size(64, 64)) > 0


def test_no_room_for_matrices(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "randn", full)
    assert matmul_flops("float32", device=torch.device("cpu")) == 0.0
