"""Autoencoders and text encoders of full size with random weights; nothing is downloaded.

Speed, memory and relations between precisions depend on shapes, not on trained weights. Configurations are those of
the named models; ``tiny`` ones have the same classes and blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from latentcache.encoders.vae.encoder import conv3d_to_conv2d, drop_decoder
from latentcache.encoders.vae.fused import channels_last

_KL: dict[str, Any] = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
_KL |= {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32}
_TINY_KL: dict[str, Any] = {"down_block_types": ["DownEncoderBlock2D"] * 2}
_TINY_KL |= {"up_block_types": ["UpDecoderBlock2D"] * 2}
_TINY_KL |= {"block_out_channels": [8, 16], "layers_per_block": 1, "norm_num_groups": 4}
_DC_BLOCKS = ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3
_DC_SCALES: list[list[int]] = [[], [], [], [5], [5], [5]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One autoencoder."""

    name: str
    class_name: str
    config: Mapping[str, Any]
    tiny: Mapping[str, Any]
    clips: bool = False
    """Takes (B, 3, T, H, W)."""
    causal: bool = False
    """Its causal 3D convolutions can be rewritten as 2D ones."""


MODELS = (
    Model(
        name="SDXL KL",
        class_name="AutoencoderKL",
        config=_KL | {"latent_channels": 4, "sample_size": 1024, "scaling_factor": 0.13025},
        tiny=_TINY_KL | {"latent_channels": 4},
    ),
    Model(
        name="Flux 16ch",
        class_name="AutoencoderKL",
        config=_KL | {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False},
        tiny=_TINY_KL | {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False},
    ),
    Model(
        name="DC-AE f32c32",
        class_name="AutoencoderDC",
        config={
            "latent_channels": 32,
            "encoder_block_types": _DC_BLOCKS,
            "decoder_block_types": _DC_BLOCKS,
            "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
            "decoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
            "encoder_layers_per_block": [2, 2, 2, 3, 3, 3],
            "decoder_layers_per_block": [3, 3, 3, 3, 3, 3],
            "encoder_qkv_multiscales": _DC_SCALES,
            "decoder_qkv_multiscales": _DC_SCALES,
            "upsample_block_type": "interpolate",
            "downsample_block_type": "Conv",
        },
        tiny={
            "latent_channels": 8,
            "attention_head_dim": 4,
            "encoder_block_types": ["ResBlock", "EfficientViTBlock"],
            "decoder_block_types": ["ResBlock", "EfficientViTBlock"],
            "encoder_block_out_channels": [8, 8],
            "decoder_block_out_channels": [8, 8],
            "encoder_layers_per_block": [1, 1],
            "decoder_layers_per_block": [1, 1],
            "encoder_qkv_multiscales": [[], [5]],
            "decoder_qkv_multiscales": [[], [5]],
        },
    ),
    Model(
        name="Qwen-Image",
        class_name="AutoencoderKLQwenImage",
        config={"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
        tiny={"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
        | {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4},
        clips=True,
        causal=True,
    ),
    Model(
        name="Wan 2.1",
        class_name="AutoencoderKLWan",
        config={"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
        tiny={"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
        | {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4},
        clips=True,
        causal=True,
    ),
    Model(
        name="Tiny",
        class_name="AutoencoderTiny",
        config={},
        tiny={
            "encoder_block_out_channels": [8, 8, 8],
            "decoder_block_out_channels": [8, 8, 8],
            "num_encoder_blocks": [1, 1, 1],
            "num_decoder_blocks": [1, 1, 1],
        },
    ),
    Model(
        name="LTX-Video",
        class_name="AutoencoderKLLTXVideo",
        config={},
        tiny={
            "latent_channels": 8,
            "block_out_channels": [8, 8],
            "decoder_block_out_channels": [8, 8],
            "down_block_types": ["LTXVideoDownBlock3D"] * 2,
            "layers_per_block": [1, 1, 1],
            "decoder_layers_per_block": [1, 1, 1],
            "spatio_temporal_scaling": [True, False],
            "decoder_spatio_temporal_scaling": [True, False],
            "decoder_inject_noise": [False] * 3,
            "downsample_type": ["conv"] * 2,
            "upsample_residual": [False] * 2,
            "upsample_factor": [1, 1],
            "patch_size": 2,
        },
        clips=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The device and the size of the models."""

    device: str
    tiny: bool

    @property
    def cuda(self) -> bool:
        """True for a CUDA device."""
        return self.device.startswith("cuda")

    def pick(self, full: Any, tiny: Any) -> Any:
        """Return one of two sizes."""
        return tiny if self.tiny else full


def make(model: Model, scene: Scene, device: str = "cpu") -> nn.Module:
    """Create the whole autoencoder in float32; weights are equal for each run on a device."""
    torch.manual_seed(0)
    diffusers.utils.logging.set_verbosity_error()
    with torch.device(device):
        return _made(model, scene)


def _made(model: Model, scene: Scene) -> nn.Module:
    found: nn.Module = getattr(diffusers, model.class_name)(**dict(scene.pick(model.config, model.tiny)))
    return found.eval().requires_grad_(False)


def encoder_half(model: Model, scene: Scene, dtype: torch.dtype, *, last: bool, as_conv2d: bool = False) -> nn.Module:
    """Create the encoder half on the device.

    Args:
        model: The autoencoder.
        scene: Device and sizes.
        dtype: Type of weights and activations.
        last: Use channels last.
        as_conv2d: Rewrite its causal Conv3d as Conv2d.
    """
    module = drop_decoder(make(model, scene, scene.device)).to(scene.device, dtype)
    if as_conv2d:
        conv3d_to_conv2d(module)
    elif last and scene.cuda and not model.clips:
        channels_last(module)
    return module


def images(scene: Scene, batch: int, side: int, dtype: torch.dtype, *, last: bool) -> Tensor:
    """Create (B, 3, side, side) of smooth noise in [-1, 1]."""
    made = torch.Generator().manual_seed(side)
    coarse = torch.rand(batch, 3, max(side // 16, 2), max(side // 16, 2), generator=made)
    smooth = nn.functional.interpolate(coarse, size=(side, side), mode="bicubic").mul_(2).sub_(1).clamp_(-1, 1)
    order = torch.channels_last if last else torch.contiguous_format
    return smooth.to(scene.device, dtype).contiguous(memory_format=order)


def latents_of(model: Model, module: nn.Module, values: Tensor) -> Tensor:
    """Return the mode of the posterior, or the latent, of ``encode``."""
    found: Any = module.encode(values.unsqueeze(2) if model.clips else values)  # type: ignore[operator]
    for name in ("latent_dist", "latent", "latents"):
        found = getattr(found, name, found)
    latents: Tensor = found.mode() if hasattr(found, "mode") and not isinstance(found, Tensor) else found
    return latents
