"""From the name of a model to files on this disk: one ``config.json`` and its weights.

Guarantee: a path that does not exist is never looked up on the network; pickle weights are never chosen. No torch;
huggingface_hub only for a hub id.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentcache.encoders.checkpoints import recognize
from latentcache.encoders.hub import expanded, find
from latentcache.encoders.vae.weights import read_header, shards_of, sniff
from latentcache.errors import EncoderError, ModelNotFoundError, UnsupportedModelError
from latentcache.value import Value

#: Name under which diffusers saves the weights of a model.
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
_PICKLES = (".bin", ".ckpt", ".pt", ".pth")
_OTHER_WEIGHTS = (*_PICKLES, ".gguf", ".msgpack", ".onnx")
_HUB_FILES = ("config.json", "model_index.json", "*.safetensors", "*.safetensors.index.json")
_HUB_PATTERNS = [*(name for name in _HUB_FILES if name != "*.safetensors"), "diffusion_pytorch_model*.safetensors",
                 *(f"vae/{name}" for name in _HUB_FILES)]  # fmt: skip


class Located(Value):
    """The files of one model."""

    config_path: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    revision: str = ""
    """Commit, for a folder of the local hub cache."""


def locate(model: str, config: str | None = None, *, revision: str = "") -> Located:
    """Files of a model.

    Args:
        model: Folder of a VAE or of a pipeline, a ``.safetensors`` file, or a hub id ``org/name``.
        config: A ``config.json`` (or its folder) to use in place of the one beside the weights.
        revision: Commit of a hub id that an earlier build used.

    Raises:
        ModelNotFoundError: Nothing at this path, or no such model on the hub.
        UnsupportedModelError: The files are not those of an image encoder.
        EncoderError: A lone file without a configuration.
    """
    takes = "a VAE or pipeline folder, a .safetensors file, a hub id, or demo"
    path, commit = find(
        model, _HUB_PATTERNS, _is_complete, what="model", flag="--model", takes=takes, revision=revision
    )
    return replace((_from_file if path.is_file() else _from_folder)(path, config), revision=commit)


def read_config(path: Path) -> dict[str, Any]:
    """A parsed configuration of a diffusers model.

    Raises:
        UnsupportedModelError: Not a JSON object, or not of a diffusers model.
    """
    config = read_json(path)
    if not isinstance(config.get("_class_name"), str):
        kind = config.get("model_type") or "unknown"
        raise UnsupportedModelError(
            f"{path.name} belongs to another kind of model ({kind})",
            where=str(path),
            why="it lacks the field _class_name, which names the diffusers class",
            fix="give the folder of the VAE: for a pipeline its own folder or its vae/",
        )
    return config


def _from_file(path: Path, config: str | None) -> Located:
    sniff(path)
    config_path = _given_config(config) if config else path.parent / "config.json"
    if not config_path.is_file():
        raise _without_config(path)
    return Located(config_path=config_path, config=read_config(config_path), weights=(path,))


def _without_config(path: Path) -> EncoderError:
    """The error of a lone file; names the family of a checkpoint that is known by its tensors."""
    found = recognize(read_header(path))
    why = "a lone file has neither its class nor its normalization; there is no config.json beside it"
    fix = f"give its configuration: --model {path} --model-config FOLDER_WITH_CONFIG_JSON"
    if not found.name:
        return EncoderError(f"{path.name} alone does not identify a model", where=str(path), why=why, fix=fix)
    if not found.has_encoder:
        return UnsupportedModelError(
            f"{path.name} is a checkpoint of {found}",
            where=str(path),
            why="latents are made by the VAE, which is another file of that model",
            fix=f"give the VAE: --model {found.repository}, or its vae/ folder",
        )
    if found.repository:
        fix = f"hf download {found.repository} vae/config.json --local-dir CONFIG; then add --model-config CONFIG/vae"
    what = f"{path.name} is {'a checkpoint of ' if found.repository else ''}{found.name}, and has no configuration"
    return EncoderError(what, where=str(path), why=why, fix=fix)


def _from_folder(folder: Path, config: str | None) -> Located:
    folder = _encoder_folder(folder)
    config_path = _given_config(config) if config else folder / "config.json"
    if not config_path.is_file():
        found = sorted(path.name for path in folder.iterdir())
        listed = ", ".join(found[:5]) + ", ..." * (len(found) > 5) or "no files"
        raise UnsupportedModelError(
            f"{folder} has no config.json",
            where=str(folder),
            why=f"the class and the settings of a model are read from it, never guessed; found {listed}",
            fix="put the config.json of the VAE beside its weights, or name it with --model-config",
        )
    return Located(config_path=config_path, config=read_config(config_path), weights=_weights_in(folder))


def _encoder_folder(folder: Path) -> Path:
    """The folder itself, or the ``vae/`` of a pipeline."""
    vae = folder / "vae"
    index = folder / "model_index.json"
    if not index.is_file():
        return vae if not (folder / "config.json").exists() and (vae / "config.json").is_file() else folder
    if not vae.is_dir():
        parts = sorted(name for name in read_json(index) if not name.startswith("_"))
        raise UnsupportedModelError(
            f"the pipeline in {folder} has no vae/",
            where=str(index),
            why=f"its parts are: {', '.join(parts) or 'none'}",
            fix="give the folder of the VAE itself",
        )
    return vae


def _weights_in(folder: Path) -> tuple[Path, ...]:
    """Weights of a model folder; diffusers' own name wins, then an index of shards, then a single file."""
    index = folder / f"{WEIGHTS_NAME}.index.json"
    if (folder / WEIGHTS_NAME).is_file():
        return (folder / WEIGHTS_NAME,)
    if index.is_file():
        return shards_of(index)
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if len(found) == 1:
        return (found[0],)
    if found:
        raise UnsupportedModelError(
            f"{folder} has {len(found)} weights files and none is called {WEIGHTS_NAME}",
            where=str(folder),
            why=f"found {', '.join(path.name for path in found[:5])}",
            fix=f"give one of them: --model {found[0]}",
        )
    raise without_weights(folder, WEIGHTS_NAME)


