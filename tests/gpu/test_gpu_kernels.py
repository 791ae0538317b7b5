"""The Triton kernels on a CUDA device against torch. Run with ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from latentcache.encoders.vae.encoder import drop_decoder
from latentcache.encoders.vae.fused import Kernels, channels_last

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


@pytest.fixture(scope="module")
def kernels():
    from latentcache.encoders.vae import kernels

    return kernels


def images(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda") + 5 * torch.randn(shape[1], 1, 1, device="cuda")
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def assert_near(found, expected, dtype):
    apart = (found.double() - expected).abs() / (1 + expected.abs())
    assert apart.max() < ROUNDING[dtype]


@DTYPES
@pytest.mark.parametrize("shape", [(3, 128, 257, 129, 32), (2, 512, 32, 48, 32), (1, 96, 7, 5, 3), (2, 30, 1, 9, 5)])
def test_normalization_and_sums_are_those_of_torch(kernels, shape, dtype):
    *sides, groups = shape
    x, (bias, weight, shift) = images(sides, dtype), torch.randn(3, sides[1], device="cuda")
    whole = x.double() + bias.double()[:, None, None]
    expected = F.silu(F.group_norm(whole, groups, weight.double(), shift.double(), 1e-6))
    found = kernels.normalize(x, bias, groups, weight, shift, 1e-6, silu=True, out=torch.empty_like(x))
    assert_near(found, expected, dtype)
    assert_near(kernels.add(found.clone(), x, bias), found.double() + whole, dtype)


def test_a_batch_of_more_values_than_int32(kernels):
    x = torch.randn(17, 128, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    none = torch.zeros(128, device="cuda")
    last = F.group_norm(x[-1:].float(), 32, eps=1e-6)
    kernels.normalize(x, none, 32, none + 1, none, 1e-6, silu=False, out=x)
    assert_near(x[-1:], last.double(), torch.bfloat16)


@DTYPES
@pytest.mark.parametrize("tokens", [4096, 16384, 40000, 777])
def test_attention_is_that_of_torch(kernels, tokens, dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, tokens, 512, device="cuda").to(dtype)
    found = kernels.attend(q, k, v)
    for rows in (slice(0, 50), slice(tokens - 50, tokens)):
        scores = q[:, rows].double() @ k.double().mT * 512**-0.5
        assert_near(found[:, rows], scores.softmax(-1) @ v.double(), dtype)


def test_an_encoder_with_kernels_is_no_further_from_float32_and_takes_no_more_memory():
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(64, 128, 128),
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
    )
    module = drop_decoder(vae).eval().requires_grad_(False).cuda()
    x = torch.randn(2, 3, 512, 384, device="cuda")
    with torch.inference_mode():
        exact = module.encode(x).latent_dist.mode()
        kernels = Kernels(channels_last(module.to(torch.bfloat16)), pytest.fail)
        apart, peaks = [], []
        x = x.bfloat16().contiguous(memory_format=torch.channels_last)
        for on in (False, True):
            kernels.on, kernels._left = False, 0
            kernels.encode(lambda: module.encode(x).latent_dist.mode())  # tries the kernels, and compiles them
            kernels.on = on
            torch.cuda.reset_peak_memory_stats()
            latents = module.encode(x).latent_dist.mode()
            peaks.append(torch.cuda.max_memory_allocated())
            apart.append(float((latents - exact).square().mean().sqrt() / exact.std()))
    assert apart[1] < 1.1 * apart[0]
    assert peaks[1] <= peaks[0]


def test_a_kernel_that_fails_is_off_after_one_warning(monkeypatch, kernels):
    def fails(*arguments):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "attend", fails)
    vae = drop_decoder(AutoencoderKL(block_out_channels=(64,), sample_size=64)).cuda().bfloat16()
    warnings: list[str] = []
    chosen = Kernels(channels_last(vae.eval()), warnings.append)
    x = torch.randn(2, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        latents = [chosen.encode(lambda: vae.encoder(x)) for _ in range(20)]
    assert len(warnings) == 1
    assert "no compiler" in warnings[0]
    assert all(torch.equal(batch, latents[0]) for batch in latents)
