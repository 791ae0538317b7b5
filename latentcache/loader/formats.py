"""What a trainer expects in a batch: the one table of this package that knows trainers and kinds of fields.

A format is data: the arguments of a model and a few pure functions of the batch, so another trainer is another row.
It adds to a batch of samples, and gives rows of tokens other names. Names and meanings are those of the training
examples of diffusers (``examples/text_to_image``, ``examples/dreambooth``), of transformers, of TRL's padding-free
collator (``flat``) and of torchtitan. Models of transformers keep documents of a row apart by ``position_ids`` if
they get no ``attention_mask`` and no cache (``find_packed_sequence_indices`` of ``transformers/masking_utils.py``),
so their batches have no mask in any format, and carry ``use_cache=False``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from latentcache.errors import UsageError
from latentcache.fields.protocol import FieldRecipe
from latentcache.plan.numbers import choice
from latentcache.store.snapshot import Snapshot
from latentcache.value import Value

Batch = dict[str, Any]
#: Label where nothing is learned (``torch.nn.CrossEntropyLoss(ignore_index=)``, also of transformers).
IGNORED = -100
#: Scales and shifts that differ by less are the same number, rounded otherwise.
_CLOSE = 1e-3
_ROW_FORMATS = ("plain", "transformers", "flat", "torchtitan")
#: Columns of rows that a format leaves out.
_LEFT_OUT = {
    "transformers": ("seq_idx",),
    "flat": ("names", "meta", "attention_mask"),
    "torchtitan": ("names", "meta", "attention_mask", "seq_idx"),
}


class Format(Value):
    """Arguments and latents that a model expects."""

    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """Name in the batch -> function of the loader's batch."""
    forward: Mapping[str, str | Mapping[str, str]]
    """Argument of the model's ``forward`` -> name in the batch, or arguments inside a mapping."""
    channels: tuple[int, ...]
    """Channels of latents that models of this kind train on."""
    scale: float | None = None
    """``scaling_factor`` of its VAE, which names the latent space: the ``vae/config.json`` of the model. None: it has
    ``latents_mean`` and ``latents_std`` in its place."""
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
    ``pipeline_flux.py``). One table serves the whole batch, which has one shape.
    """
    height, width = batch["latents"].shape[-2:]
    sides = [torch.arange(side // 2, device=batch["latents"].device) for side in (height, width)]
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).to(torch.float32)


def text_ids(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """(tokens, 3) float32 zeros: the positions of text that a Flux transformer takes as ``txt_ids``."""
    text = batch.get("prompt_embeds")
    return None if text is None else text.new_zeros((text.shape[1], 3), dtype=torch.float32)


def image_shapes(batch: Mapping[str, Any]) -> list[list[tuple[int, int, int]]]:
    """Frames, rows and columns of 2 x 2 patches of each image, as a Qwen-Image transformer takes ``img_shapes``.

    See diffusers ``pipeline_qwenimage.py``; images have one frame.
    """
    height, width = batch["latents"].shape[-2:]
    return [[(1, height // 2, width // 2)]] * len(batch["latents"])


def clips(batch: Mapping[str, Any]) -> torch.Tensor:
    """(B, C, T, h, w) latents; an image is a clip of one frame."""
    latents: torch.Tensor = batch["latents"]
    return latents if latents.dim() == 5 else latents.unsqueeze(2)


_SIZES = ("original_size", "crop_top_left", "target_size")
_ATTENDED = {"encoder_hidden_states": "prompt_embeds"}
_POOLED = _ATTENDED | {"pooled_projections": "pooled_prompt_embeds"}
_MASK = "prompt_embeds_mask"
FORMATS: Mapping[str, Format] = {
    "diffusers-sd": Format(forward=_ATTENDED, channels=(4,), scale=0.18215, unscaled=True),
    "diffusers-sdxl": Format(
        derived={"time_ids": time_ids},
        forward=_ATTENDED | {"added_cond_kwargs": {"text_embeds": "pooled_prompt_embeds", "time_ids": "time_ids"}},
        channels=(4,),
        scale=0.13025,
        unscaled=True,
    ),
    "diffusers-sd3": Format(forward=_POOLED, channels=(16,), scale=1.5305, shift=0.0609, patch=2),
    "diffusers-flux": Format(
        derived={"img_ids": image_ids, "txt_ids": text_ids},
        forward=_POOLED | {"img_ids": "img_ids", "txt_ids": "txt_ids"},
        channels=(16,),
        scale=0.3611,
        shift=0.1159,
        patch=2,
    ),
    "diffusers-qwen-image": Format(
        derived={"img_shapes": image_shapes},
        forward=_ATTENDED | {"encoder_hidden_states_mask": _MASK, "img_shapes": "img_shapes"},
        channels=(16,),
        patch=2,
    ),
    # Padding of a prompt is zeros, which the model attends to: it takes no mask.
    "diffusers-wan": Format(derived={"latents": clips}, forward=_ATTENDED, channels=(16, 48), patch=2),
}


def check_sample_format(
    name: str | None, columns: Sequence[str], snapshot: Snapshot, shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> str | None:
    """The name of a format for samples with these columns; None for plain. ``shapes``: field -> shape in each bucket.

    Raises:
        UsageError: The latents are of another model, or sizes that it is conditioned on are missing.
    """
    if name is None or choice("format", name, ("plain", *FORMATS)) == "plain":
        return None
    wanted = FORMATS[name]
    if "latents" not in columns:
        raise UsageError(f"format={name!r}: the batch has no latents", fix="add latents to fields, or format='plain'")
    stored = snapshot.fields["latents"].recipe, [shape["latents"] for shape in shapes if "latents" in shape]
    wrong = _misfits(wanted, *stored)
    if wrong:
        fitting = [other for other, candidate in FORMATS.items() if not _misfits(candidate, *stored)]
        formats = " or ".join(f"format={other!r}" for other in [*fitting, "plain"])
        raise UsageError(
            f"format={name!r}: the latents are of another model",
            why="they have " + " and ".join(wrong),
            fix=f"{formats}, or build the cache with the VAE of the model you train",
        )
    missing = sorted(set(_SIZES) - set(columns)) if "time_ids" in wanted.derived else []
    if missing:
        raise UsageError(f"format={name!r}: needs {', '.join(missing)}", fix="leave fields out, or add these columns")
    return name


def check_embeddings(name: str, columns: Sequence[str], snapshot: Snapshot) -> None:
    """Raise UsageError if the model of a format needs embeddings that the cache, with these columns, lacks."""
    arguments = _leaves(FORMATS[name].forward)
    embeddings = [column for column in ("prompt_embeds", "pooled_prompt_embeds") if column in arguments]
    missing = [column for column in embeddings if column not in columns]
    if missing:
        model = Path(str(snapshot.fields["latents"].provenance.get("model", "")))
        pipelines = [folder for folder in (model, model.parent) if (folder / "model_index.json").is_file()]
        words = ("latentcache", "build", snapshot.source["root"], "--out", snapshot.paths.root, "--text-encoder")
        command = shlex.join(map(str, (*words, *(pipelines or [Path("PIPELINE")])[:1])))
        raise UsageError(
            f"format={name!r}: the cache has no {' and no '.join(missing)}",
            where=str(snapshot.paths.root),
            why="the model's forward takes them",
            fix=f"`{command}` adds them; or, to encode captions while you train, fields={list(columns)}",
        )


def check_carried(name: str | None, columns: Sequence[str]) -> None:
    """Raise UsageError if a format leaves out one of the columns that were asked for."""
    if lost := [column for column in columns if column in _LEFT_OUT.get(name or "", ())]:
        problem = f"format={name!r}: its batches have no {', '.join(lost)}"
        raise UsageError(problem, fix=f"leave {', '.join(lost)} out of fields, or format='plain'")


def _misfits(wanted: Format, recipe: FieldRecipe | None, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """List why a model cannot train on latents of a recipe and of these stored shapes; empty: it can."""
    affine = (recipe.read_time.affine if recipe is not None else None) or {}
    halves = 2 if recipe is not None and recipe.read_time.posterior else 1
    channels = shapes[0][0] // halves if shapes else None
    wrong = []
    if channels not in wanted.channels:
        wrong.append(f"{channels} channels, not {' or '.join(map(str, wanted.channels))}")
    kind = str(affine.get("kind", "none"))
    needed = "mean-std" if wanted.scale is None else "scale-shift"
    scale, shift = float(affine.get("scale") or 1.0), float(affine.get("shift") or 0.0)
    if kind != needed:
        wrong += [] if kind == "none" and wanted.unscaled else [f"scaling {kind!r}, not {needed!r}"]
    elif wanted.scale is not None and abs(scale / wanted.scale - 1) > _CLOSE:
        wrong.append(f"a scale of {scale:g}, not {wanted.scale:g}")
    elif wanted.scale is not None and abs(shift - wanted.shift) > _CLOSE:
        wrong.append(f"a shift of {shift:g}, not {wanted.shift:g}")
    odd = next((shape for shape in shapes if any(side % wanted.patch for side in shape[-2:])), None)
    if odd is not None:
        sides = f"{odd[-2]}x{odd[-1]}"
        wrong.append(f"a size of {sides} cells, which patches of {wanted.patch}x{wanted.patch} do not fill")
    return wrong


def sample_format(batch: Batch, name: str | None) -> Batch:
    """A batch of samples, whose values are final, with the arguments of a model; None leaves it as it is."""
    if name is None:
        return batch
    chosen = FORMATS[name]
    derived = {column: value for column, make in chosen.derived.items() if (value := make(batch)) is not None}
    whole = batch | derived
    return whole | {"forward": _arguments(chosen.forward, whole)}


def _leaves(arguments: Mapping[str, str | Mapping[str, str]]) -> list[str]:
    """The names in a batch that arguments of ``forward`` come from."""
    return [name for value in arguments.values() for name in ([value] if isinstance(value, str) else value.values())]


def _arguments(wanted: Mapping[str, str | Mapping[str, str]], batch: Batch) -> dict[str, Any]:
    """Return the arguments of ``forward`` beside the noisy latents and the time, as far as the batch has them."""
    arguments: dict[str, Any] = {}
    for name, of in wanted.items():
        if not isinstance(of, str):
            arguments[name] = _arguments(of, batch)
        elif of in batch:
            arguments[name] = batch[of]
    return arguments


def check_row_format(name: str | None, *, isolated: bool) -> str:
    """The name of a format for rows of tokens; ``flat`` needs rows whose documents are kept apart."""
    name = choice("format", name or "plain", _ROW_FORMATS)
    if name == "flat" and not isolated:
        raise UsageError(
            "format='flat': these rows have no position_ids",
            why="in one long row their documents would attend to each other",
            fix="rows(pack=...), or rows(chunk=..., cross_document=False)",
        )
    return name


def row_format(batch: Batch, name: str, ids: str = "input_ids") -> Batch:
    """A batch of rows of tokens, (B, L), with a trainer's names; ``ids``: name of the ids in the batch."""
    if name == "torchtitan":
        positions = {"positions": batch["position_ids"]} if "position_ids" in batch else {}
        labels = batch["labels"]  # torchtitan does not shift them itself
        shifted = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)
        return {"input": batch[ids], **positions, "labels": shifted}
    if name == "flat":
        return _flat(batch, ids)
    left_out = () if name == "plain" else ("seq_idx", "is_pad_row")
    kept = {key: value for key, value in batch.items() if key not in left_out}
    return kept | {"use_cache": False} if "position_ids" in batch else kept


