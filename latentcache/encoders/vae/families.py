"""Files of a diffusers autoencoder, and the properties of its latents: channels, factor, multiple, normalization.

Properties are read from ``config.json``, and for some classes from a few small tensors of the weights. A table has
what the configuration of a class leaves open. Guarantee: a class that is not an image encoder is rejected by name
before any weight is read. Fields that move the bytes of ``encode`` are hashed into the identity. Fields that only say
how latents are read are not, so a corrected scaling factor encodes nothing again. No torch. Sources: the classes of
diffusers 0.42 (``models/autoencoders``), and the pipelines and trainers named in each row.

The same encoder has the same names of tensors in a diffusers folder, in an original latent-diffusion file and inside
a full checkpoint. Sources: CompVis/latent-diffusion ``ldm/modules/diffusionmodules/model.py`` (class Encoder) and
diffusers ``models/autoencoders/vae.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from latentcache.encoders import files
from latentcache.errors import ModelNotFoundError, UnsupportedModelError
from latentcache.fields.latents import Normalization
from latentcache.identity.content import json_hash
from latentcache.value import Value

Config = Mapping[str, Any]


class Family(Value):
    """Properties that the configuration of one class leaves open; by default, of a class without a row."""

    name: str = ""
    """Class name in diffusers; empty for a class without a row."""
    scale: float | None = None
    """``scaling_factor`` of a configuration that has none."""
    packs_from: int | None = 0
    """Channels from which on transformers pack 2x2 latents, doubling the size multiple; None for never."""
    statistics: str = ""
    """``needed``: the pipelines normalize by mean and std per channel; ``patched``: by batch norm of 2x2 patches."""
    factor: str = (
        "spatial_compression_ratio scale_factor_spatial encoder_block_out_channels block_out_channels"
        " ch_mult dim_mult"
    )
    """Fields that give the spatial factor: a number, one entry per level, or one flag per halving."""
    frame_step: str = "temporal_compression_ratio scale_factor_temporal"
    """Fields that give the frames of a latent frame, likewise."""
    patch: str = ""
    """Field with the patch size that the encoder folds into channels before its first layer."""
    posterior: bool = True
    """False if ``encode`` gives one latent and no distribution."""
    ldm: bool = False
    """True if checkpoints in the original latent-diffusion key layout exist for this class."""
    resolutions: Mapping[float, int] = field(default_factory=dict)
    """Scale of the latents -> side in pixels of the square images that its models are trained on."""


_WAN: Mapping[str, Any] = {"statistics": "needed", "factor": "dim_mult", "frame_step": "temperal_downsample"}
_ROWS = (
    # 16 channels are packed 2x2 by the pipelines of SD3 and Flux.1. Configurations of SD 1 have no scale.
    Family(
        name="AutoencoderKL",
        scale=0.18215,
        packs_from=16,
        ldm=True,
        resolutions={0.18215: 512, 0.13025: 1024, 1.5305: 1024, 0.3611: 1024},  # SD 1, SDXL, SD 3, Flux.1
    ),
    # madebyollin/taesd README: latents are those of the large model, scaled already.
    Family(name="AutoencoderTiny", scale=1.0, packs_from=16, posterior=False),
    # pipeline_sana.py: latents * scaling_factor, transformer patch 1
    Family(name="AutoencoderDC", scale=1.0, packs_from=None, posterior=False),
    # pipeline_qwenimage_edit.py, pipeline_wan_i2v.py: (z - mean) / std, packed 2x2
    Family(name="AutoencoderKLQwenImage", resolutions={1.0: 1024}, **_WAN),
    Family(name="AutoencoderKLWan", patch="patch_size", **_WAN),
    # pipeline_flux2.py: _patchify_latents, then batch norm
    Family(name="AutoencoderKLFlux2", statistics="patched", ldm=True, resolutions={1.0: 1024}),
    # transformer_hunyuan_video.py: patch 2
    Family(name="AutoencoderKLHunyuanVideo", scale=0.476986),
    # pipeline_ltx_image2video.py; mean and std are buffers of the class
    Family(
        name="AutoencoderKLLTXVideo",
        packs_from=None,
        statistics="needed",
        factor="spatio_temporal_scaling",
        frame_step="spatio_temporal_scaling",
        patch="patch_size",
    ),
)
FAMILIES: Mapping[str, Family] = {row.name: row for row in _ROWS}
#: Stands in for any other ``Autoencoder*`` class: its configuration and its weights say everything.
GENERIC = Family()

_SOUND = "it encodes sound"
_PUBLISHED = "use the weights and the config.json that were published with the model"
#: Classes that are called autoencoders and cannot make image latents: name -> why.
UNSUPPORTED: Mapping[str, str] = {
    "AutoencoderOobleck": _SOUND,
    "AutoencoderSAME": _SOUND,
    "AutoencoderVidTok": "its latents become numbers of a codebook and its clips have a fixed length",
    "AutoencoderRAE": "it takes images of one size in [0, 1] and normalizes inside encode",
    "AutoencoderKLAllegro": "it encodes in tiles only, which gives other latents than whole images",
}
#: Fields of a configuration that no encoder depends on; all others enter the identity.
_READ_ONLY = {
    *("scaling_factor", "shift_factor", "latents_mean", "latents_std", "invert_scale_latents", "batch_norm_eps"),
    *("out_channels", "out_ch", "sample_size", "sample_height", "sample_width", "force_upcast", "dropout"),
    *("use_post_quant_conv", "upsample_match_channel", "timestep_conditioning", "num_dec_blocks"),
}
_DECODER_PREFIXES = ("_", "decoder_", "decode_", "up_", "upsample_", "layers_per_up_")
#: Fields that diffusers added to classes later, with the value that an older configuration means.
_ADDED: Config = {
    "use_quant_conv": True,
    "mid_block_add_attention": True,
    "is_residual": False,
    "patch_size": None,
    "spatial_compression_ratio": None,
    "temporal_compression_ratio": None,
}
_TILES = ("sample_size", "sample_height", "sample_width")
#: Color channels of Mochi: three, and twelve Fourier features that its ``encode`` makes of them.
_MOCHI_COLORS = 15


class LatentShape(NamedTuple):
    """Shape of a latent; a clip has ``k * frame_step + 1`` frames, 0: images only."""

    channels: int
    factor: int
    multiple: int
    frame_step: int


def family_of(class_name: str, where: str) -> Family:
    """Find the row of a class; raises UnsupportedModelError if it encodes no images."""
    if class_name in FAMILIES:
        return FAMILIES[class_name]
    why = UNSUPPORTED.get(class_name, "" if class_name.startswith("Autoencoder") else "it is not an autoencoder")
    if why or class_name.endswith("Audio"):
        raise UnsupportedModelError(
            f"{class_name} is not an image encoder",
            where=where,
            why=why or _SOUND,
            fix="give the VAE of the model you train: its folder (often called vae/), or demo to try",
        )
    return GENERIC


def shape_of(family: Family, config: Config, where: str) -> LatentShape:
    """Read the shape of latents from a configuration; raises UnsupportedModelError."""
    channels, patch = _ratio(config, "latent_channels z_dim z_channels"), _ratio(config, family.patch, 1)
    factor, colors = _ratio(config, family.factor), _ratio(config, "in_channels input_channels", 3)
    if factor < 1 or channels < 1 or patch < 1:
        raise UnsupportedModelError(
            f"the configuration of {config.get('_class_name')} does not say how large a latent is",
            where=where,
            why=f"looked for the fields: latent_channels z_dim z_channels; {family.factor}",
            fix=_PUBLISHED,
        )
    if colors not in (3, 3 * patch * patch, _MOCHI_COLORS):
        raise UnsupportedModelError(
            f"{config.get('_class_name')} with {colors} input channels does not take RGB images",
            where=where,
            fix="give the VAE that encodes the images of your model",
        )
    packs = 2 if family.packs_from is not None and channels >= family.packs_from else 1
    return LatentShape(channels, factor * patch, factor * patch * packs, _ratio(config, family.frame_step))


def config_hash(config: Config, *, tiling: bool = False) -> str:
    """Hex hash of the class and of the fields that ``encode`` may use; of the size of a tile only with tiles."""
    names = [name for name in config if name not in _READ_ONLY and not name.startswith(_DECODER_PREFIXES)]
    fields = {name: config[name] for name in names if name not in _ADDED or config[name] != _ADDED[name]}
    if tiling:
        fields |= {f"tile.{name}": config.get(name) for name in _TILES}
    return json_hash({"class": config.get("_class_name"), "fields": _plain(fields)}).hex()


def normalization_of(family: Family, config: Config, tensors: files.Tensors, where: str) -> Normalization:
    """Read how latents are normalized when they are read; raises UnsupportedModelError.

    Per-channel means win over a scale wherever a model has them, as in the diffusers pipelines:
    ``(z - mean) * scaling_factor / std``. Of Flux.2 ``(z - running_mean) / sqrt(running_var + eps)`` over patches.
    """
    channels = _ratio(config, "latent_channels z_dim z_channels")
    patch = 1
    scale, shift = config.get("scaling_factor"), config.get("shift_factor")
    scale = family.scale if scale is None else scale
    mean, std = (_per_channel(config.get(name), channels) for name in ("latents_mean", "latents_std"))
    if {"latents_mean", "latents_std"} <= tensors.keys():
        mean, std = (files.read_tensor(tensors[name]).tolist() for name in ("latents_mean", "latents_std"))
    if family.statistics == "patched" and {"bn.running_mean", "bn.running_var"} <= tensors.keys():
        variance = files.read_tensor(tensors["bn.running_var"]).astype(np.float64)
        variance += config.get("batch_norm_eps", 1e-4)
        mean = files.read_tensor(tensors["bn.running_mean"]).tolist()
        std = np.sqrt(variance).tolist()
        patch = _ratio(config, "patch_size", 2)
    if family.statistics and not (mean and std):
        raise UnsupportedModelError(
            f"the model lacks mean and std of its latents, which {family.name} needs", where=where, fix=_PUBLISHED
        )
    for name, values in (("mean", mean), ("std", std)) if mean and std else ():
        if len(values) != channels * patch * patch:  # each would be of other channels
            raise UnsupportedModelError(
                f"the latents have {channels} channels, their {name} has {len(values)} values",
                where=where,
                fix=_PUBLISHED,
            )
    if mean and std:
        kind = "batch-norm" if family.statistics == "patched" else "mean-std"
        numbers: Any = {"mean": tuple(map(float, mean)), "std": tuple(map(float, std))}
        return Normalization(kind=kind, scale=float(scale or 1.0), patch=patch, **numbers)
    if scale is None and shift is None:
        return Normalization()
    return Normalization(kind="scale-shift", scale=float(scale or 1.0), shift=float(shift or 0.0))


def _per_channel(values: Any, channels: int) -> Any:
    """One value per channel: Cosmos lists one per channel and frame (diffusers pipeline_cosmos_video2world.py)."""
    frames = len(values) // channels if values and channels and len(values) % channels == 0 else 1
    return values[::frames] if values else None


def _ratio(config: Config, names: str, default: int = 0) -> int:
    """Read the first field that has a value: a number, a side of a patch, or how many halvings a list means."""
    name, value = next(((name, config[name]) for name in names.split() if config.get(name) is not None), ("", None))
    if isinstance(value, list | tuple) and value:
        if name == "patch_size":
            return int(value[0])
        return 1 << (sum(value) if all(isinstance(level, bool) for level in value) else len(value) - 1)
    if value is None:
        return default
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _plain(value: Any) -> Any:
    """A value without floats and tuples, so that it has one spelling."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, float) else value


