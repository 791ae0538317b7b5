"""Load the encoder half of an autoencoder with torch and diffusers.

Weights are read tensor by tensor, the encoder half alone, into a module of the class of diffusers. Guarantee: no
tensor keeps its random start; no pickle, no remote code, no network.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from safetensors import safe_open
from torch import Tensor, nn

from latentcache.encoders.vae.describe import ModelDescription
from latentcache.encoders.vae.families import FAMILIES, GENERIC
from latentcache.encoders.vae.names import encoder_tensors, is_encoder
from latentcache.encoders.weights import Tensors, read_headers, read_json
from latentcache.errors import EncoderError

_DECODER_PARTS = ("decoder", "post_quant_conv")


def load_module(description: ModelDescription, dtype: torch.dtype) -> nn.Module:
    """The encoder half in evaluation mode on the CPU, weights frozen."""
    ldm = FAMILIES.get(description.spec.family, GENERIC).ldm
    tensors = encoder_tensors(read_headers(description.weights), ldm=ldm)
    log = diffusers.utils.logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()  # of fields that are checked here
    try:
        module = _skeleton(description, "meta")
        if dict(module.named_buffers()).keys() - module.state_dict().keys():  # the class computes them
            module = _skeleton(description, "cpu")
        _fill(module, tensors)
    except RuntimeError as error:
        what, why = f"the weights do not fit {description.spec.family}", " ".join(str(error).split())[:500]
        fix = "download the weights again, or use the config.json that belongs to them"
        raise EncoderError(what, where=str(description.weights[0]), why=why, fix=fix) from error
    finally:
        log.set_verbosity(verbosity)
    return module.to(dtype).eval().requires_grad_(False)


def drop_decoder(module: nn.Module) -> nn.Module:
    """Replace the decoder half by empty modules (some classes count its layers in every ``encode``)."""
    for part in _DECODER_PARTS:
        if getattr(module, part, None) is not None:
            setattr(module, part, nn.Identity())
    return module


def _skeleton(description: ModelDescription, device: str) -> nn.Module:
    """The encoder half with the right shapes; on ``meta`` without values."""
    family, path = description.spec.family, description.config_path
    found: Any = getattr(diffusers, family, None)
    if found is None or path is None:
        what, fix = f"diffusers {diffusers.__version__} has no class {family}", "pip install --upgrade diffusers"
        raise EncoderError(what, where=str(path), fix=fix)
    try:
        with torch.device(device):
            module: nn.Module = found.from_config(read_json(path))
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, NotImplementedError) as error:
        what, fix = f"{family} cannot be made from its configuration", "use the config.json published with the model"
        raise EncoderError(what, where=str(path), why=str(error), fix=fix) from error
    return drop_decoder(module)


def _fill(module: nn.Module, tensors: Tensors) -> None:
    """Read the tensors of the encoder half; raises RuntimeError if they are not those of the class."""
    needed = module.state_dict()
    state = {name: torch.zeros_like(t, device="cpu") for name, t in needed.items() if not is_encoder(name)}
    for path in sorted({info.path for info in tensors.values()}):
        with safe_open(path, framework="pt") as file:
            for name, info in tensors.items():
                if info.path == path:
                    tensor: Tensor = file.get_tensor(info.name)
                    linear = name in needed and needed[name].shape == info.shape
                    state[name] = tensor.reshape(info.shape) if linear else tensor
    module.load_state_dict(state, strict=True, assign=True)
