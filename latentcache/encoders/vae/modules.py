"""Load the encoder half of an autoencoder with torch and diffusers.

Weights are read tensor by tensor, the encoder half alone, into a module of the class of diffusers.
Guarantee: names and shapes are compared with the class before a weight is read, so no tensor keeps its
random start; values are finite; no pickle, no remote code, no network.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors import safe_open
from torch import Tensor, nn

from latentcache.encoders.vae.describe import ModelDescription, no_tiling
from latentcache.encoders.vae.families import FAMILIES, GENERIC
from latentcache.encoders.vae.weights import TensorInfo, encoder_names, encoder_shape, is_encoder, read_headers
from latentcache.errors import EncoderError

_DECODER_PARTS = ("decoder", "post_quant_conv")
_AGAIN = "download the weights again, or use the config.json that belongs to them"


def load_module(description: ModelDescription, dtype: torch.dtype) -> nn.Module:
    """The encoder half in evaluation mode on the CPU, weights frozen.

    Raises:
        EncoderError: The class is not in the installed diffusers, or a tensor is missing, unexpected, of
            another shape or not finite.
    """
    tensors = read_headers(description.weights)
    names = encoder_names(tensors, ldm=FAMILIES.get(description.spec.family, GENERIC).ldm)
    with _quiet():
        module = _skeleton(_class(description), description)
        _check_names(module, names, tensors, description)
        if dict(module.named_buffers()).keys() - module.state_dict().keys():  # the class computes them
            module = _skeleton(_class(description), description, "cpu")
        module = _filled(module, names, tensors, dtype)
    _check_finite(module, description)
    return module.eval().requires_grad_(False)


def enable_tiling(module: nn.Module, description: ModelDescription) -> None:
    """Have a module encode large images in tiles, as its own class does.

    Raises:
        UnsupportedModelError: The class has no tiles.
    """
    if not hasattr(module, "use_tiling"):
        raise no_tiling(description.spec.family)
    module.enable_tiling()  # type: ignore[operator]


def is_video(module: nn.Module) -> bool:
    """True if an encoder takes clips: it has a three-dimensional convolution."""
    return any(parameter.ndim == 5 for parameter in module.parameters())


def drop_decoder(module: nn.Module) -> nn.Module:
    """Replace the decoder half by empty modules (some classes count its layers in every ``encode``)."""
    for part in _DECODER_PARTS:
        if getattr(module, part, None) is not None:
            setattr(module, part, nn.Identity())
    return module


def _config_path(description: ModelDescription) -> Path:
    if description.config_path is None:
        raise EncoderError(f"{description.label} is not loaded from files", fix="open it with open_encoder()")
    return description.config_path


def _class(description: ModelDescription) -> Any:
    found = getattr(diffusers, description.spec.family, None)
    if found is None:
        raise EncoderError(
            f"diffusers {diffusers.__version__} has no class {description.spec.family}",
            where=str(description.config_path),
            fix="pip install --upgrade diffusers",
        )
    return found


def _skeleton(model_class: Any, description: ModelDescription, device: str = "meta") -> nn.Module:
    """The encoder half with the right shapes; on ``meta`` without values."""
    config = json.loads(_config_path(description).read_bytes())
    try:
        with torch.device(device):
            module: nn.Module = model_class.from_config(config)
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, NotImplementedError) as error:
        raise EncoderError(
            f"{description.spec.family} cannot be made from its configuration",
            where=str(description.config_path),
            why=str(error),
            fix="use the config.json that was published with the model",
        ) from error
    return drop_decoder(module)


def _check_names(
    skeleton: nn.Module, names: Mapping[str, str], tensors: Mapping[str, TensorInfo], description: ModelDescription
) -> None:
    """Compare what the class needs with what the files have."""
    needed = {name: tuple(t.shape) for name, t in skeleton.state_dict().items() if is_encoder(name)}
    missing, extra = sorted(needed.keys() - names.keys()), sorted(names.keys() - needed.keys())
    where, family = str(description.weights[0]), description.spec.family
    if missing:
        what = f"the weights lack {len(missing)} tensors of {family}; the first is {missing[0]}"
        raise EncoderError(what, where=where, why=f"{len(needed)} are needed", fix=_AGAIN)
    if extra:
        what = f"the weights have {len(extra)} tensors that {family} lacks; the first is {extra[0]}"
        raise EncoderError(what, where=where, why="they belong to another class or configuration", fix=_AGAIN)
    for name, shape in needed.items():
        found = tensors[names[name]].shape
        if shape not in (found, encoder_shape(name, found)):
            what = f"tensor {name} has shape {found}, {family} needs {shape}"
            raise EncoderError(what, where=where, fix=_AGAIN)


def _filled(
    skeleton: nn.Module, names: Mapping[str, str], tensors: Mapping[str, TensorInfo], dtype: torch.dtype
) -> nn.Module:
    """Fill a skeleton with the encoder half of the files, whatever layout they have."""
    state: dict[str, Tensor] = {}
    needed = skeleton.state_dict()
    for path in sorted({info.path for info in tensors.values()}):
        with safe_open(path, framework="pt") as file:
            for name, full in names.items():
                if tensors[full].path == path:
                    state[name] = file.get_tensor(full).reshape(needed[name].shape)
    counters = {name: torch.zeros_like(t, device="cpu") for name, t in needed.items() if name not in state}
    skeleton.load_state_dict({**state, **counters}, strict=True, assign=True)
    return skeleton.to(dtype)


def _check_finite(module: nn.Module, description: ModelDescription) -> None:
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise EncoderError(
                f"tensor {name} has values that are not finite",
                where=str(description.weights[0]),
                why=f"read as {str(tensor.dtype).removeprefix('torch.')}",
                fix="download the weights again; if they are complete, add --compute-dtype float32",
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of diffusers about fields that are checked here."""
    log = diffusers.utils.logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
