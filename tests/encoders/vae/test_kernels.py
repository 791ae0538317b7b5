"""The Triton kernels against torch: computed by Triton's interpreter, and compiled for cards that need not be there.

Triton is a 290 MB download, so ``make test-slow`` installs it for these tests.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import nn

from latentcache.encoders.vae.encoder import drop_decoder
from latentcache.encoders.vae.fused import Kernels

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # of NumPy about NaN

#: The interpreter cuts bfloat16 off where a card rounds.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
#: Batch, channels, height, width, groups.
SHAPES = [
    (2, 64, 40, 24, 8),
    (1, 96, 7, 5, 3),
    (3, 24, 1, 1, 4),
    (2, 30, 13, 11, 5),
    (1, 7, 3, 50, 7),
    (1, 12, 9, 9, 1),
]


@pytest.fixture(scope="module")
def kernels():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton reads TRITON_INTERPRET=1 when it is imported: run make test-slow")
    from latentcache.encoders.vae import kernels

    return kernels


def images(shape, dtype, offset=5.0):
    x = torch.randn(shape) + offset * torch.randn(shape[1], 1, 1)
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def assert_near(result, expected, dtype):
    apart = (result.double() - expected).abs() / (1 + expected.abs())
    assert apart.max() < ROUNDING[dtype]


@DTYPES
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normalization_is_that_of_torch(kernels, shape, silu, dtype):
    *sides, groups = shape
    torch.manual_seed(0)
    x, (bias, weight, shift) = images(sides, dtype), torch.randn(3, sides[1])
    whole = x.double() + bias.double()[:, None, None]
    expected = F.group_norm(whole, groups, weight.double(), shift.double(), 1e-6)
    expected = F.silu(expected) if silu else expected
    result = kernels.normalize(x, bias, groups, weight, shift, 1e-6, silu=silu, out=torch.empty_like(x))
    assert_near(result, expected, dtype)
    result = kernels.normalize(x, bias, groups, weight, shift, 1e-6, silu=silu, out=x)
    assert result is x
    assert_near(result, expected, dtype)


def test_sums_of_more_tiles_than_programs(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "_PROGRAMS", 6)
    monkeypatch.setattr(kernels, "_TILE", 32)
    torch.manual_seed(0)
    x, none = images((2, 8, 11, 13), torch.float32), torch.zeros(8)
    result = kernels.normalize(x, none, 2, none + 1, none, 1e-6, silu=False, out=torch.empty_like(x))
    assert_near(result, F.group_norm(x.double(), 2, eps=1e-6), torch.float32)


def test_nan_spoils_its_group_and_nothing_else(kernels):
    torch.manual_seed(0)
    x, none = images((2, 16, 5, 5), torch.bfloat16), torch.zeros(16)
    x[0, 3, 2, 2], x[1, 9, 0, 0] = torch.nan, torch.inf
    result = kernels.normalize(x, none, 4, none + 1, none, 1e-6, silu=True, out=torch.empty_like(x))
    expected = torch.zeros(2, 16, dtype=torch.bool)
    expected[0, :4] = expected[1, 8:12] = True
    assert torch.equal(~result.isfinite().all((2, 3)), expected)
    assert result[0, :4].isnan().all()
    assert kernels.add(x, x.clone(), none)[0, 3, 2, 2].isnan()


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_is_in_place(kernels, shape, dtype):
    torch.manual_seed(0)
    x, other, bias = images(shape[:4], dtype), images(shape[:4], dtype), torch.randn(shape[1])
    expected = x.double() + other.double() + bias.double()[:, None, None]
    assert kernels.add(x, other, bias) is x
    assert_near(x, expected, dtype)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 64, 77, 200])
@pytest.mark.parametrize("most", [32, 32768])
def test_attention_is_that_of_torch(kernels, monkeypatch, tokens, most, dtype):
    """In several chunks of queries; rows that are too long for a kernel take torch's softmax."""
    monkeypatch.setattr(kernels, "_QUERIES", 50)
    monkeypatch.setattr(kernels, "_MOST_COLUMNS", most)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, tokens, 24).to(dtype)
    expected = F.scaled_dot_product_attention(*(x.double()[:, None] for x in (q, k, v)))[:, 0]
    assert_near(kernels.attend(q, k, v), expected, dtype)
    q[1, tokens // 2] = torch.nan
    nan = kernels.attend(q, k, v).isnan()
    assert nan[1, tokens // 2].all()
    assert nan.sum() == 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_encoder_with_kernels_gives_the_latents_of_diffusers(kernels, dtype):
    """No further from float32 than torch itself."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(16, 24),
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        norm_num_groups=8,
    )
    for parameter in vae.parameters():
        nn.init.normal_(parameter, std=0.2)
    module, pixels = drop_decoder(vae).eval().requires_grad_(False), torch.randn(2, 3, 36, 44)
    with torch.inference_mode():
        exact = module.encode(pixels).latent_dist.mode()
        module.to(dtype, memory_format=torch.channels_last)
        plain = module.encode(pixels.to(dtype)).latent_dist.mode()
        Kernels(module, pytest.fail, kernels).on = True
        result = module.encode(pixels.to(dtype)).latent_dist.mode()
    apart = [float((latents - exact).square().mean().sqrt() / exact.std()) for latents in (result, plain)]
    assert apart[0] < max(1.5 * apart[1], 2e-5)  # the interpreter rounds worse


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from latentcache.encoders.vae import kernels

kinds = {name: "*fp32" for name in ("bias", "sums", "weight", "shift", "factors", "scores")}
kinds |= {"x": "*bf16", "other": "*bf16", "out": "*bf16"} | {"count": "fp32", "eps": "fp32", "scale": "fp32"}
constants = {"CHANNELS": 96, "WIDTH": 128, "ROWS": 32, "SILU": True, "MEMBERS": 3}
for kernel in (kernels._sums, kernels._factors, kernels._scaled, kernels._added, kernels._softmax):
    names = kernel.arg_names
    values = {(number,): constants[name] for number, name in enumerate(names) if name in constants}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, values)
    assert compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=kernels._FUSED).asm["cubin"]
"""


@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "120"])
def test_every_kernel_compiles_for_a_card(tmp_path, capability):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", COMPILE, capability], env=environment, check=True)
