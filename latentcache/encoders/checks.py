"""Checks of a model that a build does not make, because they read every weight or ask the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from latentcache.encoders.hub import is_stub
from latentcache.encoders.text.describe import describe_tokenizer
from latentcache.encoders.vae.describe import describe_model
from latentcache.encoders.vae.families import FAMILIES, GENERIC
from latentcache.encoders.vae.locate import encoder_tensors
from latentcache.encoders.weights import not_finite, read_headers
from latentcache.errors import UnsupportedModelError, UsageError
from latentcache.fields.input_ids import InputIdsRecipe


def check_vae(settings: Any) -> str:
    """Describe the encoder that settings of latents name, and read its weights; empty if they name none."""
    if settings.model is None:
        return ""
    description = describe_model(settings)
    spec, ldm = description.spec, FAMILIES.get(description.spec.family, GENERIC).ldm
    tensors = encoder_tensors(read_headers(description.weights), ldm=ldm)
    if bad := not_finite(tensors):
        raise UnsupportedModelError(
            f"{tensors[bad].path.name} has weights that are not finite",
            where=str(tensors[bad].path),
            why=f"tensor {tensors[bad].name} holds infinity or NaN, so every latent would",
            fix="download the file again, or save the model again in float32",
        )
    return f"{settings.model} is {spec.family}: {spec.channels} channels, f{spec.factor}"


def check_tokenizer(settings: Any) -> str:
    """Describe the tokenizer that settings of token ids name; empty if they name none."""
    if settings.tokenizer is None:
        return ""
    try:
        found = describe_tokenizer(settings, chat=True)
    except UsageError:  # no template, which texts need none of
        found = describe_tokenizer(replace(settings, chat_template=None, add_bos=False, add_eos=False))
    assert isinstance(found.recipe, InputIdsRecipe)
    template = "with" if found.recipe.chat_template or is_stub(settings.tokenizer) else "without"
    return f"{settings.tokenizer}: {found.recipe.num_ids} ids, {template} a chat template"


def device_facts(device: str = "auto") -> dict[str, Any]:
    """Facts about the device of this process, for ``doctor``: ``usable``, and ``cuda`` that torch was built for."""
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "usable": False}
    if device.startswith("cpu") or not torch.cuda.is_available():
        return facts
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return facts | {"usable": True, "name": name, "free_bytes": free, "total_bytes": total}
