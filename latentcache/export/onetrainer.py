"""The cache folder of OneTrainer, and its concepts.

Source: Nerogar/mgds 3a6994a, ``pipelineModules/DiskCache.py``, as the data loaders of Nerogar/OneTrainer 23df383 set
it up (``modules/dataLoader``). A concept is a folder of images. Its cache has the name of a hash of its settings, a
folder for each variation, and in it a file for each image by its number in the sorted folder, and ``aggregate.pt``
with the sizes of all. Files are made by ``torch.save`` of dicts, lists, tuples, strings, numbers and tensors.

Latents are the mean as the encoder makes it. OneTrainer draws flips and resolutions before it caches. It draws them
for each variation and image, from generators that depend on the position of a step in its pipeline. So do we.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from latentcache.errors import UsageError, count_of
from latentcache.export import format as base
from latentcache.export.format import Text
from latentcache.geometry.like.onetrainer import PIXELS, TrainingConfig, read_config
from latentcache.geometry.like.trainer import read_file
from latentcache.geometry.sizes import Size
from latentcache.value import Value

#: Ends of names that it takes for masks and conditioning images.
_LABELS = {"mask": "-masklabel", "control": "-condlabel"}
#: Settings of images and of text, whose hash is the name of a cache, with their defaults; all releases from
#: 2024-11-09 to 23df383 (2026-08-19) have these. A concept that a later one saved has its own.
_IMAGE: Mapping[str, Any] = {
    "__version": 0,
    **PIXELS,
    "enable_random_flip": False,
    "enable_fixed_flip": False,
    "random_rotate_max_angle": 0.0,
    **{f"random_{change}_max_strength": 0.0 for change in ("brightness", "contrast", "saturation", "hue")},
    "resolution_override": "512",
    "enable_crop_jitter": False,
}
_TEXT: Mapping[str, Any] = {
    "__version": 0,
    "prompt_source": "sample",
    "prompt_path": "",
    "enable_tag_shuffling": False,
    "tag_delimiter": ",",
    "keep_tags_count": 1,
    "tag_dropout_enable": False,
    "tag_dropout_mode": "FULL",
    "tag_dropout_probability": 0.0,
    "tag_dropout_special_tags_mode": "NONE",
    "tag_dropout_special_tags": "",
    "tag_dropout_special_tags_regex": False,
    "caps_randomize_enable": False,
    "caps_randomize_mode": "capslock, title, first, random",
    "caps_randomize_probability": 0.0,
    "caps_randomize_lowercase": False,
}
#: Steps of its pipeline that draw, by their position without masks and conditioning images; and its only seed.
_TEXT_STEP, _RESOLUTION_STEP, _FLIP_STEP, _SEED = 11, 13, 15, 42
#: Type of text, as its settings name it; else, and of latents, float32.
_DTYPES = {"FLOAT_16": torch.float16, "BFLOAT_16": torch.bfloat16}
#: Part of a text -> its name in a file, by the number of the encoder.
_PARTS = {
    "state": "text_encoder{}_hidden_state",
    "pooled": "text_encoder{}_pooled_state",
    "ids": "tokens{}",
    "mask": "tokens_mask{}",
}


class Concept(Value):
    """One folder of the export."""

    settings: Mapping[str, Any]
    """As ``concepts.json`` has them."""
    first: int
    """Number of its first image among those of all concepts."""
    samples: Sequence[base.Sample]
    """Without values, in the order of its cache."""

    def folders(self, kind: str) -> list[str]:
        """Folders of the variations of its ``image`` or ``text`` cache."""
        names = ("path", "seed", "include_subdirectories", kind)
        key = json.dumps([self.settings[name] for name in names], sort_keys=True, separators=(",", ":"))
        cache = f"cache/{kind}/{hashlib.sha256(key.encode()).hexdigest()}"
        return [f"{cache}/variation-{variation}" for variation in range(self.settings[f"{kind}_variations"])]


class OneTrainer(base.Format):
    """Files for OneTrainer. See :class:`~latentcache.export.format.Format`."""

    name = "onetrainer"
    texts = (
        Text(base.SD, (base.IDS,)),
        *(Text(pipeline, (base.POOLED, base.IDS)) for pipeline in (base.SDXL, base.SD3, base.FLUX)),
    )
    latent_fields = (base.LATENTS, base.MASK, base.CONTROL)
    draws_captions = True
    extensions = ("bmp", "jpg", "jpeg", "png", "tif", "tiff", "webp", "avif")
    no_caption = "trains on the empty caption"
    several_lines = "one that it draws"

    def __init__(self, request: base.Request) -> None:
        self._config = TrainingConfig(values={}, concepts=())
        if config := request.trainer_config:
            self._config = read_config(config, read_file(config))
        super().__init__(request)
        self._is_masked = bool(self._config.values.get("masked_training"))
        self._dtype = _DTYPES.get(self._config.values.get("train_dtype", ""), torch.float32)
        self._concepts: list[Concept] = []
        self._concept_of: dict[str, tuple[Concept, int]] = {}
        """Target -> its concept, and its number among the images of all concepts."""
        self._has_flips = False
        self._draws = ""
        """Numbers on which its draws depend."""
        self._caches = ["image"] if base.LATENTS in self.request.wanted else []
        self._caches += ["text"] if self.text is not None else []
        pipeline = self.text and self.text.pipeline
        tokens, before = (base.CLIP_TOKENS, base.CLIP_TOKENS) if pipeline == base.SD3 else (0, 0)
        if pipeline == base.FLUX and self._config.values:
            tokens = self._config.values.get("text_encoder_2_sequence_length", 77) or 512
        lengths = getattr(request.recipes.get(base.IDS), "lengths", (0,))
        if tokens and lengths[-1] != tokens:
            raise UsageError(
                f"prompt_embeds: {lengths[-1]} tokens of T5, and OneTrainer has {tokens}",
                fix=f"build the text with --text-length {tokens + before}, or export --fields latents",
            )

    @property
    def takes_control(self) -> bool:
        """See ``Format``."""
        return self._config.is_inpainting

    @property
    def facts(self) -> Mapping[str, str]:
        """What the sidecar and the JSON output say."""
        return {"release": "23df383"} | ({"draws": self._draws} if self._draws else {})

    def target(self, sample: base.Sample) -> str:
        """``images``, the data set, its folder and the name of the image, which must not be that of a mask."""
        stem, _, extension = self.readable(f"{self._images}/{sample.target}").rpartition(".")
        for label in _LABELS.values():
            stem = f"{stem.removesuffix(label)}_{label[1:]}" if stem.endswith(label) else stem
        return f"{stem}.{extension}"

    def partner(self, sample: base.Sample, role: str, extension: str) -> str:
        """The mask, and the conditioning image."""
        return f"{sample.stem}{_LABELS[role]}.png" if role in _LABELS else ""

    @property
    def _images(self) -> str:
        """Folder of all images."""
        return f"images/{self.request.root.name or 'data'}"

    def group(self, sample: base.Sample) -> str:
        """See ``Format``: that of the user's concept, if there is one."""
        return self._users_concept(sample)[0]

    def begin(self, samples: Sequence[base.Sample]) -> None:
        """Sort the images into concepts: those of the user, and one for each other folder."""
        super().begin(samples)
        first = 0
        for folder, group in self.groups.items():
            ordered = sorted(group, key=lambda sample: self.path(sample.target))
            settings = self._settings(self.path(folder), self._users_concept(group[-1])[1], ordered)
            concept = Concept(settings=settings, first=first, samples=ordered)
            self._concepts.append(concept)
            self._concept_of |= {sample.target: (concept, number) for number, sample in enumerate(ordered, first)}
            first += len(ordered)
        images = [concept.settings["image"] for concept in self._concepts]
        self._has_flips = any(image["enable_random_flip"] or image["enable_fixed_flip"] for image in images)
        if self._has_flips or len(self.tables) > 1 or any(sample.further for sample in samples):
            self._draws = str([self._shift(), *(concept.first for concept in self._concepts)])

    def latent_files(self, sample: base.Sample) -> dict[str, base.Make]:
        """See ``Format``."""
        return self._variations(sample, "image", self._latents)

    def text_files(self, sample: base.Sample, text: Text) -> dict[str, base.Make]:
        """See ``Format``."""
        return self._variations(sample, "text", self._texts)

    def settings(self) -> Mapping[str, bytes]:
        """See ``Format``: ``concepts.json``, the advice, and the sizes of each cache."""
        concepts = [concept.settings for concept in self._concepts]
        files = {
            "concepts.json": json.dumps(concepts, indent=4).encode(),
            "onetrainer.txt": "".join(f"{line}\n" for line in self.advice()).encode(),
        }
        for kind, concept in product(self._caches, self._concepts):
            for variation, folder in enumerate(concept.folders(kind)):
                sizes = [
                    {
                        "crop_resolution": _pair(self._bucket(sample, variation)),
                        "image_path": self.path(sample.target),
                    }
                    for sample in concept.samples
                ]
                files[f"{folder}/aggregate.pt"] = base.saved(sizes if kind == "image" else [{} for _ in sizes])
        return files

    def advice(self) -> Sequence[str]:
        """See ``Format``."""
        lines = [
            "clear_cache_before_training must be off: it deletes this export at the start of the training",
            f"concept_file_name: {self.path('concepts.json')}   cache_dir: {self.path('cache')}",
            f"latent_caching: on; resolution: {self._resolution()}; sides are multiples of {self.geometry.multiple}."
            " In the concepts you can change names, balancing, type and loss weight; anything else makes the trainer"
            " encode again",
        ]
        unknown = sum(not self._users_concept(concept.samples[0])[1] for concept in self._concepts)
        if self._config.concepts and unknown:
            folders = count_of(unknown, "folders are")
            lines.append(f"{folders} in no concept of --trainer-config: their concepts have defaults")
        if regularization := sum(sample.is_reg for sample in self.samples):
            ordinary = count_of(regularization, "regularization images are")
            lines.append(f"{ordinary} ordinary ones here: set type and loss weight of their concepts")
        counts = Counter[Size]()
        for sample in self.samples:
            counts[self._bucket(sample, 0)] += sample.repeats
        if dropped := sum(count % self._config.batch for count in counts.values()):
            lines.append(
                f"batch_size {self._config.batch}: {count_of(dropped, 'samples')} of an epoch fill no batch of their"
                " bucket, and the trainer drops them and does not report it: `latentcache plan DATA --for onetrainer"
                " --suggest`"
            )
        if not self._is_masked and base.MASK in self.request.wanted:
            lines.append("masked_training: on, if the masks are to count")
        if self.text is not None:
            lines.append(
                "train must be off for every text encoder, its layer skip 0, and embeddings must not be trained"
            )
        else:
            lines.append("the trainer encodes text itself, once, into the same cache_dir")
        if self.geometry.flip and not self._has_flips:
            lines.append("the cache has flips, which are not exported: no concept of --trainer-config draws them")
        return lines

    def _variations(
        self, sample: base.Sample, kind: str, write: Callable[[base.Sample, int], bytes]
    ) -> dict[str, base.Make]:
        """A file for each variation of the ``image`` or ``text`` cache."""
        concept, number = self._concept_of[sample.target]
        folders = enumerate(concept.folders(kind))
        return {f"{folder}/{number - concept.first}.pt": partial(write, sample, draw) for draw, folder in folders}

    def _shift(self, *, with_images: bool = True) -> int:
        """Positions by which masks and conditioning images move a step; False: the step is before images are read."""
        custom = int(bool(self._config.values.get("custom_conditioning_image")))
        loaded = 2 if self._is_masked else int(self._config.is_inpainting)
        changed = 2 if loaded else 0
        return self._is_masked + custom + (loaded + custom + changed if with_images else 0)

    def _resolution(self) -> str:
        if self.geometry.buckets:
            size = self.geometry.buckets[0]
            is_square = size.height == size.width
            return f"{size.width}, aspect_ratio_bucketing off" if is_square else f"{size.width}x{size.height}"
        return ",".join(map(str, self.geometry.resolutions))

    def _settings(self, path: str, users: Mapping[str, Any], samples: Sequence[base.Sample]) -> dict[str, Any]:
        """Settings of a concept: the defaults, changed by the user's concept of this folder."""
        image, text = {**_IMAGE, **users.get("image", {})}, {**_TEXT}
        text_variations = int(users.get("text_variations", 1))
        if self.text is not None:
            text_variations = text_variations if any(sample.further for sample in samples) else 1
        else:
            text |= users.get("text", {})
            if text["prompt_source"] == "sample":  # text that it caches by number must not outlive a change of images
                captions = [captioned for sample in samples for captioned in sample.captioned]
                listing = "\0".join(f"{captioned.target}\0{captioned.caption}" for captioned in captions)
                text["prompt_path"] = f"latentcache-{hashlib.sha256(listing.encode()).hexdigest()[:16]}"
        is_drawn = image["enable_random_flip"] or len(self.geometry.resolutions) > 1
        kept = ("name", "type", "balancing", "balancing_strategy", "loss_weight", "include_subdirectories")
        return {
            "__version": 2,
            "name": path.replace("\\", "/").rpartition("/")[2],
            "type": "STANDARD",
            "loss_weight": 1.0,
            "balancing": float(samples[0].repeats),
            "balancing_strategy": "REPEATS",
            "include_subdirectories": False,
            **{name: users[name] for name in kept if name in users},
            "image": image,
            "text": text,
            "path": path,
            "seed": 0,
            "enabled": True,
            "image_variations": int(users.get("image_variations", 1)) if is_drawn else 1,
            "text_variations": text_variations,
            "concept_stats": {},
        }

    def _users_concept(self, sample: base.Sample) -> tuple[str, Mapping[str, Any]]:
        """The exported folder of the concept of an image, and its concept in the user's file, if there is one."""
        root = self.request.root
        matches = list[tuple[str, Mapping[str, Any]]]()
        parents = (root / sample.name).parents
        for concept in self._config.concepts:
            path = Path(str(concept.get("path", ""))).expanduser().absolute()
            if path not in (parents if concept.get("include_subdirectories") else parents[:1]):
                continue
            inside = path.relative_to(root).as_posix() if path.is_relative_to(root) else "."
            matches.append((self._images if inside == "." else f"{self._images}/{inside}", concept))
        if len(matches) > 1:
            raise UsageError(
                f"{sample.name}: is in {len(matches)} concepts of {self.request.trainer_config}",
                where=sample.name,
                why="a folder of the export is one concept",
                fix="turn include_subdirectories off in the outer one, and build again",
            )
        return matches[0] if matches else (sample.folder, {})

    def _bucket(self, sample: base.Sample, variation: int) -> Size:
        """The bucket that the trainer draws for an image."""
        draw = self._draw(_RESOLUTION_STEP + self._shift(), sample, variation)
        return draw.choice([table.nearest(sample.size) for table in self.tables])

    def _draw(self, step: int, sample: base.Sample, variation: int) -> random.Random:
        """The generator of one step of its pipeline, as ``PipelineModule._get_rand`` makes it."""
        return random.Random(hash((_SEED, step, variation, self._concept_of[sample.target][1])))

    def _latents(self, sample: base.Sample, variation: int) -> bytes:
        bucket = self._bucket(sample, variation)
        image = self._concept_of[sample.target][0].settings["image"]
        placement = self.request.latents.geometry.place(sample.size, bucket)
        is_flipped = image["enable_fixed_flip"]
        if image["enable_random_flip"]:
            is_flipped = self._draw(_FLIP_STEP + self._shift(), sample, variation).random() < 0.5
        item: dict[str, Any] = {
            "latent_image": self.tensor(sample.latents, bucket, is_flipped=is_flipped),
            "original_resolution": _pair(sample.size),
            "crop_offset": (placement.top, placement.left),
        }
        if self._config.is_inpainting and not self._is_masked:
            item["latent_mask"] = torch.ones_like(item["latent_image"][:1])
        elif base.MASK in self.request.wanted:
            item["latent_mask"] = self.tensor(sample.masks, bucket, is_flipped=is_flipped)
        if base.CONTROL in self.request.wanted:
            item["latent_conditioning_image"] = self.tensor(sample.controls, bucket, is_flipped=is_flipped)
        return base.saved(item)

    def _texts(self, sample: base.Sample, variation: int) -> bytes:
        """Parts of the caption that it draws. If a model has one text encoder, their names have no number."""
        draw = self._draw(_TEXT_STEP + self._shift(with_images=False), sample, variation)
        item = dict[str, torch.Tensor]()
        parts = base.text_parts(self.request, draw.choice(sample.captioned))
        for name, values in parts.items():
            kind, _, encoder = name.partition("_")
            tensor = torch.from_numpy(np.ascontiguousarray(values))
            ending = f"_{encoder}" if "ids_2" in parts else ""
            item[_PARTS[kind].format(ending)] = tensor if kind in ("ids", "mask") else tensor.to(self._dtype)
        return base.saved(item)


def _pair(size: Size) -> tuple[int, int]:
    return size.height, size.width
