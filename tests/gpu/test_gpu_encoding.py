"""The encoder on a CUDA device. Run with ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from described_models import described_model
from diffusers import AutoencoderKL
from torch import nn

from latentcache.encoders.pixels import Pixels
from latentcache.encoders.vae.encoder import VaeEncoder, _host
from latentcache.encoders.vae.fused import channels_last
from latentcache.errors import DeviceMemoryError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

#: Clock cycles of a kernel that only waits: tens of milliseconds.
LATE = 50_000_000
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae")
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(32, 64, 64),
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        force_upcast=False,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def batches() -> list[Pixels]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (1 + n % 3, 128, 192, 3), dtype=np.uint8) for n in range(8)]


def opened(model: Path, compute_dtype: str = "float32") -> VaeEncoder:
    return VaeEncoder(described_model(model, compute_dtype=compute_dtype, storage_dtype="float32"), CUDA)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_results_are_whole_while_the_device_is_late(model: Path, batches: list[Pixels], ahead: int) -> None:
    encoder = opened(model)
    expected = [encoder.encode(batch) for batch in batches]
    waiting, found = [], []
    for batch in batches:
        torch.cuda._sleep(LATE)
        copy = batch.copy()
        waiting.append(encoder.submit(list(copy)))
        copy[:] = 0
        if len(waiting) == ahead:
            found.append(waiting.pop(0).result())
    found += [pending.result() for pending in waiting]
    for want, got in zip(expected, found, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3)
        assert np.isfinite(got).all()


def test_only_the_encoder_half_is_on_the_device(model: Path) -> None:
    before = torch.cuda.memory_allocated()
    encoder = opened(model)
    whole = sum(parameter.nbytes for parameter in AutoencoderKL.from_pretrained(model).parameters())
    assert 0 < torch.cuda.memory_allocated() - before < whole
    encoder.close()


def test_submit_does_not_wait_for_the_device(model: Path, batches: list[Pixels]) -> None:
    encoder = opened(model)
    encoder.encode(batches[0])
    torch.cuda._sleep(20 * LATE)
    pending = encoder.submit(list(batches[0]))
    assert not pending.done()
    pending.result()
    assert pending.done()


def test_host_memory_is_locked_and_reused(model: Path, batches: list[Pixels]) -> None:
    encoder = opened(model)
    slab = _host((4, 4), torch.uint8, CUDA)
    assert slab.is_pinned()
    for batch in batches * 3:
        encoder.encode(batch)
    used = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for batch in batches * 3:
        encoder.encode(batch)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == used


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 20])
def test_channels_last_normalization_is_as_exact_as_that_of_torch(dtype: torch.dtype, offset: float) -> None:
    torch.manual_seed(0)
    norm = nn.GroupNorm(8, 64, device="cuda")
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = (torch.randn(3, 64, 40, 24, device="cuda") + offset * torch.randn(64, 1, 1, device="cuda")).to(dtype)
    with torch.inference_mode():
        exact, own = norm.double()(x.double()), norm.to(dtype)(x)
        found = channels_last(norm)(x.contiguous(memory_format=torch.channels_last))
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert (found - exact).square().mean() <= 1.1 * (own - exact).square().mean()


def test_out_of_memory_leaves_nothing_and_the_next_batch_is_fine(model: Path, batches: list[Pixels]) -> None:
    encoder = opened(model)
    encoder.encode(batches[0])
    before = torch.cuda.memory_allocated()
    hook = encoder._module(encoder._dtype).encoder.conv_in.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda *_: torch.empty(1 << 42, device="cuda")
    )
    with pytest.raises(DeviceMemoryError):
        encoder.encode(batches[0])
    hook.remove()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert np.isfinite(encoder.encode(batches[0])).all()
