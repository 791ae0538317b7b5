"""Which tensors of a weights file belong to the encoder, and what diffusers calls them.

Decides where the encoder half ends. Guarantee: the same encoder has the same names, and so the same
fingerprint, in a diffusers folder, in an original latent-diffusion file and inside a full checkpoint.
Names: CompVis/latent-diffusion ``ldm/modules/diffusionmodules/model.py`` (class Encoder) on the one side,
diffusers ``models/autoencoders/vae.py`` on the other. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

#: Prefixes under which checkpoints keep an autoencoder: the first that fits is taken off.
PREFIXES = ("first_stage_model.", "vae.", "")
#: Names of tensors that no encoder uses: the other half, and what training checkpoints keep beside it.
_DECODER = ("decoder.", "post_quant_conv.", "loss.", "model_ema.")
_COUNTER = ".num_batches_tracked"

_LDM = (
    (re.compile(r"^encoder\.down\.(\d+)\.block\."), r"encoder.down_blocks.\1.resnets."),
    (re.compile(r"^encoder\.down\.(\d+)\.downsample\."), r"encoder.down_blocks.\1.downsamplers.0."),
    (re.compile(r"^encoder\.mid\.block_1\."), "encoder.mid_block.resnets.0."),
    (re.compile(r"^encoder\.mid\.block_2\."), "encoder.mid_block.resnets.1."),
    (re.compile(r"^encoder\.mid\.attn_1\.norm\."), "encoder.mid_block.attentions.0.group_norm."),
    (re.compile(r"^encoder\.mid\.attn_1\.proj_out\."), "encoder.mid_block.attentions.0.to_out.0."),
    (re.compile(r"^encoder\.mid\.attn_1\.([qkv])\."), r"encoder.mid_block.attentions.0.to_\1."),
    (re.compile(r"^encoder\.norm_out\."), "encoder.conv_norm_out."),
    (re.compile(r"\.nin_shortcut\."), ".conv_shortcut."),
    # Names that diffusers itself wrote before its version 0.17; it still reads them.
    (re.compile(r"(\.attentions\.0)\.query\."), r"\1.to_q."),
    (re.compile(r"(\.attentions\.0)\.key\."), r"\1.to_k."),
    (re.compile(r"(\.attentions\.0)\.value\."), r"\1.to_v."),
    (re.compile(r"(\.attentions\.0)\.proj_attn\."), r"\1.to_out.0."),
)
_ATTENTION_WEIGHT = re.compile(r"\.attentions\.0\.to_(q|k|v|out\.0)\.weight$")


def encoder_names(names: Iterable[str], *, ldm: bool) -> Mapping[str, str]:
    """Tensors of the encoder half: name in diffusers -> name in the file, sorted.

    Args:
        names: All tensor names of the weights.
        ldm: Whether the class has an original layout that is translated.
    """
    listed = list(names)
    prefix = next(p for p in PREFIXES if not p or any(n.startswith(f"{p}encoder.") for n in listed))
    mine = {name.removeprefix(prefix): name for name in listed if name.startswith(prefix)}
    kept = {name: full for name, full in mine.items() if is_encoder(name)}
    return dict(sorted((_modern(name) if ldm else name, full) for name, full in kept.items()))


def is_encoder(name: str) -> bool:
    """Whether a tensor matters to ``encode``: all but the decoder half and training counters."""
    return not name.startswith(_DECODER) and not name.endswith(_COUNTER)


def encoder_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape as diffusers has it: the original attention layers are 1x1 convolutions, there they are linear."""
    if _ATTENTION_WEIGHT.search(name) and shape[2:] == (1, 1):
        return shape[:2]
    return shape


def _modern(name: str) -> str:
    for pattern, replacement in _LDM:
        name = pattern.sub(replacement, name)
    return name
