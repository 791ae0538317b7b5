"""Files of kohya's sd-scripts: ``.npz`` of latents and of text beside each image.

Sources: kohya-ss/sd-scripts 48d368f and 58f7b4c, ``library/strategy_base.py``, ``strategy_sd.py``,
``strategy_sdxl.py``, ``strategy_flux.py``, ``strategy_sd3.py``, ``strategy_lumina.py``,
``strategy_hunyuan_image.py``; lora-scripts fdefba9, ``scripts/stable/library/train_util.py``. Values are float32,
because numpy has no bfloat16. Latents of SD, SDXL, SD3 and HunyuanImage are as the encoder makes them; those of the
autoencoder of Flux are scaled.

Three forms were written over time. ``stable``: ``a.npz`` with ``latents``, all that lora-scripts knows for SD and
SDXL. ``plain``: ``a_0900x0600_sdxl.npz``, also with ``latents``. ``suffixed``: the same names with
``latents_64x96``, and so several resolutions in a file; since 2026-02-23 for SD and SDXL, always for the others.

An alpha mask has the size of the bucket. The trainer shrinks it to the latents by means, so cells repeated to pixels
give the mask of our cache back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from latentcache.errors import UsageError
from latentcache.export import format as base
from latentcache.export.format import Architecture, Text
from latentcache.geometry.like.kohya import KohyaTable, letterbox
from latentcache.geometry.sizes import square

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
#: Role -> folder of the folders of its images.
_PARTNERS = {"mask": "masks", "control": "controls"}
#: Folder of the folders of regularization images, as ``reg_data_dir`` has it.
_REG = "reg/"
_OFF = np.array(False)


def _sdxl_text(parts: Mapping[str, base.Array]) -> dict[str, base.Array]:
    return {"hidden_state1": parts["state_1"], "hidden_state2": parts["state_2"], "pool2": parts["pooled_2"]}


def _flux_text(parts: Mapping[str, base.Array]) -> dict[str, base.Array]:
    """T5 without its attention mask (``apply_t5_attn_mask`` off), as ``FluxPipeline`` encodes; and the mask."""
    return {
        "l_pooled": parts["pooled_1"],
        "t5_out": parts["state_2"],
        "txt_ids": np.zeros((len(parts["state_2"]), 3), np.float32),
        "t5_attn_mask": parts["mask_2"],
        "apply_t5_attn_mask": _OFF,
    }


def _sd3_text(parts: Mapping[str, base.Array]) -> dict[str, base.Array]:
    """Both encoders of CLIP side by side, then T5, all without attention masks; and the masks."""
    return {
        "lg_out": np.concatenate([parts["state_1"], parts["state_2"]], axis=1),
        "lg_pooled": np.concatenate([parts["pooled_1"], parts["pooled_2"]]),
        "t5_out": parts["state_3"],
        "clip_l_attn_mask": parts["mask_1"],
        "clip_g_attn_mask": parts["mask_2"],
        "t5_attn_mask": parts["mask_3"],
        "apply_lg_attn_mask": _OFF,
        "apply_t5_attn_mask": _OFF,
    }


def _lumina_text(parts: Mapping[str, base.Array]) -> dict[str, base.Array]:
    """Gemma 2, whose padding no model of Lumina attends to: zeros here."""
    sequence, ids = parts["state_1"], parts["ids_1"]
    padded = np.pad(sequence, ((0, len(ids) - len(sequence)), (0, 0)))
    return {"hidden_state": padded, "attention_mask": parts["mask_1"], "input_ids": ids}


_PROMPT = "--system_prompt: the captions follow the default system_prompt of Lumina2Pipeline"
_ROWS = (
    Architecture("sd", 4, 0.18215, code="_sd", has_forms=True, no_text="sd-scripts caches no text of SD"),
    Architecture("sdxl", 4, 0.13025, code="_sdxl", has_forms=True,
                 texts=[Text(base.SDXL, (base.POOLED,), _sdxl_text, "_te_outputs")]),
    Architecture("sd3", 16, 1.5305, 0.0609, code="_sd3",
                 texts=[Text(base.SD3, (base.POOLED, base.IDS), _sd3_text, "_sd3_te")]),
    Architecture("flux", 16, 0.3611, 0.1159, code="_flux", is_scaled=True,
                 texts=[Text(base.FLUX, (base.POOLED, base.IDS), _flux_text, "_flux_te")]),
    Architecture("lumina", 16, 0.3611, 0.1159, code="_lumina", is_scaled=True,
                 texts=[Text(base.LUMINA, (base.IDS,), _lumina_text, "_lumina_te", _PROMPT)]),
    Architecture("hunyuan-image", 64, 0.75289, code="_hi",
                 no_text="its files hold two sequences (Qwen2.5-VL and ByT5), and a cache holds one per caption"),
)  # fmt: skip


class Kohya(base.Format):
    """Files for sd-scripts and lora-scripts. See :class:`~latentcache.export.format.Format`."""

    name = "kohya"
    architectures = _ROWS
    extensions = ("png", "jpg", "jpeg", "webp", "bmp")
    shared = ("repeats", "is_reg", "class_words")
    draws_captions = True
    empty_caption = "\n"  # a file without any line stops it
    no_caption = "uses the class words, class_tokens or the name of the folder"

    def __init__(self, request: base.Request) -> None:
        super().__init__(request)
        self._form = _form(self.architecture, request.release)
        self._title = re.sub(r"[^\w-]", "_", request.root.name) or "images"
        self._has_alpha = False
        self._conditioning: dict[str, str] = {}
        """Folder of images -> folder of the masks or control images that all of them have; empty: none."""
        resolutions = request.latents.geometry.resolutions
        if self._form != "suffixed" and len(resolutions) > 1:
            raise UsageError(
                f"--release: the form {self._form} holds one resolution, and the cache has several",
                why=f"one file of a name for {', '.join(map(str, resolutions))} pixels",
                fix="export a cache of one resolution, or use sd-scripts of 2026-02-23 or later: --release suffixed",
            )

    @property
    def facts(self) -> Mapping[str, str]:
        """What the sidecar and the JSON output say."""
        alpha = {"masks": "alpha"} if self._has_alpha else {}
        return {**super().facts, "form": self._form, **alpha}

    def target(self, sample: base.Sample) -> str:
        """``N_name/file``: the only folders that ``train_data_dir`` reads, and good subsets of a TOML file."""
        path, _, file = self.readable(sample.target).rpartition("/")
        stem, _, extension = file.rpartition(".")
        if extension not in (extension.lower(), extension.upper()):  # it looks for both of these names
            file = f"{stem}.png"
        folder = path.rpartition("/")[2]
        if not re.fullmatch(f"{sample.repeats}_.+", folder):
            folder = f"{sample.repeats}_{path.replace('/', '_') or self._title}"
        return f"{_REG if sample.is_reg else ''}{folder}/{file}"

    def partner(self, sample: base.Sample, role: str, extension: str) -> str:
        """``masks/N_name/file``, and ``controls``: a ``conditioning_data_dir`` for each folder of images."""
        folder = _PARTNERS.get(role, "")
        return folder and f"{folder}/{self.readable(f'{sample.stem}{extension.lower()}')}"

    def begin(self, samples: Sequence[base.Sample]) -> None:
        """See ``Format``: if one image has an alpha mask, all files hold masks."""
        super().begin(samples)
        self._has_alpha = any(sample.has_alpha for sample in samples) and base.MASK in self.request.wanted
        has_reg = any(sample.is_reg for sample in samples)
        for folder, group in self.groups.items():
            roles = {} if has_reg else base.common_roles(group)
            self._conditioning[folder] = next((_PARTNERS[role] for role in _PARTNERS if role in roles), "")

    def latent_files(self, sample: base.Sample) -> dict[str, base.Make]:
        """See ``Format``."""
        size = f"_{sample.size.width:04d}x{sample.size.height:04d}{self.architecture.code}"
        return {f"{sample.stem}{'' if self._form == 'stable' else size}.npz": partial(self._latents, sample)}

    def text_files(self, sample: base.Sample, text: Text) -> dict[str, base.Make]:
        """See ``Format``."""
        return {f"{sample.stem}{text.name}.npz": lambda: base.npz(text.values(base.text_parts(self.request, sample)))}

    def settings(self) -> Mapping[str, bytes]:
        """See ``Format``."""
        geometry = self.geometry
        table = cast("KohyaTable", self.tables[0])
        has_several = any(sample.further for sample in self.samples)
        lines = ["# Made by latentcache. Give it to sd-scripts with --dataset_config.", "[general]"]
        lines += ["caption_extension = '.txt'", *base.toml({"flip_aug": geometry.flip})]
        lines += [*(base.toml({"enable_wildcard": True}) if has_several else []), ""]
        for resolution in geometry.resolutions or geometry.buckets:
            size = square(resolution)
            buckets = {
                "enable_bucket": True,
                "min_bucket_reso": table.min_side,
                "max_bucket_reso": table.max_side,
                "bucket_reso_steps": geometry.multiple,
                "bucket_no_upscale": not geometry.upscale,
            }
            for is_conditioned in sorted(set(map(bool, self._conditioning.values()))):
                lines += ["[[datasets]]", *base.toml({"resolution": [size.width, size.height]})]
                lines += base.toml(buckets) if geometry.resolutions else []
                for folder, samples in self.groups.items():
                    if bool(self._conditioning[folder]) == is_conditioned:
                        lines += ["[[datasets.subsets]]", *base.toml(self._subset(folder, samples[0]))]
                lines.append("")
        return {"dataset.toml": "\n".join(lines).encode()}

    def advice(self) -> Sequence[str]:
        """See ``Format``."""
        flags = "--cache_latents --cache_latents_to_disk"
        folder = self.request.folder
        lines = [f"--dataset_config {self.path('dataset.toml')} {flags}"]
        if not folder:
            lines = [f"{flags}, with the folders and sizes that you train with today"]
        elif self._form == "stable":
            reg = f"; reg_data_dir: {self.path(_REG)}" if any(sample.is_reg for sample in self.samples) else ""
            lines = [f"train_data_dir: {folder}   (lora-scripts: the folder of training images){reg}"]
            alpha = ", alpha_mask: true" if self._has_alpha else ""
            lines.append(f"caption_extension: .txt{alpha}; resolution, flips and buckets as in dataset.toml")
        off = "random_crop, color_aug and face_crop_aug_range must be off: cached latents cannot have them"
        lines.append(f"{flags}: the trainer then takes these files; {off}")
        if self.text is not None:
            lines.append(
                "--cache_text_encoder_outputs --cache_text_encoder_outputs_to_disk --network_train_unet_only;"
                " shuffle_caption, caption_dropout_rate, caption_tag_dropout_rate, apply_t5_attn_mask and"
                " apply_lg_attn_mask must be off"
            )
            lines += [self.text.advice] if self.text.advice else []
            if any(sample.further for sample in self.samples):
                lines.append("of several captions of an image, the text of the first one is exported")
        if any(self._conditioning.values()):
            lines.append("conditioning_data_dir needs --masked_loss, or a training of ControlNet")
        if any(sample.partners and not self._conditioning[sample.folder] for sample in self.samples):
            lines.append(
                "dataset.toml has no masks and control images: conditioning_data_dir needs one for each image of a"
                " folder, and no regularization images"
            )
        return lines

    def _latents(self, sample: base.Sample) -> bytes:
        arrays = dict[str, base.Array]()
        for number, latent in enumerate(sample.latents):
            height, width = latent.values.shape[-2:]
            suffix = f"_{height}x{width}" if self._form == "suffixed" else ""
            arrays |= {
                f"latents{suffix}": latent.values,
                f"original_size{suffix}": np.array([sample.size.width, sample.size.height]),
                f"crop_ltrb{suffix}": np.array(letterbox(sample.size, latent.bucket)),
            }
            if latent.flipped is not None:
                arrays[f"latents_flipped{suffix}"] = latent.flipped
            if self._has_alpha:
                cell = np.ones((latent.bucket.height // height, latent.bucket.width // width), np.float32)
                arrays[f"alpha_mask{suffix}"] = np.kron(sample.masks[number].values[0], cell)
        return base.npz(arrays)

    def _subset(self, folder: str, first: base.Sample) -> dict[str, Any]:
        """Settings of a folder; with a ``conditioning_data_dir`` it has no class words and no regularization."""
        settings: dict[str, Any] = {"image_dir": self.path(folder), "num_repeats": first.repeats}
        if conditioning := self._conditioning[folder]:
            return settings | {"conditioning_data_dir": self.path(f"{conditioning}/{folder}")}
        settings |= {"alpha_mask": True} if self._has_alpha else {}
        settings["class_tokens"] = first.class_words or folder.rpartition("/")[2].partition("_")[2]
        return settings | ({"is_reg": True} if first.is_reg else {})


def _form(architecture: Architecture, release: str | None) -> str:
    """The form of files that a release of the trainer reads, or a checkout by its code."""
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
    for library in (Path(release).expanduser() / name for name in ("library", "scripts/stable/library")):
        if (library / "train_util.py").is_file():
            strategy = library / "strategy_sd.py"
            if not strategy.is_file():
                return "stable"
            return "suffixed" if "multi_resolution=True" in strategy.read_text("utf-8") else "plain"
    raise UsageError(
        "unknown release, and no folder of sd-scripts or lora-scripts",
        argument="release",
        value=release,
        fix=f"--release {'|'.join(RELEASES)}, or the folder that holds library/train_util.py",
    )
