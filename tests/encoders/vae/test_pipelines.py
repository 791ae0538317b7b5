"""Normalized latents equal those of diffusers' own pipelines."""

from dataclasses import asdict
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from described_models import described_model

from latentcache.loader.values import Affine

IMAGE = torch.zeros(1, 3, 16, 16)
ANY = {"generator": None, "device": "cpu", "dtype": torch.float32}
SIZES = {"vae_scale_factor_temporal": 4, "vae_scale_factor_spatial": 8, "vae_scale_factor": 8}


def pipeline(model, raw, output, **more):
    """The attributes that a pipeline method needs; its encoder returns these raw latents."""
    model.encode = lambda _: SimpleNamespace(**{output: raw})
    return SimpleNamespace(vae=model, **SIZES, **more)


def scaled_only(model, raw):
    return diffusers.StableDiffusionXLImg2ImgPipeline.prepare_latents(
        pipeline(model, raw, "latents"), IMAGE, None, len(raw), 1, torch.float32, "cpu", None, False
    )


def shifted(model, raw):
    stand_in = pipeline(model, raw, "latents")
    return diffusers.FluxImg2ImgPipeline._encode_vae_image(stand_in, IMAGE, None)


def sana(model, raw):
    stand_in = pipeline(model, raw, "latent", scheduler=SimpleNamespace(config=SimpleNamespace(sigma_data=1.0)))
    start = torch.zeros(())
    return diffusers.SanaSprintImg2ImgPipeline.prepare_latents(
        stand_in, IMAGE, start, len(raw), raw.shape[1], 8 * raw.shape[2], 8 * raw.shape[3], **ANY
    )


def qwen(model, raw):
    stand_in = pipeline(model, raw.unsqueeze(2), "latents", latent_channels=raw.shape[1])
    return diffusers.QwenImageEditPipeline._encode_vae_image(stand_in, IMAGE, None).squeeze(2)


def wan(model, raw):
    stand_in = pipeline(model, raw.unsqueeze(2), "latents", config=SimpleNamespace(expand_timesteps=True))
    _, latents, _ = diffusers.WanImageToVideoPipeline.prepare_latents(
        stand_in, IMAGE, 1, raw.shape[1], 16, 16, 1, latents=torch.zeros(1), **ANY
    )
    return latents.squeeze(2)


def flux2(model, raw):
    patchify = diffusers.Flux2Pipeline._patchify_latents
    stand_in = pipeline(model, raw, "latents", _patchify_latents=patchify)
    return diffusers.Flux2Pipeline._encode_vae_image(stand_in, IMAGE, None)


def ltx(model, raw):
    mean, std, scale = model.latents_mean, model.latents_std, model.config.scaling_factor
    return diffusers.LTXPipeline._normalize_latents(raw.unsqueeze(2), mean, std, scale).squeeze(2)


def hunyuan(model, raw):
    stand_in = pipeline(model, raw.unsqueeze(2), "latents", vae_scaling_factor=model.config.scaling_factor)
    _, latents = diffusers.HunyuanVideoImageToVideoPipeline.prepare_latents(
        stand_in, IMAGE, 1, raw.shape[1], 16, 16, 1, latents=torch.zeros(1), **ANY
    )
    return latents.squeeze(2)


def cosmos(model, raw):
    stand_in = pipeline(model, raw.unsqueeze(2), "latents")
    stand_in.scheduler = SimpleNamespace(config=SimpleNamespace(sigma_data=1.0, sigma_max=1.0))
    prepared = diffusers.CosmosVideoToWorldPipeline.prepare_latents(
        stand_in, IMAGE.unsqueeze(2), 1, raw.shape[1], 16, 16, 1, False, latents=torch.zeros(1, 1, 1, 1, 1), **ANY
    )
    return prepared[1].squeeze(2)


PLAYGROUND = {"latents_mean": [1.0, 2.0, 3.0, 4.0], "latents_std": [4.0, 3.0, 2.0, 1.0], "scaling_factor": 0.5}


@pytest.mark.parametrize(
    ("name", "changes", "normalize"),
    [
        ("AutoencoderKL", {"scaling_factor": 0.13025, "shift_factor": None}, scaled_only),
        ("AutoencoderKL", PLAYGROUND, scaled_only),
        ("AutoencoderKL", {}, shifted),
        ("AutoencoderTiny", {"force_upcast": False}, scaled_only),
        ("AutoencoderTiny", {}, shifted),
        ("AutoencoderDC", {}, sana),
        ("AutoencoderKLQwenImage", {}, qwen),
        ("AutoencoderKLWan", {}, wan),
        ("AutoencoderKLFlux2", {}, flux2),
        ("AutoencoderKLHunyuanVideo", {}, hunyuan),
        ("AutoencoderKLLTXVideo", {"scaling_factor": 0.75}, ltx),
        ("AutoencoderKLLTX2Video", {}, ltx),
        ("AutoencoderKLCosmos", {}, cosmos),
    ],
)
def test_a_latent_is_normalized_as_in_the_pipeline(tiny, name, changes, normalize):
    folder = tiny(name, **changes)
    model = getattr(diffusers, name).from_pretrained(folder, local_files_only=True)
    spec = described_model(folder).spec
    raw = torch.from_numpy(np.random.default_rng(5).normal(size=(1, spec.channels, 4, 6)).astype(np.float32))
    normalized = Affine.of(asdict(spec.normalization)).apply(raw, torch.empty_like(raw))
    torch.testing.assert_close(normalized, normalize(model, raw), rtol=1e-5, atol=1e-6)
    assert spec.normalization.kind != "none"