def without_weights(folder: Path, expected: str) -> UnsupportedModelError:
    """The error for a folder without weights that can be used."""
    others = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_WEIGHTS)
    pickles = [name for name in others if name.endswith(_PICKLES)]
    kind = "only pickle weights" if pickles else "no safetensors weights"
    return UnsupportedModelError(
        f"{folder} has {kind}" + (f" ({', '.join(others[:3])})" if others else ""),
        where=str(folder),
        why="pickle files can run code when they are opened" if pickles else f"expected {expected}",
        fix="save it as safetensors where you trust it: model.save_pretrained(FOLDER)",
    )


def _given_config(config: str) -> Path:
    path = expanded(config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelNotFoundError(
            f"--model-config {config}: no such file",
            where=str(path.absolute()),
            fix="give --model-config a config.json, or a folder that has one",
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A parsed JSON object.

    Raises:
        EncoderError: An unreadable file.
        UnsupportedModelError: Other contents.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise EncoderError(
            f"{path.name} cannot be read", where=str(path), why=str(error), fix=f"ls -l {path}"
        ) from error
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        pointer = raw.startswith(b"version https://git-lfs")
        raise UnsupportedModelError(
            f"{path.name} is {'a git-lfs pointer' if pointer else 'not JSON'}",
            where=str(path),
            why=str(error),
            fix="run `git lfs pull` in its folder" if pointer else "download the file again",
        ) from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(
            f"{path.name} is not a JSON object", where=str(path), fix="download the file again"
        )
    return value


def _is_complete(folder: Path) -> bool:
    """True if a folder of the local hub cache has the weights that a fresh download would choose.

    A cache that another tool filled may hold only ``diffusion_pytorch_model.fp16.safetensors``: other bytes, another
    recipe.
    """
    names = (WEIGHTS_NAME, f"{WEIGHTS_NAME}.index.json")
    folders = (folder, folder / "vae")
    return any((f / "config.json").is_file() and any((f / name).is_file() for name in names) for f in folders)