def _flat(batch: Batch, ids: str) -> Batch:
    """All rows of a batch as one; documents and padding begin where ``position_ids`` is 0."""
    positions = batch["position_ids"].reshape(-1)
    is_begin = positions == 0
    ends = torch.cat([torch.nonzero(is_begin).reshape(-1), positions.new_tensor([positions.numel()])])
    longest = int(ends.diff().max())
    ends = ends.to(torch.int32)
    return {
        ids: batch[ids].reshape(1, -1),
        "labels": batch["labels"].reshape(1, -1),
        "position_ids": positions.reshape(1, -1),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": (torch.cumsum(is_begin, 0, dtype=torch.int32) - 1).reshape(1, -1),
        "use_cache": False,
    }


def collated(rows: Sequence[Batch], form: str, ids: str) -> Batch:
    """A batch of rows in a format, (B, L) tensors of (L,); arguments as of :func:`row_format`."""
    forms = {tuple((name, len(value)) for name, value in row.items()) for row in rows}
    if len(forms) != 1:
        problem = f"rows: {len(rows)} rows, of {len(forms)} lengths or sets of columns, do not make a batch"
        raise UsageError(problem, fix="give one or more rows of one view, such as [rows[0], rows[1]]")
    return row_format({name: torch.stack([row[name] for row in rows]) for name in rows[0]}, form, ids)
