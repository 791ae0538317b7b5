"""Known autoencoder classes and their differences: one frozen table, one row per class.

The class name alone tells if a model is an image encoder; nothing is guessed from a model's name. Guarantee: a class
that is not an image encoder is rejected by name before any weight is read. ``encode`` and
``read`` of a row hold the class's own default for every field, so a configuration that leaves a field out and
one that spells the default out are one encoder (a test holds them against the installed diffusers).
Costs nothing: strings and integers, no torch. Sources: the classes of diffusers 0.42 (``models/autoencoders``)
and, for the use of a latent in transformers, the pipelines and trainers named in each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any

from latentcache.errors import UnsupportedModelError
from latentcache.value import Value


class Family(Value):
    """Properties of one autoencoder class. Strings name fields of its configuration."""

    name: str
    """Class name in diffusers."""
    source: str
    """References of this row."""
    encode: Mapping[str, Any] = field(default_factory=dict)
    """Fields that change what ``encode`` computes, with the class's defaults."""
    read: Mapping[str, Any] = field(default_factory=dict)
    """Fields that only say how raw latents are normalized, with the class's defaults."""
    channels: str = "latent_channels"
    """Field with the channels of a latent."""
    factor: str = "block_out_channels"
    """Field that gives the spatial factor: a number, one entry per level, or one flag per halving."""
    patch: str = ""
    """Field with the patch size the encoder folds into channels before its first layer."""
    colors: str = "in_channels"
    """Field with the color channels."""
    packs_from: int | None = 0
    """Channels from which on transformers pack 2x2 latents, doubling the size multiple; None for never."""
    normalization: str = "scale-shift"
    """``scale-shift``, ``mean-std``, ``batch-norm`` (2x2 patches), ``buffers`` (mean, std in the weights)."""
    output: str = "latent_dist"
    """Attribute of the result of ``encode``; empty if it has to be searched."""
    video: bool | None = False
    """True if images go in as clips of one frame, (B, 3, 1, H, W); None if only the weights tell."""
    frame_step: str = ""
    """Field that gives the frames of a latent frame, as ``factor`` is given; empty: images only."""
    tile_fields: tuple[str, ...] = ()
    """Fields that decide the size of a tile; other classes have constants."""
    ldm: bool = False
    """True if checkpoints in the original latent-diffusion key layout exist for this class."""
    generic: bool = False


_KL_ENCODER = {
    "in_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"],
    "block_out_channels": [64],
    "layers_per_block": 1,
    "act_fn": "silu",
    "latent_channels": 4,
    "norm_num_groups": 32,
    "use_quant_conv": True,
    "mid_block_add_attention": True,
}
_WAN_ENCODER = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
}
# Wan 2.1 published these sixteen pairs; Qwen-Image trained its encoder from that one and kept them.
_WAN_LATENTS = {
    "latents_mean": [
        *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
        *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    ],
    "latents_std": [
        *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
        *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
    ],
}

