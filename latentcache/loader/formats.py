"""Names that a trainer expects in a batch: the one table of this package that knows trainers and kinds of fields.

A format is data: a mapping of names and a few pure functions of the batch, so another trainer is another row. Names
and meanings are those of the training examples of diffusers (``examples/text_to_image``, ``examples/dreambooth``), of
transformers, of TRL's padding-free collator (``flat``) and of torchtitan. Rows of tokens: models of transformers keep
documents of a row apart by ``position_ids``, and only if they get no ``attention_mask`` and no cache
(``transformers/masking_utils.py``, ``find_packed_sequence_indices``), so the batch carries ``use_cache=False``.
Guarantee: rows that are a complete batch become that batch without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from latentcache.errors import UsageError
from latentcache.fields.protocol import FieldRecipe
from latentcache.plan.numbers import choice

Batch = dict[str, Any]
#: Columns of a batch that come from an input's text, a sample column, a field's own column, or the bucket.
METADATA = {"captions": "caption", "original_size": "original_size", "crop_top_left": "crop", "target_size": "dims"}
#: Label where nothing is learned (``torch.nn.CrossEntropyLoss(ignore_index=)``, also of transformers).
IGNORED = -100
#: Scales and shifts that differ by less are the same number, rounded otherwise.
_CLOSE = 1e-3
_ROW_FORMATS = ("plain", "transformers", "flat", "torchtitan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What a trainer calls things."""

    names: Mapping[str, str]
    """Name in the trainer -> name in the loader's batch; other columns are left out."""
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """Name in the trainer -> function of the loader's batch."""
    channels: int
    """Channels of latents that this model trains on."""
    scale: float
    """``scaling_factor`` of its VAE, which names the latent space: the ``vae/config.json`` of the model."""
    shift: float = 0.0
    """``shift_factor`` of its VAE."""
    unscaled: bool = False
    """True if latents without scaling fit too: those of the demo and stub encoders."""
    patch: int = 1
    """Cells of a patch on each side: height and width of latents are multiples of it."""


def time_ids(batch: Mapping[str, Any]) -> torch.Tensor:
    """(B, 6) int64: original size, top left of the crop, target size; height or top first, pixels.

    What SDXL is conditioned on beside the prompt (``compute_time_ids`` of diffusers
    ``train_text_to_image_lora_sdxl.py``). Whole numbers: bfloat16 would round those above 256.
    """
    return torch.cat([batch["original_size"], batch["crop_top_left"], batch["target_size"]], dim=1)


def image_ids(batch: Mapping[str, Any]) -> torch.Tensor:
    """(h / 2 * w / 2, 3) float32: zero, row and column of each patch of 2 x 2 latent cells.

    The positions that a Flux transformer takes as ``img_ids`` (``_prepare_latent_image_ids`` of diffusers
    ``pipeline_flux.py``); one table serves the whole batch, which has one shape.
    """
    height, width = batch["latents"].shape[-2:]
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).to(torch.float32)


_SD = {"latents": "latents", "prompts": "captions", "keys": "keys", "names": "names"}
_TEXT = {
    name: name for name in ("prompt_embeds", "pooled_prompt_embeds", "mask", "control", "control_2", "control_3")
}
_SIZES = {"original_sizes": "original_size", "crop_top_lefts": "crop_top_left", "target_sizes": "target_size"}
FORMATS: Mapping[str, Format] = {
    "diffusers-sd": Format(names=_SD | _TEXT, channels=4, scale=0.18215, unscaled=True),
    "diffusers-sdxl": Format(
        names=_SD | _TEXT | _SIZES, derived={"time_ids": time_ids}, channels=4, scale=0.13025, unscaled=True
    ),
    "diffusers-flux": Format(
        names=_SD | _TEXT, derived={"img_ids": image_ids}, channels=16, scale=0.3611, shift=0.1159, patch=2
    ),
}


def check_sample_format(
    name: str | None,
    columns: Sequence[str],
    served: Mapping[str, tuple[FieldRecipe | None, Sequence[tuple[int, ...]]]],
) -> str | None:
    """The name of a format that these samples can be given in; None for plain.

    Args:
        name: As asked for.
        columns: What a batch holds.
        served: Field -> its recipe (None: the kind is not installed) and the stored shapes of items.

    Raises:
        UsageError: There is no such format, or it is for latents of another model.
    """
    if name is None or choice("format", name, ("plain", *FORMATS)) == "plain":
        return None
    wanted = FORMATS[name]
    if "latents" not in columns:
        raise UsageError(f"format={name!r}: the batch has no latents", fix="add latents to fields, or format='plain'")
    found = _stored_as(*served.get("latents", (None, ())))
    wrong = _misfits(wanted, found)
    if wrong:
        fitting = [other for other, one in FORMATS.items() if not _misfits(one, found)]
        formats = " or ".join(f"format={other!r}" for other in [*fitting, "plain"])
        raise UsageError(
            f"format={name!r}: the latents are of another model",
            why="they have " + " and ".join(wrong),
            fix=f"{formats}, or build the cache with the VAE of the model you train",
        )
    needed = set(_SIZES.values()) if "time_ids" in wanted.derived else set()
    missing = sorted(needed - set(columns))
    if missing:
        raise UsageError(f"format={name!r}: needs {', '.join(missing)}", fix="leave fields out, or add these columns")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """Facts about stored latents that decide which model can train on them."""

    channels: int | None
    scaling: str
    scale: float
    shift: float
    shapes: Sequence[tuple[int, ...]]


