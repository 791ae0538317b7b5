"""Names a trainer expects in a batch, as tables: what is renamed, what stays, what is derived.

Decides nothing about the latents themselves. A format is data, not a class: a mapping of names and a few pure
functions of the batch, so a new trainer is a new row. Names and meanings are those of the training examples of
diffusers (``examples/text_to_image``, ``examples/dreambooth``). Cost: a new dictionary per batch, no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from latentcache.errors import UsageError

FormatName = Literal["plain", "diffusers-sd", "diffusers-sdxl", "diffusers-flux"]
"""``plain`` is the batch as the loader makes it; the others are named after the pipelines they train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What a trainer calls things."""

    names: Mapping[str, str]
    """Name in the trainer -> name in the loader's batch; what is not listed is left out."""
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """Name in the trainer -> function of the loader's batch."""


def time_ids(batch: Mapping[str, Any]) -> torch.Tensor:
    """(B, 6) int64: original size, top left of the crop, target size; height or top first, pixels.

    What SDXL is conditioned on beside the prompt (``compute_time_ids`` of diffusers
    ``train_text_to_image_lora_sdxl.py``). Whole numbers: bfloat16 would round those above 256.
    """
    return torch.cat([batch["original_size"], batch["crop_top_left"], batch["target_size"]], dim=1)


def image_ids(batch: Mapping[str, Any]) -> torch.Tensor:
    """(h / 2 * w / 2, 3) float32: zero, row and column of each patch of 2 x 2 latent cells.

    The positions a Flux transformer takes as ``img_ids`` (``_prepare_latent_image_ids`` of diffusers
    ``pipeline_flux.py``); one table serves the whole batch, which has one shape.
    """
    height, width = batch["latents"].shape[-2:]
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).to(torch.float32)


_SD = {"latents": "latents", "prompts": "captions", "keys": "keys", "names": "names"}
_SIZES = {"original_sizes": "original_size", "crop_top_lefts": "crop_top_left", "target_sizes": "target_size"}
FORMATS: Mapping[str, Format] = {
    "diffusers-sd": Format(names=_SD),
    "diffusers-sdxl": Format(names=_SD | _SIZES, derived={"time_ids": time_ids}),
    "diffusers-flux": Format(names=_SD, derived={"img_ids": image_ids}),
}


def checked_format(name: str | None) -> str | None:
    """The name of a format, if there is such a format.

    Raises:
        UsageError: There is none.
    """
    if name is None or name in get_args(FormatName):
        return name
    known = ", ".join(get_args(FormatName))
    raise UsageError(f"unknown batch format {name!r}", why="a format is a table of names", fix=f"use one of {known}")


def formatted(batch: dict[str, Any], name: str | None) -> dict[str, Any]:
    """The batch with a trainer's names.

    Args:
        batch: As the loader makes it.
        name: A format; None and ``plain`` leave the batch as it is.
    """
    if name is None or name == "plain":
        return batch
    chosen = FORMATS[name]
    named = {new: batch[old] for new, old in chosen.names.items()}
    return named | {new: make(batch) for new, make in chosen.derived.items()}
