"""Names of tensors: the encoder half of a VAE, in the spelling of diffusers.

The same encoder has the same names in a diffusers folder, in an original latent-diffusion file and inside a full
checkpoint. Sources: CompVis/latent-diffusion ``ldm/modules/diffusionmodules/model.py`` (class Encoder) and diffusers
``models/autoencoders/vae.py``.
"""

from __future__ import annotations

import re

from latentcache.encoders.weights import TensorInfo, Tensors

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


def encoder_tensors(tensors: Tensors, *, ldm: bool) -> dict[str, TensorInfo]:
    """Tensors of the encoder half by their name in diffusers, sorted; ``ldm``: original names are translated."""
    prefix = next(p for p in PREFIXES if not p or any(name.startswith(f"{p}encoder.") for name in tensors))
    mine = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
    kept = {_modern(name) if ldm else name: one for name, one in mine.items() if is_encoder(name)}
    return {name: one._replace(shape=_linear(name, one.shape)) for name, one in sorted(kept.items())}


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
