"""Files on this disk for the name of a model, one ``config.json`` and its weights, and the encoder's tensors.

The same encoder has the same names of tensors in a diffusers folder, in an original latent-diffusion file and inside
a full checkpoint. Sources: CompVis/latent-diffusion ``ldm/modules/diffusionmodules/model.py`` (class Encoder) and
diffusers ``models/autoencoders/vae.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latentcache.encoders.hub import Wanted, expanded, find
from latentcache.encoders.weights import TensorInfo, Tensors, read_header, read_json, weights_in
from latentcache.errors import ModelNotFoundError, UnsupportedModelError
from latentcache.value import Value

#: Folders in a pipeline of the model that its latents are for.
_DENOISERS = ("transformer", "unet")
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
#: Prefixes under which checkpoints keep an autoencoder: the first that fits is taken off.
PREFIXES = ("first_stage_model.", "vae.", "")
#: Names of tensors that no encoder uses: the other half, and additions of training checkpoints.
_DECODER = ("decoder.", "post_quant_conv.", "loss.", "model_ema.")
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


class Located(Value):
    """The files of one model."""

    config_path: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    revision: str = ""
    """Commit, for a folder of the local hub cache."""


def locate(model: str, config: str | None = None, *, revision: str = "", offline: bool = False) -> Located:
    """Files of a folder of a VAE or of a pipeline, a ``.safetensors`` file, or a hub id ``org/name``.

    ``config`` is a ``config.json`` (or its folder) to use in place of the one beside the weights. ``revision``
    and ``offline`` as of ``hub.find``.
    """
    path, commit = find(model, _WANTED, revision=revision, offline=offline)
    lone = path.is_file()
    if lone:
        read_header(path)  # names a file of another kind
    folder = path.parent if lone else _encoder_folder(path)
    config_path = _given_config(config) if config else folder / "config.json"
    if not config_path.is_file():
        raise _without_config(path) if lone else _without_files(folder)
    settings = _read_config(config_path)  # first: it names a model of another kind
    weights = (path,) if lone else weights_in(folder, WEIGHTS_NAME)
    return Located(config_path=config_path, config=settings, weights=weights, revision=commit)


def denoiser_size(config_path: Path) -> tuple[int, str]:
    """``sample_size`` of the denoiser in the pipeline of a VAE, and the name of its folder; (0, "") if unknown."""
    pipeline = config_path.parent.parent
    for name in _DENOISERS if (pipeline / "model_index.json").is_file() else ():
        if (config := pipeline / name / "config.json").is_file():
            size = read_json(config).get("sample_size")
            return (size, name) if type(size) is int else (0, "")
    return 0, ""


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
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
    found = sorted(path.name for path in folder.iterdir())
    listed = ", ".join(found[:5]) + ", ..." * (len(found) > 5) or "no files"
    return UnsupportedModelError(
        f"{folder} has no config.json",
        where=str(folder),
        why=f"the class and the settings of a model are read from it, never guessed; found {listed}",
        fix="put the config.json of the VAE beside its weights, or give it as the model configuration",
    )


def _encoder_folder(folder: Path) -> Path:
    vae, index = folder / "vae", folder / "model_index.json"
    if index.is_file() and not vae.is_dir():
        parts = sorted(name for name in read_json(index) if not name.startswith("_"))
        raise UnsupportedModelError(
            f"the pipeline in {folder} has no vae/",
            where=str(index),
            why=f"its parts are: {', '.join(parts) or 'none'}",
            fix="give the folder of the VAE itself",
        )
    own = (folder / "config.json").exists() or not (vae / "config.json").is_file()
    return folder if own and not index.is_file() else vae


def _given_config(config: str) -> Path:
    path = expanded(config)
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


def encoder_tensors(tensors: Tensors, *, ldm: bool) -> dict[str, TensorInfo]:
    """Tensors of the encoder half by their name in diffusers, sorted; ``ldm``: original names are translated."""
    prefix = next(p for p in PREFIXES if not p or any(name.startswith(f"{p}encoder.") for name in tensors))
    mine = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    kept = {_modern(name) if ldm else name: tensor for name, tensor in mine.items() if is_encoder(name)}
    return {name: tensor._replace(shape=_linear(name, tensor.shape)) for name, tensor in sorted(kept.items())}


def is_encoder(name: str) -> bool:
    """True if ``encode`` uses a tensor: all but the decoder half and training counters."""
    return not name.startswith(_DECODER) and not name.endswith(_COUNTER)


def _linear(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The original attention layers are 1x1 convolutions; in diffusers they are linear."""
    return shape[:2] if _ATTENTION_WEIGHT.search(name) and shape[2:] == (1, 1) else shape


def _modern(name: str) -> str:
    for pattern, replacement in _LDM:
        name = re.sub(pattern, replacement, name)
    return name


_WANTED = Wanted(
    argument="model",
    takes="a VAE or pipeline folder, a .safetensors file, a hub id, or demo",
    files=(
        *("model_index.json", "config.json", "*.safetensors.index.json", "diffusion_pytorch_model*.safetensors"),
        *("vae/*.json", "vae/*.safetensors", *(f"{name}/config.json" for name in _DENOISERS)),
    ),
)