def _stored_as(recipe: FieldRecipe | None, shapes: Sequence[tuple[int, ...]]) -> _Stored:
    affine = (recipe.read_time.affine if recipe is not None else None) or {}
    halves = 2 if recipe is not None and recipe.read_time.posterior else 1
    return _Stored(
        channels=shapes[0][0] // halves if shapes else None,
        scaling=str(affine.get("kind", "none")),
        scale=float(affine.get("scale") or 1.0),
        shift=float(affine.get("shift") or 0.0),
        shapes=shapes,
    )


def _misfits(wanted: Format, found: _Stored) -> list[str]:
    """Why a model cannot train on these latents; empty: it can."""
    wrong = [] if found.channels == wanted.channels else [f"{found.channels} channels, not {wanted.channels}"]
    if found.scaling != "scale-shift":
        wrong += (
            [] if found.scaling == "none" and wanted.unscaled else [f"scaling {found.scaling!r}, not 'scale-shift'"]
        )
    elif abs(found.scale / wanted.scale - 1) > _CLOSE:
        wrong.append(f"a scale of {found.scale:g}, not {wanted.scale:g}")
    elif abs(found.shift - wanted.shift) > _CLOSE:
        wrong.append(f"a shift of {found.shift:g}, not {wanted.shift:g}")
    odd = next((shape for shape in found.shapes if any(side % wanted.patch for side in shape[-2:])), None)
    if odd is not None:
        sides = f"{odd[-2]}x{odd[-1]}"
        wrong.append(f"a size of {sides} cells, which patches of {wanted.patch}x{wanted.patch} do not fill")
    return wrong


def sample_format(batch: Batch, name: str | None) -> Batch:
    """A batch of samples with a trainer's names; None leaves it as it is."""
    if name is None:
        return batch
    chosen = FORMATS[name]
    named = {new: batch[old] for new, old in chosen.names.items() if old in batch}
    extra = {old: value for old, value in batch.items() if old.startswith("is_") or old.endswith("_mask")}
    return named | extra | {new: make(batch) for new, make in chosen.derived.items()}


def check_row_format(name: str | None, *, isolated: bool) -> str:
    """The name of a format for rows of tokens.

    Raises:
        UsageError: There is no such format, or it needs rows whose documents are kept apart.
    """
    name = choice("format", name or "plain", _ROW_FORMATS)
    if name == "flat" and not isolated:
        raise UsageError(
            "format='flat': these rows have no position_ids",
            why="in one long row their documents would attend to each other",
            fix="rows(pack=...), or rows(chunk=..., cross_document=False)",
        )
    return name


def row_format(batch: Batch, name: str, ids: str = "input_ids") -> Batch:
    """A batch of rows of tokens with a trainer's names.

    Args:
        batch: ``plain``: tensors of (B, L).
        name: Of :func:`check_row_format`.
        ids: Name of the ids in the batch.
    """
    if name == "plain":
        return batch
    if name == "torchtitan":
        positions = {"positions": batch["position_ids"]} if "position_ids" in batch else {}
        return {"input": batch[ids], **positions, "labels": _shifted(batch["labels"])}
    if name == "flat":
        return _flat(batch, ids)
    if "position_ids" not in batch:
        return {key: value for key, value in batch.items() if key != "is_pad_row"}
    kept = {key: value for key, value in batch.items() if key not in ("attention_mask", "seq_idx", "is_pad_row")}
    return kept | {"use_cache": False}


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    """(B, L) the next token at each place: torchtitan does not shift labels itself."""
    return torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)


def segments(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where documents and padding begin and end in the rows of a batch, one row after the other.

    Args:
        position_ids: (B, L), 0 where one begins.

    Returns:
        (n + 1,) int32, from 0 to B * L, and the length of the longest.
    """
    flat = position_ids.reshape(-1)
    ends = torch.cat([torch.nonzero(flat == 0).reshape(-1), flat.new_tensor([flat.numel()])])
    return ends.to(torch.int32), int(ends.diff().max())


def _flat(batch: Batch, ids: str) -> Batch:
    position_ids = batch["position_ids"].reshape(1, -1)
    ends, longest = segments(position_ids)
    return {
        ids: batch[ids].reshape(1, -1),
        "labels": batch["labels"].reshape(1, -1),
        "position_ids": position_ids,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": (torch.cumsum(position_ids[0] == 0, 0, dtype=torch.int32) - 1).reshape(1, -1),
        "use_cache": False,
    }


class RowCollator:
    """Makes a batch of rows of a view, for a ``DataLoader`` or a trainer (``data_collator=``). Picklable.

    Args:
        format: What the batch is called.
        isolated: True if documents of a row are kept apart.
        ids: Name of the ids in a row.

    Raises:
        UsageError: There is no such format for these rows.
    """

    def __init__(self, format: str | None = None, *, isolated: bool = True, ids: str = "input_ids") -> None:
        self.format, self._ids = check_row_format(format, isolated=isolated), ids

    def __call__(self, rows: Sequence[Batch]) -> Batch:
        """(B, L) tensors of rows of (L,): the batch that they are all of, or a copy."""
        return row_format({name: together([row[name] for row in rows]) for name in rows[0]}, self.format, self._ids)

    def __repr__(self) -> str:
        return f"RowCollator(format={self.format!r})"


def together(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor that these are all rows of, in order; else a new one of them."""
    base = rows[0]._base
    if base is None or len(base) != len(rows) or base.dim() != rows[0].dim() + 1:
        return torch.stack(list(rows))
    start, step = base.storage_offset(), base.stride(0)
    for number, row in enumerate(rows):
        if row._base is not base or row.storage_offset() != start + number * step or row.shape != base.shape[1:]:
            return torch.stack(list(rows))
    return base
