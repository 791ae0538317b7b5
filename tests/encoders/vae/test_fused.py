"""The choice between torch and the kernels, with kernels of plain torch in place of Triton."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from latentcache.encoders.vae.encoder import drop_decoder
from latentcache.encoders.vae.fused import Kernels


def normalize(x, bias, groups, weight, shift, eps, *, silu, out):
    values = F.group_norm(x.float() + bias[:, None, None], groups, weight, shift, eps)
    return out.copy_(F.silu(values) if silu else values)


def add(x, other, bias):
    return x.copy_(x.float() + other + bias[:, None, None])


def attend(q, k, v):
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


PLAIN = {"normalize": normalize, "add": add, "attend": attend}


@pytest.fixture
def module():
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        norm_num_groups=8,
    )
    for parameter in vae.parameters():  # biases of new models are almost zero
        torch.nn.init.normal_(parameter, std=0.2)
    return drop_decoder(vae).eval().requires_grad_(False).to(memory_format=torch.channels_last)


@pytest.fixture
def images():
    return torch.randn(2, 3, 48, 40).contiguous(memory_format=torch.channels_last)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a batch takes, by whether the kernels are on."""
    seconds = {True: 0.5, False: 1.0}

    def taken(self, encode):
        encode()
        return seconds[self.on]

    monkeypatch.setattr(Kernels, "_seconds", taken)
    return seconds


def tried(module, images, batches=20, **kernels):
    """The kernels after some batches, the latents of each batch, and the warnings."""
    warnings: list[str] = []
    chosen = Kernels(module, warnings.append, SimpleNamespace(**PLAIN | kernels))
    with torch.inference_mode():
        latents = [chosen.encode(lambda: module.encode(images).latent_dist.mode()) for _ in range(batches)]
    return chosen, latents, warnings


def test_the_rewritten_blocks_give_the_latents_of_diffusers(module, images):
    with torch.inference_mode():
        expected = module.encode(images).latent_dist.mode()
        chosen = Kernels(module, print, SimpleNamespace(**PLAIN))
        chosen.on = True
        latents = module.encode(images).latent_dist.mode()
    assert not torch.equal(latents, expected)  # the kernels ran
    torch.testing.assert_close(latents, expected, atol=2e-5, rtol=1e-4)


def test_every_block_of_the_encoder_uses_the_kernels(module, images):
    calls = []

    def counted(name):
        def call(*arguments, **options):
            calls.append(name)
            return PLAIN[name](*arguments, **options)

        return call

    Kernels(module, print, SimpleNamespace(**{name: counted(name) for name in PLAIN})).on = True
    with torch.inference_mode():
        module.encode(images)
    blocks = 2 + 2  # two levels, and the middle
    assert [calls.count(name) for name in PLAIN] == [2 * blocks + 1, blocks + 1, 1]


def test_faster_kernels_are_on_after_the_warm_batches(module, images, clock):
    module.to(torch.bfloat16)
    chosen, latents, warnings = tried(module, images.bfloat16())
    assert chosen.on
    assert not warnings
    assert all(torch.equal(batch, latents[0]) for batch in latents[:17])  # a short build is torch alone
    assert not torch.equal(latents[17], latents[0])


def test_kernels_that_are_no_faster_stay_off(module, images, clock):
    clock[True] = 0.95
    chosen, _, warnings = tried(module.to(torch.bfloat16), images.bfloat16())
    assert not chosen.on
    assert not warnings


def fails(*arguments, **options):
    raise RuntimeError("Failed to find C compiler\nlong story")


def wrong(x, other, bias):
    return x.copy_(x.float() + other)


def nan(q, k, v):
    return torch.full_like(q, torch.nan)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"normalize": fails}, "Failed to find C compiler"),
        ({"add": wrong}, "standard deviations"),
        ({"attend": nan}, "nan standard deviations"),
    ],
    ids=["compile error", "wrong", "NaN"],
)
def test_a_broken_kernel_costs_one_warning_and_no_batch(module, images, clock, broken, why):
    chosen, latents, (warning,) = tried(module.to(torch.bfloat16), images.bfloat16(), **broken)
    assert not chosen.on
    assert why in warning
    assert "long story" not in warning
    assert all(torch.equal(batch, latents[0]) for batch in latents)


def test_a_kernel_that_fails_later_is_off_from_there(module, images, clock):
    calls = []

    def fails_later(q, k, v):
        calls.append(1)
        return attend(q, k, v) if len(calls) < 4 else fails()

    chosen, latents, (warning,) = tried(module.to(torch.bfloat16), images.bfloat16(), attend=fails_later)
    assert not chosen.on
    assert "C compiler" in warning
    assert torch.equal(latents[-1], latents[0])


def test_a_lack_of_memory_halves_the_batch_as_without_kernels(module, images, clock):
    def full(q, k, v):
        raise torch.OutOfMemoryError("CUDA out of memory")

    chosen = Kernels(module, pytest.fail, SimpleNamespace(**PLAIN | {"attend": full}))
    chosen.on = True
    with pytest.raises(torch.OutOfMemoryError), torch.inference_mode():
        chosen.encode(lambda: module.encode(images))
    assert chosen.on


def test_values_that_are_not_finite_stay_so(module, images, clock):
    module.to(torch.bfloat16)
    images[0, 0, 3, 3] = torch.nan
    chosen, latents, warnings = tried(module, images.bfloat16())
    assert chosen.on
    assert not warnings
    assert latents[-1][0].isnan().all()
    assert latents[-1][1].isfinite().all()


def test_without_triton_nothing_is_tried(module, images, clock, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen = Kernels(module, pytest.fail)
    with torch.inference_mode():
        for _ in range(20):
            chosen.encode(lambda: module.encode(images).latent_dist.mode())
    assert not chosen.on
