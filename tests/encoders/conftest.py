"""Tiny seeded models of every class in the table, created by diffusers once per session."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

_KL = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}
_WAN = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 2], "num_res_blocks": 1}
_WAN |= {"temperal_downsample": [False, True]}
_FLAT = {"block_out_channels": (8,) * 4, "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
_DC_SIDES = ("block_types", "block_out_channels", "layers_per_block", "qkv_multiscales")
_DC_VALUES = (("ResBlock", "EfficientViTBlock"), (8, 8), (1, 1), ((), (5,)))
_DC = {f"{half}_{n}": v for half in ("encoder", "decoder") for n, v in zip(_DC_SIDES, _DC_VALUES, strict=True)}
_LTX = dict.fromkeys(("block_out_channels", "decoder_block_out_channels"), (8, 8))
_LTX |= dict.fromkeys(("layers_per_block", "decoder_layers_per_block"), (1, 1, 1))
_LTX |= dict.fromkeys(("spatio_temporal_scaling", "decoder_spatio_temporal_scaling"), (True, False))
_LTX |= {"decoder_inject_noise": (False,) * 3, "upsample_residual": (False,) * 2, "upsample_factor": (1, 1)}
_LTX |= {"down_block_types": ("LTXVideoDownBlock3D",) * 2, "downsample_type": ("conv",) * 2, "patch_size": 2}
_HUNYUAN = {"in_channels": 3, "out_channels": 3, "block_out_channels": (32, 32), "layers_per_block": 1}
_HUNYUAN |= {"spatial_compression_ratio": 2, "sample_size": 64, "scaling_factor": 0.75289}
_LTX2 = {"block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 3, "layers_per_block": (1,) * 5}
_LTX2 |= {"decoder_layers_per_block": (1,) * 4, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
_COSMOS = dict.fromkeys(("encoder_block_out_channels", "decode_block_out_channels"), (8, 8, 8))
_COSMOS |= {"attention_resolutions": (8,), "resolution": 64, "num_layers": 1}
_COSMOS |= {"latents_mean": [1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 3.0, 0.0, 0.0, 4.0, 0.0, 0.0]}
_COSMOS |= {"latents_std": [4.0, 1.0, 1.0, 3.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]}

#: Class name -> arguments of a tiny instance.
TINY = {
    "AutoencoderKL": _KL | {"layers_per_block": 1, "scaling_factor": 0.3611, "shift_factor": 0.1159},
    "AutoencoderTiny": dict.fromkeys(("encoder_block_out_channels", "decoder_block_out_channels"), (8, 8, 8))
    | dict.fromkeys(("num_encoder_blocks", "num_decoder_blocks"), (1, 1, 1)),
    "AutoencoderDC": _DC | {"latent_channels": 8, "attention_head_dim": 4, "scaling_factor": 0.41407},
    "AutoencoderKLQwenImage": _WAN,
    "AutoencoderKLWan": _WAN | {"patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 8},
    "AutoencoderKLFlux2": _KL | {"layers_per_block": 1, "latent_channels": 4},
    "AutoencoderKLHunyuanVideo": _FLAT,
    "AutoencoderKLLTXVideo": _LTX | {"latent_channels": 8},
    "AutoencoderKLHunyuanImage": _HUNYUAN | {"latent_channels": 8},
    "AutoencoderKLLTX2Video": _LTX2 | {"latent_channels": 8},
    "AutoencoderKLCosmos": _COSMOS | {"latent_channels": 4},
    "AutoencoderKLMochi": dict.fromkeys(("encoder_block_out_channels", "decoder_block_out_channels"), (32,) * 4)
    | {"layers_per_block": (1,) * 5},
    "AutoencoderKLCogVideoX": _FLAT,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Create the folder of a tiny model once: ``tiny("AutoencoderKL")``."""
    import diffusers
    import torch

    root, folders = tmp_path_factory.mktemp("models"), {}

    def make(name: str, **changes) -> Path:
        key = json.dumps([name, changes], sort_keys=True)
        if key not in folders:
            torch.manual_seed(7)
            model = getattr(diffusers, name)(**{**TINY[name], **changes})
            if name == "AutoencoderKLFlux2":
                model.bn.running_mean.normal_()
                model.bn.running_var.uniform_(0.5, 2.0)
            if name.startswith("AutoencoderKLLTX"):
                model.latents_mean.normal_()
                model.latents_std.uniform_(0.5, 2.0)
            folders[key] = root / f"{name}-{len(folders)}"
            model.save_pretrained(folders[key], safe_serialization=True)
        return folders[key]

    return make


@pytest.fixture
def copied(tiny, tmp_path):
    """Copy a tiny model's folder; gives the folder and its two files."""
    import shutil

    def copy(name: str = "AutoencoderKL", **changes) -> SimpleNamespace:
        folder = tmp_path / "model"
        shutil.copytree(tiny(name, **changes), folder)
        weights = folder / "diffusion_pytorch_model.safetensors"
        return SimpleNamespace(folder=folder, config=folder / "config.json", weights=weights)

    return copy


@pytest.fixture(scope="session")
def images():
    """Three different images of 64x96."""
    return np.random.default_rng(3).integers(0, 256, (3, 64, 96, 3), dtype=np.uint8)


@pytest.fixture(scope="session")
def reference():
    """Encode with an unmodified diffusers model in float32."""
    import diffusers
    import torch

    def encode(folder: Path, pixels):
        name = json.loads((folder / "config.json").read_text())["_class_name"]
        model = getattr(diffusers, name).from_pretrained(folder, local_files_only=True).eval()
        values = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        video = any(parameter.ndim == 5 for parameter in model.encoder.parameters())
        with torch.no_grad():
            output = model.encode(values.unsqueeze(2) if video else values)
        if hasattr(output, "latent_dist"):
            latents = output.latent_dist.mode()
        else:
            latents = output.latent if hasattr(output, "latent") else output.latents
        return (latents.squeeze(2) if video else latents).numpy()

    return encode
