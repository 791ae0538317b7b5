"""The Conv3d-to-Conv2d rewrite gives equal latents and rejects clips of several frames."""

import numpy as np
import pytest
import torch
from described_models import described_model

from latentcache.encoders.devices import choose_device
from latentcache.encoders.vae.encoder import VaeEncoder, conv3d_to_conv2d, load_module


@pytest.mark.parametrize("name", ["AutoencoderKLQwenImage", "AutoencoderKLWan", "AutoencoderKLHunyuanVideo"])
def test_every_causal_convolution_is_rewritten_with_equal_latents(name, tiny, images):
    description = described_model(tiny(name), storage_dtype="float32")
    as_conv2d = VaeEncoder(description, choose_device("cpu")).encode(images)
    as_conv3d = VaeEncoder(description, choose_device("cpu"), as_conv2d=False).encode(images)
    assert np.abs(as_conv2d - as_conv3d).max() <= 1e-4 * as_conv3d.std()
    module = load_module(description, torch.float32)
    causal = [part for part in module.modules() if "CausalConv3d" in type(part).__name__]
    before = sum(weight.numel() for weight in module.parameters())
    conv3d_to_conv2d(module)
    assert causal
    assert all("forward" in vars(part) for part in causal)
    assert sum(weight.numel() for weight in module.parameters()) < 0.6 * before
    with pytest.raises(ValueError, match="for single frames was given 2"):
        causal[0](torch.zeros(1, getattr(causal[0], "conv", causal[0]).in_channels, 2, 16, 16))