# files

#: Folders in a pipeline of the model that its latents are for.
_DENOISERS = ("transformer", "unet")
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
#: Prefixes under which checkpoints keep an autoencoder: the first that fits is taken off.
_PREFIXES = ("first_stage_model.", "vae.", "")
#: Names of tensors that no encoder uses: the other half, and additions of training checkpoints.
_DECODER_TENSORS = ("decoder.", "post_quant_conv.", "loss.", "model_ema.")
_COUNTER = ".num_batches_tracked"

_LDM = (
    (r"^encoder\.down\.(\d+)\.block\.", r"encoder.down_blocks.\1.resnets."),
    (r"^encoder\.down\.(\d+)\.downsample\.", r"encoder.down_blocks.\1.downsamplers.0."),
    (r"^encoder\.mid\.block_1\.", "encoder.mid_block.resnets.0."),
    (r"^encoder\.mid\.block_2\.", "encoder.mid_block.resnets.1."),
    (r"^encoder\.mid\.attn_1\.norm\.", "encoder.mid_block.attentions.0.group_norm."),
    (r"^encoder\.mid\.attn_1\.proj_out\.", "encoder.mid_block.attentions.0.to_out.0."),
    (r"^encoder\.mid\.attn_1\.([qkv])\.", r"encoder.mid_block.attentions.0.to_\1."),
    (r"^encoder\.norm_out\.", "encoder.conv_norm_out."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    # Names that diffusers itself wrote before its version 0.17; it still reads them.
    (r"(\.attentions\.0)\.query\.", r"\1.to_q."),
    (r"(\.attentions\.0)\.key\.", r"\1.to_k."),
    (r"(\.attentions\.0)\.value\.", r"\1.to_v."),
    (r"(\.attentions\.0)\.proj_attn\.", r"\1.to_out.0."),
)
_ATTENTION_WEIGHT = re.compile(r"\.attentions\.0\.to_(q|k|v|out\.0)\.weight$")
_WANTED = files.Wanted(
    argument="model",
    takes="a VAE or pipeline folder, a .safetensors file, a hub id, or demo",
    files=(
        *("model_index.json", "config.json", "*.safetensors.index.json", "diffusion_pytorch_model*.safetensors"),
        *("vae/*.json", "vae/*.safetensors", *(f"{name}/config.json" for name in _DENOISERS)),
    ),
)


class Located(Value):
    """The files of one model."""

    config_path: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    revision: str = ""
    """Commit, for a folder of the local hub cache."""


def locate(
    model: str,
    config: str | None = None,
    cached: Mapping[str, Any] = MappingProxyType({}),
    *,
    offline: bool = False,
) -> Located:
    """Find the files of a VAE by its folder or its pipeline, a ``.safetensors`` file, or a hub id ``org/name``.

    ``config`` is a ``config.json`` (or its folder) to use in place of the one beside the weights. ``cached`` and
    ``offline`` as of ``files.find``.
    """
    path, commit = files.find(model, _WANTED, cached, offline=offline)
    lone = path.is_file()
    if lone:
        files.read_header(path)  # names a file of another kind
    folder = path.parent if lone else _encoder_folder(path)
    config_path = _chosen_config(config) if config else folder / "config.json"
    if not config_path.is_file():
        raise _without_config(path) if lone else _without_files(folder)
    settings = _read_config(config_path)  # first: it names a model of another kind
    weights = (path,) if lone else files.weights_in(folder, WEIGHTS_NAME)
    return Located(config_path=config_path, config=settings, weights=weights, revision=commit)


def denoiser_size(config_path: Path) -> tuple[int, str]:
    """``sample_size`` of the denoiser in the pipeline of a VAE, and the name of its folder; (0, "") if unknown."""
    pipeline = config_path.parent.parent
    for name in _DENOISERS if (pipeline / "model_index.json").is_file() else ():
        if (config := pipeline / name / "config.json").is_file():
            size = files.read_json(config).get("sample_size")
            return (size, name) if type(size) is int else (0, "")
    return 0, ""


def _read_config(path: Path) -> dict[str, Any]:
    config = files.read_json(path)
    if not isinstance(config.get("_class_name"), str):
        raise UnsupportedModelError(
            f"{path.name} belongs to another kind of model ({config.get('model_type') or 'unknown'})",
            where=str(path),
            why="it lacks the field _class_name, which names the diffusers class",
            fix="give the folder of the VAE: for a pipeline its own folder or its vae/",
        )
    return config


def _without_config(path: Path) -> UnsupportedModelError:
    source = " (from the hub: `hf download ORG/NAME vae/config.json --local-dir FOLDER`)"
    return UnsupportedModelError(
        f"{path.name} alone does not identify a model",
        where=str(path),
        why="a lone file has neither its class nor its normalization; there is no config.json beside it",
        fix=f"add --model-config=FOLDER, with the vae/config.json of its model{source}",
    )


def _without_files(folder: Path) -> UnsupportedModelError:
    names = sorted(path.name for path in folder.iterdir())
    listed = ", ".join(names[:5]) + ", ..." * (len(names) > 5) or "no files"
    return UnsupportedModelError(
        f"{folder} has no config.json",
        where=str(folder),
        why=f"the class and the settings of a model are read from it, never guessed; found {listed}",
        fix="put the config.json of the VAE beside its weights, or give it as the model configuration",
    )


def _encoder_folder(folder: Path) -> Path:
    vae, index = folder / "vae", folder / "model_index.json"
    if index.is_file() and not vae.is_dir():
        parts = sorted(name for name in files.read_json(index) if not name.startswith("_"))
        raise UnsupportedModelError(
            f"the pipeline in {folder} has no vae/",
            where=str(index),
            why=f"its parts are: {', '.join(parts) or 'none'}",
            fix="give the folder of the VAE itself",
        )
    has_config = (folder / "config.json").exists() or not (vae / "config.json").is_file()
    return folder if has_config and not index.is_file() else vae


def _chosen_config(config: str) -> Path:
    path = files.expanded(config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelNotFoundError(
            "no such file",
            argument="model_config",
            value=config,
            where=str(path.absolute()),
            fix="give a config.json, or a folder that has one",
        )
    return path


def encoder_tensors(weights: Sequence[Path | str], *, ldm: bool) -> dict[str, files.TensorInfo]:
    """List the encoder half by names in diffusers, sorted; ``ldm``: original names are translated."""
    tensors = files.read_headers(weights)
    prefix = next(p for p in _PREFIXES if not p or any(name.startswith(f"{p}encoder.") for name in tensors))
    whole = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    kept = {_modern(name) if ldm else name: tensor for name, tensor in whole.items() if is_encoder(name)}
    if not any(name.startswith("encoder.") for name in kept):
        raise UnsupportedModelError(
            f"{Path(weights[0]).name} has no encoder",
            where=str(weights[0]),
            why=f"none of its tensors is called encoder.*; the first is {next(iter(tensors), 'none')}",
            fix="give the weights of the whole VAE, not of its decoder, a transformer or a LoRA",
        )
    return {name: tensor._replace(shape=_linear(name, tensor.shape)) for name, tensor in sorted(kept.items())}


def is_encoder(name: str) -> bool:
    """True if ``encode`` uses a tensor: all but the decoder half and training counters."""
    return not name.startswith(_DECODER_TENSORS) and not name.endswith(_COUNTER)


def _linear(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The original attention layers are 1x1 convolutions; in diffusers they are linear."""
    return shape[:2] if _ATTENTION_WEIGHT.search(name) and shape[2:] == (1, 1) else shape


def _modern(name: str) -> str:
    for pattern, replacement in _LDM:
        name = re.sub(pattern, replacement, name)
    return name