_ROWS = (
    Family(
        name="AutoencoderKL",
        source="diffusers autoencoder_kl.py; 16 channels are packed 2x2 by SD3 and Flux.1 (their pipelines)",
        encode=_KL_ENCODER,
        read={"scaling_factor": 0.18215, "shift_factor": None, "latents_mean": None, "latents_std": None},
        packs_from=16,
        tile_fields=("sample_size",),
        ldm=True,
    ),
    Family(
        name="AutoencoderTiny",
        source="diffusers autoencoder_tiny.py; madebyollin/taesd README: latents are those of the large model, "
        "scaled already",
        encode={
            "in_channels": 3,
            "encoder_block_out_channels": [64, 64, 64, 64],
            "act_fn": "relu",
            "latent_channels": 4,
            "num_encoder_blocks": [1, 3, 3, 3],
        },
        read={"scaling_factor": 1.0, "shift_factor": 0.0},
        factor="encoder_block_out_channels",
        packs_from=16,
        output="latents",
    ),
    Family(
        name="AutoencoderDC",
        source="diffusers autoencoder_dc.py; pipeline_sana.py: latents * scaling_factor, transformer patch 1",
        encode={
            "in_channels": 3,
            "latent_channels": 32,
            "attention_head_dim": 32,
            "encoder_block_types": "ResBlock",
            "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
            "encoder_layers_per_block": [2, 2, 2, 3, 3, 3],
            "encoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
            "downsample_block_type": "pixel_unshuffle",
            "encoder_out_shortcut": True,
        },
        read={"scaling_factor": 1.0},
        factor="encoder_block_out_channels",
        packs_from=None,
        output="latent",
    ),
    Family(
        name="AutoencoderKLQwenImage",
        source="diffusers autoencoder_kl_qwenimage.py; pipeline_qwenimage_edit.py: (z - mean) / std, packed 2x2",
        encode={**_WAN_ENCODER, "input_channels": 3},
        read=_WAN_LATENTS,
        channels="z_dim",
        factor="dim_mult",
        colors="input_channels",
        normalization="mean-std",
        video=True,
        frame_step="temperal_downsample",
    ),
    Family(
        name="AutoencoderKLWan",
        source="diffusers autoencoder_kl_wan.py; pipeline_wan_i2v.py: (z - mean) / std, transformer patch 2",
        encode={**_WAN_ENCODER, "is_residual": False, "in_channels": 3, "patch_size": None},
        read=_WAN_LATENTS,
        channels="z_dim",
        factor="dim_mult",
        patch="patch_size",
        normalization="mean-std",
        video=True,
        frame_step="temperal_downsample",
    ),
    Family(
        name="AutoencoderKLFlux2",
        source="diffusers autoencoder_kl_flux2.py; pipeline_flux2.py: _patchify_latents, then batch norm",
        encode={
            **_KL_ENCODER,
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "block_out_channels": [128, 256, 512, 512],
            "layers_per_block": 2,
            "latent_channels": 32,
        },
        read={"batch_norm_eps": 1e-4, "patch_size": [2, 2]},
        normalization="batch-norm",
        tile_fields=("sample_size",),
        ldm=True,
    ),
    Family(
        name="AutoencoderKLHunyuanVideo",
        source="diffusers autoencoder_kl_hunyuan_video.py; transformer_hunyuan_video.py: patch 2",
        encode={
            "in_channels": 3,
            "latent_channels": 16,
            "down_block_types": ["HunyuanVideoDownBlock3D"] * 4,
            "block_out_channels": [128, 256, 512, 512],
            "layers_per_block": 2,
            "act_fn": "silu",
            "norm_num_groups": 32,
            "spatial_compression_ratio": 8,
            "temporal_compression_ratio": 4,
            "mid_block_add_attention": True,
        },
        read={"scaling_factor": 0.476986},
        factor="spatial_compression_ratio",
        video=True,
        frame_step="temporal_compression_ratio",
    ),
    Family(
        name="AutoencoderKLLTXVideo",
        source="diffusers autoencoder_kl_ltx.py: mean and std are buffers; pipeline_ltx_image2video.py",
        encode={
            "in_channels": 3,
            "latent_channels": 128,
            "block_out_channels": [128, 256, 512, 512],
            "down_block_types": ["LTXVideoDownBlock3D"] * 4,
            "layers_per_block": [4, 3, 3, 3, 4],
            "spatio_temporal_scaling": [True, True, True, False],
            "downsample_type": ["conv"] * 4,
            "patch_size": 4,
            "patch_size_t": 1,
            "resnet_norm_eps": 1e-6,
            "encoder_causal": True,
        },
        read={"scaling_factor": 1.0},
        factor="spatio_temporal_scaling",
        patch="patch_size",
        packs_from=None,
        normalization="buffers",
        video=True,
        frame_step="spatio_temporal_scaling",
    ),
)

#: Known classes by name.
FAMILIES: Mapping[str, Family] = MappingProxyType({row.name: row for row in _ROWS})

_SOUND = "it encodes sound"
#: Classes that are called autoencoders and cannot make image latents: name -> why.
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "AutoencoderOobleck": _SOUND,
        "AutoencoderSAME": _SOUND,
        "AutoencoderVidTok": "its latents become numbers of a codebook and its clips have a fixed length",
        "AutoencoderRAE": "it takes images of one size in [0, 1] and normalizes inside encode",
        "AutoencoderKLAllegro": "it encodes in tiles only, which gives other latents than whole images",
    }
)

#: Stands in for any other ``Autoencoder*`` class: facts come from its configuration and its weights.
GENERIC = Family(
    name="",
    source="configuration of the model",
    channels="latent_channels z_dim z_channels",
    factor="spatial_compression_ratio scale_factor_spatial encoder_block_out_channels block_out_channels "
    "ch_mult dim_mult",
    colors="in_channels input_channels",
    output="",
    video=None,
    frame_step="temporal_compression_ratio scale_factor_temporal",
    tile_fields=("sample_size", "sample_height", "sample_width"),
    generic=True,
)


def family_of(class_name: str, where: str) -> Family:
    """The row of a class."""
    if class_name in FAMILIES:
        return FAMILIES[class_name]
    why = UNSUPPORTED.get(class_name, "" if class_name.startswith("Autoencoder") else "it is not an autoencoder")
    if why or class_name.endswith("Audio"):
        raise UnsupportedModelError(
            f"{class_name} is not an image encoder",
            where=where,
            why=why or _SOUND,
            fix="give the VAE of the model you train: its folder (often called vae/), or --model demo to try",
        )
    return GENERIC
