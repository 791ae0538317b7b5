"""Files of kohya's sd-scripts: ``.npz`` of latents and of text beside each image.

Sources: kohya-ss/sd-scripts 48d368f and 58f7b4c, ``library/strategy_base.py``, ``strategy_sd.py``,
``strategy_sdxl.py``, ``strategy_flux.py``, ``strategy_sd3.py``, ``strategy_lumina.py``,
``strategy_hunyuan_image.py``; lora-scripts fdefba9, ``scripts/stable/library/train_util.py``. Values are float32,
because numpy has no bfloat16. Latents of SD, SDXL, SD3 and HunyuanImage are as the encoder makes them; those of the
autoencoder of Flux are scaled.

Three forms were written over time. ``stable``: ``a.npz`` with ``latents``, all that lora-scripts knows for SD and
SDXL. ``plain``: ``a_0900x0600_sdxl.npz``, also with ``latents``. ``suffixed``: the same names with
``latents_64x96``, and so several resolutions in a file; since 2026-02-23 for SD and SDXL, always for the others.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from latentcache.errors import UsageError
from latentcache.export.format import IDS, LATENTS, POOLED, TEXT, Array, Content, Latent, Request, Sample, npz
from latentcache.fields.latents import LatentsRecipe
from latentcache.geometry.like.kohya import KohyaTable, letterbox
from latentcache.geometry.sizes import Size, square

#: Tokens of CLIP.
_CLIP_TOKENS = 77


class Text(NamedTuple):
    """Text of one kind of model."""

    ending: str
    """Of the names of its files."""
    pipeline: str
    """Pipeline of diffusers whose embeddings it is."""
    write: Callable[[Sample], bytes]
    has_ids: bool = True
    """True if its files hold attention masks or ids."""
    advice: str = ""
    """Line for the user."""


class Architecture(NamedTuple):
    """What sd-scripts writes for one kind of model."""

    name: str
    suffix: str
    """At the end of the name of a file of latents."""
    channels: int
    scale: float
    """``scaling_factor`` of the VAE, which with ``shift`` tells architectures apart."""
    shift: float = 0.0
    is_scaled: bool = False
    has_forms: bool = False
    """True if the form of its files changed over time."""
    text: Text | None = None
    no_text: str = ""
    """Reason why its text is not exported."""


#: Release -> form of SD and SDXL. ``suffixed`` came with pull request 2269 (58f7b4c, 2026-02-23).
RELEASES = {
    "stable": "stable",
    "lora-scripts": "stable",
    "plain": "plain",
    "48d368f": "plain",
    "suffixed": "suffixed",
    "58f7b4c": "suffixed",
}
_SEEN = "https://github.com/kohya-ss/sd-scripts: `git log -1 --format=%cs` in its folder prints the date of yours"
#: Images that every release finds, by their names.
_EXTENSIONS = ("png", "jpg", "jpeg", "webp", "bmp")
#: Role -> folder of the folders of its images.
_PARTNERS = {"mask": "masks", "control": "controls"}
#: Folder of the folders of regularization images, as ``reg_data_dir`` has it.
_REG = "reg/"


class Kohya:
    """Files for sd-scripts and lora-scripts. See :class:`~latentcache.export.format.Format`."""

    name = "kohya"
    fields: Mapping[str, Sequence[str]] = {"latents": (LATENTS,), "text": (TEXT, POOLED, IDS)}

    def __init__(self, request: Request) -> None:
        recipe = request.recipe
        self._geometry = request.geometry
        self._table = cast("KohyaTable", request.geometry.like_tables()[0])
        self._architecture = _architecture(recipe, request.architecture)
        self._form = _form(self._architecture, request.release)
        self._title = re.sub(r"[^\w-]", "_", request.root.name) or "images"
        self._has_text = TEXT in request.wanted
        self.is_scaled = self._architecture.is_scaled
        if self._form != "suffixed" and len(recipe.geometry.resolutions) > 1:
            raise UsageError(
                f"--release: the form {self._form} holds one resolution, and the cache has several",
                why=f"one file of a name for {', '.join(map(str, recipe.geometry.resolutions))} pixels",
                fix="export a cache of one resolution, or use sd-scripts of 2026-02-23 or later: --release suffixed",
            )

    @property
    def facts(self) -> Mapping[str, str]:
        """What the sidecar and the JSON output say."""
        return {"architecture": self._architecture.name, "form": self._form}

    def check(self, content: Content) -> None:
        """See ``Format``."""
        if TEXT not in content.wanted:
            return
        text, recipe = self._architecture.text, content.recipes.get(TEXT)
        if text is None:
            raise UsageError(
                f"--fields: text of {self._architecture.name} cannot be exported",
                why=self._architecture.no_text,
                fix="--fields latents, and let the trainer encode the text",
            )
        if getattr(recipe, "pipeline", "") != text.pipeline:
            raise UsageError(
                f"prompt_embeds: a {getattr(recipe, 'pipeline', 'plug-in')} made the text of the cache",
                why=f"{self._architecture.name} takes that of a {text.pipeline}",
                fix="build the text with the pipeline of the model that you train: --text-encoder PIPELINE",
            )
        if text.has_ids and IDS not in content.wanted:
            raise UsageError(
                "prompt_ids: the cache holds none, and files of text need their attention masks",
                fix="run the same `latentcache build` with --prompt-ids: only token ids are made",
            )

    def target(self, sample: Sample) -> str:
        """``N_name/file``: the only folders that ``train_data_dir`` reads, and good subsets of a TOML file."""
        path, _, file = sample.target.rpartition("/")
        stem, _, extension = file.rpartition(".")
        if extension.lower() not in _EXTENSIONS or extension not in (extension.lower(), extension.upper()):
            file = f"{stem or file}.png"
        folder = path.rpartition("/")[2]
        if not re.fullmatch(f"{sample.repeats}_.+", folder):
            folder = f"{sample.repeats}_{path.replace('/', '_') or self._title}"
        return f"{_REG if sample.is_reg else ''}{folder}/{file}"

    def partner(self, sample: Sample, role: str, extension: str) -> str:
        """``masks/N_name/file``, and ``controls``: a ``conditioning_data_dir`` for each folder of images."""
        folder = _PARTNERS.get(role, "")
        readable = extension.lower() if extension.lower()[1:] in _EXTENSIONS else ".png"
        return folder and f"{folder}/{sample.stem}{readable}"

    def begin(self, folder: str, samples: Iterable[Sample]) -> None:
        """See ``Format``: the files of an image depend on no other one."""

    def files(self, sample: Sample, fields: Sequence[str]) -> Mapping[str, Callable[[], bytes]]:
        """See ``Format``."""
        found = dict[str, Callable[[], bytes]]()
        if LATENTS in fields:
            size = f"_{sample.size.width:04d}x{sample.size.height:04d}{self._architecture.suffix}"
            found[f"{sample.stem}{'' if self._form == 'stable' else size}.npz"] = partial(self._latents, sample)
        text = self._architecture.text
        if TEXT in fields and text is not None:
            found[f"{sample.stem}{text.ending}.npz"] = partial(text.write, sample)
        return found

    def settings(self, folder: str, samples: Iterable[Sample]) -> Mapping[str, bytes]:
        """See ``Format``."""
        geometry, table = self._geometry, self._table
        lines = ["# Made by latentcache. Give it to sd-scripts with --dataset_config.", "[general]"]
        lines += ["caption_extension = '.txt'", f"flip_aug = {str(geometry.flip).lower()}", ""]
        subsets, parts = _subsets(samples), dict[bool, list[str]]()
        for name in sorted(subsets):
            parts.setdefault(bool(subsets[name].conditioning), []).append(name)
        for resolution in geometry.resolutions or geometry.buckets:
            size = square(resolution)
            for names in parts.values():
                lines += ["[[datasets]]", f"resolution = [{size.width}, {size.height}]"]
                if geometry.resolutions:
                    lines += [
                        "enable_bucket = true",
                        f"min_bucket_reso = {table.min_side}",
                        f"max_bucket_reso = {table.max_side}",
                        f"bucket_reso_steps = {geometry.multiple}",
                        f"bucket_no_upscale = {str(not geometry.upscale).lower()}",
                    ]
                for name in names:
                    lines += subsets[name].lines(folder, name)
                lines.append("")
        return {"dataset.toml": "\n".join(lines).encode()}

    def advice(self, folder: str, samples: Iterable[Sample]) -> Sequence[str]:
        """See ``Format``."""
        flags, subsets = "--cache_latents --cache_latents_to_disk", _subsets(samples).values()
        if not folder:
            where = f"{flags}, with the folders and sizes that you train with today"
        elif self._form == "stable":
            reg = f"; reg_data_dir: {folder}/{_REG}" if any(subset.first.is_reg for subset in subsets) else ""
            where = f"train_data_dir: {folder}   (lora-scripts: the folder of training images){reg}"
        else:
            where = f"--dataset_config {folder}/dataset.toml {flags}"
        lines = [where]
        if folder and self._form == "stable":
            lines.append("caption_extension: .txt; resolution, flips and buckets as in dataset.toml")
        off = "random_crop, color_aug and face_crop_aug_range must be off: cached latents cannot have them"
        lines.append(f"{flags}: the trainer then takes these files; {off}")
        text = self._architecture.text
        if self._has_text and text is not None:
            lines.append(
                "--cache_text_encoder_outputs --cache_text_encoder_outputs_to_disk --network_train_unet_only;"
                " shuffle_caption, caption_dropout_rate, caption_tag_dropout_rate, apply_t5_attn_mask and"
                " apply_lg_attn_mask must be off"
            )
            lines += [text.advice] if text.advice else []
        if any(subset.conditioning for subset in subsets):
            lines.append("conditioning_data_dir needs --masked_loss, or a training of ControlNet")
        if any(subset.is_left_out for subset in subsets):
            lines.append(
                "dataset.toml has no masks and control images: conditioning_data_dir needs one for each image of a"
                " folder, and no regularization images"
            )
        return lines

    def _latents(self, sample: Sample) -> bytes:
        arrays = dict[str, Array]()
        for latent in sample.latents:
            arrays |= _latent_arrays(sample.size, latent, with_suffix=self._form == "suffixed")
        return npz(arrays)


def _latent_arrays(size: Size, latent: Latent, *, with_suffix: bool) -> dict[str, Array]:
    height, width = latent.values.shape[-2:]
    suffix = f"_{height}x{width}" if with_suffix else ""
    arrays = {
        f"latents{suffix}": latent.values,
        f"original_size{suffix}": np.array([size.width, size.height]),
        f"crop_ltrb{suffix}": np.array(letterbox(size, latent.bucket)),
    }
    if latent.flipped is not None:
        arrays[f"latents_flipped{suffix}"] = latent.flipped
    return arrays


def _sdxl_text(sample: Sample) -> bytes:
    """The two encoders of SDXL, which diffusers joins: 768 values of the first, 1280 of the other."""
    joined = sample.text[TEXT]
    return npz({"hidden_state1": joined[:, :768], "hidden_state2": joined[:, 768:], "pool2": sample.text[POOLED]})


def _flux_text(sample: Sample) -> bytes:
    """T5 without its attention mask (``apply_t5_attn_mask`` off), as ``FluxPipeline`` encodes; and the mask."""
    sequence = sample.text[TEXT]
    return npz(
        {
            "l_pooled": sample.text[POOLED],
            "t5_out": sequence,
            "txt_ids": np.zeros((len(sequence), 3), np.float32),
            "t5_attn_mask": sample.text[IDS][1, _CLIP_TOKENS:].astype(np.int64),
            "apply_t5_attn_mask": np.array(False),
        }
    )


def _sd3_text(sample: Sample) -> bytes:
    """Both encoders of CLIP side by side, then T5, all without attention masks; and the masks."""
    sequence, pooled = sample.text[TEXT], sample.text[POOLED]
    masks = np.split(sample.text[IDS][1].astype(np.int64), [_CLIP_TOKENS, 2 * _CLIP_TOKENS])
    return npz(
        {
            "lg_out": sequence[:_CLIP_TOKENS, : len(pooled)],
            "lg_pooled": pooled,
            "t5_out": sequence[_CLIP_TOKENS:],
            "clip_l_attn_mask": masks[0],
            "clip_g_attn_mask": masks[1],
            "t5_attn_mask": masks[2],
            "apply_lg_attn_mask": np.array(False),
            "apply_t5_attn_mask": np.array(False),
        }
    )


def _lumina_text(sample: Sample) -> bytes:
    """Gemma 2, whose padding no model of Lumina attends to: zeros here."""
    sequence, (ids, mask) = sample.text[TEXT], sample.text[IDS].astype(np.int64)
    return npz(
        {
            "hidden_state": np.pad(sequence, ((0, len(ids) - len(sequence)), (0, 0))),
            "attention_mask": mask,
            "input_ids": ids,
        }
    )


_SD_TEXT = "sd-scripts caches no text of SD"
_HUNYUAN_TEXT = "its files hold two sequences (Qwen2.5-VL and ByT5), and a cache holds one per caption"
_SDXL = Text("_te_outputs", "StableDiffusionXLPipeline", _sdxl_text, has_ids=False)
_SD3, _FLUX = Text("_sd3_te", "StableDiffusion3Pipeline", _sd3_text), Text("_flux_te", "FluxPipeline", _flux_text)
_PROMPT = "--system_prompt: the captions follow the default system_prompt of Lumina2Pipeline"
_LUMINA = Text("_lumina_te", "Lumina2Pipeline", _lumina_text, advice=_PROMPT)
_ROWS = (
    Architecture("sd", "_sd", 4, 0.18215, has_forms=True, no_text=_SD_TEXT),
    Architecture("sdxl", "_sdxl", 4, 0.13025, has_forms=True, text=_SDXL),
    Architecture("sd3", "_sd3", 16, 1.5305, 0.0609, text=_SD3),
    Architecture("flux", "_flux", 16, 0.3611, 0.1159, is_scaled=True, text=_FLUX),
    Architecture("lumina", "_lumina", 16, 0.3611, 0.1159, is_scaled=True, text=_LUMINA),
    Architecture("hunyuan-image", "_hi", 64, 0.75289, no_text=_HUNYUAN_TEXT),
)
ARCHITECTURES: Mapping[str, Architecture] = {row.name: row for row in _ROWS}


def _architecture(recipe: LatentsRecipe, name: str | None) -> Architecture:
    """The architecture that is named, or the only one whose VAE this is."""
    encoder, scaling = recipe.encoder, recipe.encoder.normalization
    if name is not None and name not in ARCHITECTURES:
        fix = f"--architecture {'|'.join(ARCHITECTURES)}"
        raise UsageError("unknown architecture", argument="architecture", value=name, fix=fix)
    is_known = scaling.kind == "scale-shift"
    fitting = [
        row
        for row in (_ROWS if name is None else [ARCHITECTURES[name]])
        if row.channels == encoder.channels
        and (not is_known or (abs(row.scale - scaling.scale) < 1e-3 and abs(row.shift - scaling.shift) < 1e-3))
    ]
    if len(fitting) == 1:
        return fitting[0]
    numbers = f"{encoder.channels} channels, scale {scaling.scale:g}, shift {scaling.shift:g}"
    if not fitting:
        raise UsageError(
            f"--to kohya: no architecture of sd-scripts has such latents ({numbers})",
            fix="build with the VAE of the model that you train: latentcache build DATA --model MODEL --like kohya",
        )
    raise UsageError(
        f"--to kohya: these latents fit {' and '.join(row.name for row in fitting)}",
        why=f"their latents are the same ({numbers}), their files are not",
        fix=f"--architecture {fitting[0].name}",
    )


def _form(architecture: Architecture, release: str | None) -> str:
    """The form of files that a release of the trainer reads."""
    if not architecture.has_forms:
        return "suffixed"
    if release is None:
        raise UsageError(
            f"--to kohya: files of {architecture.name} have three forms, and a trainer reads only its own",
            why="stable: lora-scripts and old sd-scripts; plain: sd-scripts up to 2026-02-22; suffixed: later ones",
            fix=f"--release stable|plain|suffixed, or --release FOLDER of your sd-scripts ({_SEEN})",
        )
    if release in RELEASES:
        return RELEASES[release]
    return _form_of_checkout(Path(release).expanduser())


def _form_of_checkout(folder: Path) -> str:
    """The form that a checkout of sd-scripts or lora-scripts reads, by its code."""
    base = next(
        (one for one in (folder, folder / "scripts/stable") if (one / "library/train_util.py").is_file()), None
    )
    if base is None:
        raise UsageError(
            "unknown release, and no folder of sd-scripts or lora-scripts",
            argument="release",
            value=str(folder),
            fix=f"--release {'|'.join(RELEASES)}, or the folder that holds library/train_util.py",
        )
    strategy = base / "library/strategy_sd.py"
    if not strategy.is_file():
        return "stable"
    return "suffixed" if "multi_resolution=True" in strategy.read_text("utf-8") else "plain"


class _Subset(NamedTuple):
    """The images of one folder."""

    first: Sample
    conditioning: str
    """Folder of the masks or control images that all of them have."""
    is_left_out: bool
    """True if there are some that the trainer cannot read."""

    def lines(self, folder: str, name: str) -> list[str]:
        """Its settings; one with a ``conditioning_data_dir`` has neither class words nor regularization images."""
        lines = ["[[datasets.subsets]]", f"image_dir = {_text(f'{folder}/{name}')}"]
        lines.append(f"num_repeats = {self.first.repeats}")
        if self.conditioning:
            return [*lines, f"conditioning_data_dir = {_text(f'{folder}/{self.conditioning}/{name}')}"]
        words = self.first.class_words or name.rpartition("/")[2].partition("_")[2]
        return [*lines, f"class_tokens = {_text(words)}", *(["is_reg = true"] if self.first.is_reg else [])]


def _subsets(samples: Iterable[Sample]) -> dict[str, _Subset]:
    """By folder of the export."""
    first, common, all_of = dict[str, Sample](), dict[str, set[str]](), defaultdict[str, set[str]](set)
    for sample in samples:
        name = sample.target.rpartition("/")[0]
        first.setdefault(name, sample)
        common.setdefault(name, set(sample.partners)).intersection_update(sample.partners)
        all_of[name].update(sample.partners)
    has_reg = any(sample.is_reg for sample in first.values())
    subsets = dict[str, _Subset]()
    for name, roles in common.items():
        role = "" if has_reg else next((role for role in _PARTNERS if role in roles), "")
        subsets[name] = _Subset(first[name], _PARTNERS.get(role, ""), bool(all_of[name]) and not role)
    return subsets


def _text(value: str) -> str:
    """A string of TOML."""
    return json.dumps(value, ensure_ascii=False)
