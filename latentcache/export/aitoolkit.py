"""Files of ai-toolkit: ``.safetensors`` of latents and of text in folders beside the images, named by a hash.

Source: ostris/ai-toolkit 27a03a9, ``LatentCachingFileItemDTOMixin``, ``TextEmbeddingFileItemDTOMixin`` and
``MaskFileItemDTOMixin`` of ``toolkit/dataloader_mixins.py``, ``PromptEmbeds`` of ``toolkit/prompt_utils.py``, and
``encode_prompt`` of each model. The hash is of the name of the image, its sizes and the model; of a text, of the
caption as the trainer makes it of the file. So each resolution and each flip has a file of its own. Latents are
float32 and scaled.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import yaml

from latentcache.errors import UsageError, count_of
from latentcache.export import format as base
from latentcache.export.format import Architecture, Text
from latentcache.geometry.like.aitoolkit import read_job, step_of, trigger_of
from latentcache.geometry.like.trainer import read_file
from latentcache.geometry.sizes import Size, square
from latentcache.sources.layout import Trigger

Tensors = Mapping[str, torch.Tensor]


def _sequence(text: Tensors) -> Tensors:
    """A batch of one, with the pooled vector if there is one."""
    pooled = {"pooled_embed": text[base.POOLED][None]} if base.POOLED in text else {}
    return {"text_embed": text[base.TEXT][None], **pooled}


def _masked(text: Tensors) -> Tensors:
    """A sequence without padding, with a mask of ones."""
    return {
        "text_embed": text[base.TEXT][None],
        "attention_mask": torch.ones(1, len(text[base.TEXT]), dtype=torch.int64),
    }


def _listed(text: Tensors) -> Tensors:
    return {"text_embed_0": text[base.TEXT]}


def _padded(text: Tensors) -> Tensors:
    """A sequence with zeros up to the 512 tokens of Wan."""
    return {"text_embed": torch.nn.functional.pad(text[base.TEXT], (0, 0, 0, 512 - len(text[base.TEXT])))[None]}


_KL = "AutoencoderKL"
#: Named as their ``arch``; the code is ``latent_space_version``.
_ROWS = (
    Architecture("sd1", 4, 0.18215, 0.0, _KL, "sd1", [Text(base.SD, (), _sequence)]),
    Architecture("sdxl", 4, 0.13025, 0.0, _KL, "sdxl", [Text(base.SDXL, (base.POOLED,), _sequence)]),
    Architecture("sd3", 16, 1.5305, 0.0609, _KL, "sd3", [Text(base.SD3, (base.POOLED,), _sequence)]),
    Architecture("flux", 16, 0.3611, 0.1159, _KL, "flux1", [Text(base.FLUX, (base.POOLED,), _sequence)]),
    Architecture("lumina2", 16, 0.3611, 0.1159, _KL, "lumina2", [Text(base.LUMINA, (), _masked)]),
    Architecture("zimage", 16, 0.3611, 0.1159, _KL, "zimage", [Text(base.Z_IMAGE, (), _listed)]),
    Architecture("qwen_image", 16, 1.0, 0.0, "AutoencoderKLQwenImage", "qwen_image", [Text(base.QWEN, (), _masked)]),
    *(Architecture(name, 16, 1.0, 0.0, "AutoencoderKLWan", name, [Text(base.WAN, (), _padded)], has_frames=True)
      for name in ("wan21", "wan22_14b")),
)  # fmt: skip
#: Role -> setting of a data set.
_PARTNERS = {"mask": "mask_path", "control": "control_path_1", "control_2": "control_path_2",
             "control_3": "control_path_3"}  # fmt: skip


class AiToolkit(base.Format):
    """Files for ai-toolkit. See :class:`~latentcache.export.format.Format`."""

    name = "ai-toolkit"
    architectures = _ROWS
    is_scaled = True
    latent_fields = (base.LATENTS,)
    text_fields = (base.TEXT, base.POOLED)
    extensions = ("jpg", "jpeg", "png", "webp")
    no_caption = "uses default_caption, else the empty caption"
    several_lines = "all of them"

    def __init__(self, request: base.Request) -> None:
        config = request.trainer_config
        job = read_job(read_file(config)) if config else None
        self._datasets = job.datasets if job else ()
        super().__init__(replace(request, architecture=request.architecture or (job and job.arch)))
        step = step_of(self.architecture.name)
        if request.geometry.multiple != step:
            raise UsageError(
                f"--to ai-toolkit: sides of {self.architecture.name} are multiples of {step} pixels,"
                f" those of the cache of {request.geometry.multiple}",
                fix=f"build another cache with --like ai-toolkit --bucket-step {step}",
            )
        words = {trigger_of(dataset) for dataset in self._datasets if not dataset.get("is_reg")}
        if len(words) > 1:
            raise UsageError(
                f"{config}: data sets have several trigger words", fix="export each with a job of its own"
            )
        self._word = next(iter(words), "")

    def target(self, sample: base.Sample) -> str:
        """``images-2x`` or ``reg-1x``, and the path of the image as one name: masks are found by it alone."""
        return f"{'reg' if sample.is_reg else 'images'}-{sample.repeats}x/{self.flat(sample.target)}"

    def partner(self, sample: base.Sample, role: str, extension: str) -> str:
        """See ``Format``: a folder of masks or control images for each folder of images."""
        return f"{role}-{self.readable(f'{sample.stem}{extension.lower()}')}"

    def begin(self, samples: Sequence[base.Sample]) -> None:
        """See ``Format``: check that the trainer reads the encoded texts from the caption files."""
        super().begin(samples)
        wrong = [sample for sample in samples if self._trigger(sample).caption(sample.caption) != sample.caption]
        if self.text is not None and wrong:
            served = self._trigger(wrong[0]).caption(wrong[0].caption)
            raise UsageError(
                f"ai-toolkit makes other texts of {count_of(len(wrong), 'captions')} than the cache has",
                where=wrong[0].name,
                why=f"{wrong[0].caption!r} becomes {served!r}",
                fix="build with --trainer-config JOB, the file of the training: only these are encoded; or export"
                " --fields latents",
            )
        rates = [float(dataset.get("caption_dropout_rate") or 0) for dataset in self._datasets]
        self._rate = max(rates, default=0.0)
        dropped = {self._trigger(sample).caption("") for sample in samples}
        if self.text is not None and self._rate and not dropped <= self.request.prompts.keys():
            text = max(dropped)
            option = f"--negative-prompt {text!r}" if text else "--empty-prompt"
            raise UsageError(
                f"{self.request.trainer_config}: caption_dropout_rate is {self._rate:g}, and the cache has no text"
                f" {text!r}, which it serves then",
                fix=f"run the same `latentcache build` with {option}: only this is encoded; or set it to 0",
            )

    def caption_text(self, text: str) -> str:
        """See ``Format``: the trainer adds a blank behind each comma, even if there is one."""
        return text.replace(", ", ",")

    def latent_files(self, sample: base.Sample) -> dict[str, base.Make]:
        """See ``Format``."""
        files = dict[str, base.Make]()
        buckets = {table.nearest(sample.size) for table in self.tables}
        for bucket, is_flipped in product(buckets, (False, True)[: 1 + self.geometry.flip]):
            key = self._key(sample, bucket, is_flipped=is_flipped)
            files[_file(sample, "_latent_cache", key)] = partial(self._latents, sample, bucket, is_flipped, key)
        return files

    def text_files(self, sample: base.Sample, text: Text) -> dict[str, base.Make]:
        """See ``Format``: its caption, and the prompt that replaces a dropped caption."""
        prompts = self.request.prompts
        dropped = self._trigger(sample).caption("")
        texts = {dropped: prompts[dropped]} if dropped in prompts else {}
        files = dict[str, base.Make]()
        for caption, items in {**texts, sample.caption: sample.text}.items():
            key = {"caption": caption, "text_embedding_space_version": self.architecture.name}
            name = _file(sample, "_t_e_cache", {**key, "text_embedding_version": 1})
            files[name] = partial(self._saved_text, items, text)
        return files

    def settings(self) -> Mapping[str, bytes]:
        """See ``Format``: the data sets of a job."""
        geometry = self.geometry
        entries = list[dict[str, Any]]()
        sides = [square(side).width for side in geometry.buckets or geometry.resolutions]
        for folder, samples in self.groups.items():
            entry = {
                "folder_path": self.path(folder),
                "caption_ext": "txt",
                "resolution": sides,
                "num_repeats": samples[0].repeats,
                "is_reg": samples[0].is_reg,
                "flip_x": geometry.flip,
                "square_crop": bool(geometry.buckets),
                "cache_latents_to_disk": True,
                "cache_text_embeddings": self.text is not None,
                "caption_dropout_rate": self._rate,
            }
            roles = {role for sample in samples for role in sample.partners}
            entry |= {_PARTNERS[role]: self.path(f"{role}-{folder}") for role in sorted(roles)}
            entries.append(entry)
        return {"datasets.yaml": yaml.safe_dump({"datasets": entries}, sort_keys=False, allow_unicode=True).encode()}

    def advice(self) -> Sequence[str]:
        """See ``Format``."""
        lines = [f"config.process.datasets: those of {self.path('datasets.yaml')}"]
        lines.append(f"model.arch: {self.architecture.name}; random crops and augmentations must be off")
        if any(sample.has_alpha for sample in self.samples):
            lines.append("alpha_mask: true in a data set uses the transparency of its images, if all have it")
        word = f"{self._word!r}, which captions have" if self._word else "none, or one that all captions have"
        if self.text is None:
            lines.append("the trainer encodes text itself")
        else:
            lines.append(f"trigger_word: {word}; shuffle_tokens and token_dropout_rate must be off")
            if not self._rate and not self.request.prompts:
                lines.append("caption_dropout_rate must be 0: the cache has no empty prompt")
        return lines

    def _trigger(self, sample: base.Sample) -> Trigger:
        return Trigger(word=self._word, is_added=not sample.is_reg)

    def _key(self, sample: base.Sample, bucket: Size, *, is_flipped: bool) -> dict[str, Any]:
        """The key whose hash names a file of latents: ``get_latent_info_dict``."""
        placement = self.request.latents.geometry.place(sample.size, bucket)
        return {
            "filename": sample.target.rpartition("/")[2],
            "scale_to_width": placement.resize.width,
            "scale_to_height": placement.resize.height,
            "crop_x": placement.left,
            "crop_y": placement.top,
            "crop_width": bucket.width,
            "crop_height": bucket.height,
            "latent_space_version": self.architecture.code,
            "latent_version": 1,
            **({"flip_x": True} if is_flipped else {}),
        }

    def _latents(self, sample: base.Sample, bucket: Size, is_flipped: bool, key: Mapping[str, Any]) -> bytes:
        metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in key.items()}
        return base.safetensors(
            {"latent": self.tensor(sample.latents, bucket, is_flipped=is_flipped)}, {**metadata, "format": "pt"}
        )

    def _saved_text(self, items: Mapping[str, base.Array], text: Text) -> bytes:
        return base.safetensors(text.values(self.stored(items)))


def _file(sample: base.Sample, folder: str, key: Mapping[str, Any]) -> str:
    """Name a file of an image. The MD5 of the key is only a name: it protects nothing."""
    digest = hashlib.md5(json.dumps(key, sort_keys=True).encode(), usedforsecurity=False).digest()
    stem = sample.stem.rpartition("/")[2]
    return f"{sample.folder}/{folder}/{stem}_{base64.urlsafe_b64encode(digest).decode().rstrip('=')}.safetensors"
