"""Folded against unfolded: the same latents, flat weights, and no clip of several frames."""

import numpy as np
import pytest
import torch
from described_models import described_model

from latentcache.encoders.vae.encoder import VaeEncoder, choose_device
from latentcache.encoders.vae.fold import fold_single_frames
from latentcache.encoders.vae.modules import load_module

THREE = ["AutoencoderKLQwenImage", "AutoencoderKLWan", "AutoencoderKLHunyuanVideo"]


def module_of(folder, dtype=torch.float32):
    return load_module(described_model(folder), dtype)


@pytest.mark.parametrize("name", THREE)
def test_latents_are_equal_to_1e_4_of_their_spread(name, tiny, images):
    description = described_model(tiny(name), storage_dtype="float32")
    folded = VaeEncoder(description, choose_device("cpu")).encode(images).latents
    unfolded = VaeEncoder(description, choose_device("cpu"), fold=False).encode(images).latents
    assert np.abs(folded - unfolded).max() <= 1e-4 * unfolded.std()


@pytest.mark.parametrize("name", THREE)
def test_every_causal_convolution_is_folded_and_its_weight_is_flat(name, tiny):
    module = module_of(tiny(name))
    causal = [part for part in module.modules() if "CausalConv3d" in type(part).__name__]
    before = sum(weight.numel() for weight in module.parameters())
    assert fold_single_frames(module) == len(causal) > 0
    assert all(weight.ndim != 5 or weight.shape[2] == 1 for weight in module.parameters())
    assert sum(weight.numel() for weight in module.parameters()) < 0.6 * before


@pytest.mark.parametrize("name", THREE)
def test_several_frames_are_rejected(name, tiny):
    module = module_of(tiny(name))
    fold_single_frames(module)
    convolution = next(part for part in module.modules() if "CausalConv3d" in type(part).__name__)
    channels = getattr(convolution, "conv", convolution).in_channels
    with pytest.raises(ValueError, match="for single frames was given 2"):
        convolution(torch.zeros(1, channels, 2, 16, 16))


def test_the_mask_of_one_frame_is_not_made(tiny, images, monkeypatch):
    from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video as theirs

    description = described_model(tiny("AutoencoderKLHunyuanVideo"), storage_dtype="float32")
    expected = VaeEncoder(description, choose_device("cpu"), fold=False).encode(images).latents
    monkeypatch.setattr(theirs, "prepare_causal_attention_mask", None)
    np.testing.assert_allclose(
        VaeEncoder(description, choose_device("cpu")).encode(images).latents, expected, atol=1e-5
    )
