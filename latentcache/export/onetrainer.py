"""The cache folder of OneTrainer, and its concepts.

Source: Nerogar/mgds 3a6994a, ``pipelineModules/DiskCache.py``, as the data loaders of Nerogar/OneTrainer 23df383 set
it up (``modules/dataLoader``). A concept is a folder of images. Its cache has the name of a hash of its settings, a
folder for each variation, and in it a file for each image by its number in the sorted folder, and ``aggregate.pt``
with the sizes of all. Files are made by ``torch.save`` of dicts, lists, tuples, strings, numbers and tensors.

Latents are the mean as the encoder makes it. OneTrainer draws flips and resolutions before it caches, for each
variation and image, from generators that depend on the position of a step in its pipeline. So do we.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from latentcache.errors import UsageError, count_of
from latentcache.export.format import (
    IDS,
    LATENTS,
    MASK,
    POOLED,
    TEXT,
    Array,
    Content,
    Latent,
    Request,
    Sample,
    joined,
    saved,
)
from latentcache.geometry.like.onetrainer import PIXELS, TrainingConfig, read_config
from latentcache.geometry.sizes import Size
from latentcache.value import Value

#: Images that it finds, by their names; and the ends of names that it takes for masks and conditioning images.
_EXTENSIONS = ("bmp", "jpg", "jpeg", "png", "tif", "tiff", "webp", "avif")
_LABELS = ("-masklabel", "-condlabel")
#: Releases whose concepts have these settings: all from 2024-11-09 to 2026-08-19.
RELEASES = ("23df383", "pre-upgrade", "pre-flux2")
#: Settings of images and of text, whose hash is the name of a cache, with their defaults.
_IMAGE: Mapping[str, Any] = {
    **PIXELS,
    "enable_random_flip": False,
    "enable_fixed_flip": False,
    "random_rotate_max_angle": 0.0,
    **{f"random_{what}_max_strength": 0.0 for what in ("brightness", "contrast", "saturation", "hue")},
    "resolution_override": "512",
}
_TEXT: Mapping[str, Any] = {
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
#: Steps of its pipeline that draw, by their position without and with masks; and its only seed.
_RESOLUTION_STEP, _FLIP_STEP, _SEED = (13, 18), (15, 20), 42
#: Type of text, as its settings name it; else, and of latents, float32.
_DTYPES = {"FLOAT_16": torch.float16, "BFLOAT_16": torch.bfloat16}
#: Values of the first text encoder of SDXL and of SD3, which diffusers joins with those of the second.
_FIRST_WIDTH = 768


class Concept(Value):
    """One folder of the export."""

    settings: Mapping[str, Any]
    """As ``concepts.json`` has them."""
    first: int
    """Number of its first image among those of all concepts."""
    samples: Sequence[Sample]
    """Without values, in the order of its cache."""

    @property
    def variations(self) -> int:
        """Copies of the image cache."""
        return int(self.settings["image_variations"])

    def cache(self, kind: str, variation: int = 0) -> str:
        """Folder of its ``image`` or ``text`` cache."""
        names = ("path", "seed", "include_subdirectories", kind)
        key = json.dumps([self.settings[name] for name in names], sort_keys=True, separators=(",", ":"))
        return f"cache/{kind}/{hashlib.sha256(key.encode()).hexdigest()}/variation-{variation}"


class OneTrainer:
    """Files for OneTrainer. See :class:`~latentcache.export.format.Format`."""

    name = "onetrainer"
    fields: Mapping[str, Sequence[str]] = {"latents": (LATENTS, MASK), "text": (TEXT, POOLED, IDS)}
    is_scaled = False

    def __init__(self, request: Request) -> None:
        self._geometry, self._wanted, self._root = request.geometry, request.wanted, request.root
        self._recipe, self._tables = request.recipe, request.geometry.like_tables()
        self._release = request.release or RELEASES[0]
        self._image, self._text = _settings_of(self._release)
        config = request.trainer_config
        self._config = TrainingConfig(values={}, concepts=()) if config is None else read_config(config)
        self._is_masked = bool(self._config.values.get("masked_training"))
        self._dtype = _DTYPES.get(self._config.values.get("train_dtype", ""), torch.float32)
        self._pipeline = ""
        self._lengths: Sequence[int] = ()
        self._unknown = 0
        """Folders of the export that are in no concept of the user's file."""
        self._concepts: dict[str, Concept] = {}
        """By the folder in the export."""
        self._positions: dict[str, int] = {}
        """Target -> position in its concept."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What the sidecar and the JSON output say; draws depend on the number of an image in all concepts."""
        numbers = [self._is_masked, *(concept.first for concept in self._concepts.values())]
        return {"release": self._release} | ({"draws": str(numbers)} if self._draws() else {})

    def check(self, content: Content) -> None:
        """See ``Format``."""
        if self._is_masked and MASK not in content.wanted:
            raise UsageError(
                "masked_training is on, and the cache has no masks",
                why="without them its data loader fails at the first batch",
                fix="build with the masks beside the images (a-masklabel.png), or turn masked_training off",
            )
        if TEXT not in content.wanted:
            return
        self._pipeline = getattr(content.recipes[TEXT], "pipeline", "plug-in")
        if self._pipeline not in _TEXTS:
            raise UsageError(
                f"--fields: text of a {self._pipeline} cannot be exported",
                why="OneTrainer encodes it in another way than diffusers, or has further values of it",
                fix="--fields latents, and let the trainer encode the text",
            )
        needed = (LATENTS, TEXT, IDS) if self._pipeline == "StableDiffusionPipeline" else (LATENTS, TEXT, POOLED, IDS)
        missing = [name for name in needed[1:] if name not in content.wanted]
        if missing:
            raise UsageError(
                f"{missing[0]}: the cache has no such field, and OneTrainer's files of text hold it",
                fix=f"run the same `latentcache build` with --fields {','.join(needed)}; or export --fields latents",
            )
        self._lengths = getattr(content.recipes[IDS], "lengths", ())
        self._check_length()

    def _check_length(self) -> None:
        """T5 must have the tokens that the trainer gives it."""
        wanted, around = (77, 77) if self._pipeline == "StableDiffusion3Pipeline" else (0, 0)
        if self._pipeline == "FluxPipeline" and self._config.values:
            wanted = self._config.values.get("text_encoder_2_sequence_length", 77) or 512
        if wanted and self._lengths[-1] != wanted:
            raise UsageError(
                f"prompt_embeds: {self._lengths[-1]} tokens of T5, and OneTrainer has {wanted}",
                fix=f"build the text with --text-length {wanted + around}, or export --fields latents",
            )

    def target(self, sample: Sample) -> str:
        """``images``, the folder of the data set, and the name of the image."""
        folder, _, file = sample.target.rpartition("/")
        stem, _, extension = file.rpartition(".")
        if extension.lower() not in _EXTENSIONS:
            stem, extension = stem or file, "png"
        if stem.endswith(_LABELS):
            raise UsageError(
                f"{sample.name}: OneTrainer takes it for a mask, by its name",
                where=sample.name,
                fix="rename this image, and build again",
            )
        return f"images/{folder or self._root.name}/{stem}.{extension}"

    def partner(self, sample: Sample, role: str, extension: str) -> str:
        """The mask, and the conditioning image."""
        ends = {"mask": "-masklabel", "control": "-condlabel"}
        return f"{sample.stem}{ends[role]}.png" if role in ends else ""

    def begin(self, folder: str, samples: Iterable[Sample]) -> None:
        """Sort the images into concepts, one for each folder."""
        by_folder = dict[str, list[Sample]]()
        for sample in samples:
            by_folder.setdefault(sample.target.rpartition("/")[0], []).append(sample)
        first = 0
        for name, group in sorted(by_folder.items()):
            ordered = sorted(group, key=lambda sample: sample.target)
            settings = self._concept(joined(folder, name), ordered)
            self._concepts[name] = Concept(settings=settings, first=first, samples=ordered)
            self._positions |= {sample.target: position for position, sample in enumerate(ordered)}
            first += len(ordered)

    def files(self, sample: Sample, fields: Sequence[str]) -> Mapping[str, Callable[[], bytes]]:
        """See ``Format``."""
        found = dict[str, Callable[[], bytes]]()
        concept = self._concepts[sample.target.rpartition("/")[0]]
        name = f"{self._positions[sample.target]}.pt"
        for variation in range(concept.variations if LATENTS in fields else 0):
            found[f"{concept.cache('image', variation)}/{name}"] = partial(self._latents, sample, concept, variation)
        if TEXT in fields:
            found[f"{concept.cache('text')}/{name}"] = partial(self._text_of, sample)
        return found

    def settings(self, folder: str, samples: Iterable[Sample]) -> Mapping[str, bytes]:
        """See ``Format``: ``concepts.json``, the advice, and the sizes of each cache."""
        concepts = [concept.settings for concept in self._concepts.values()]
        found = {
            "concepts.json": json.dumps(concepts, indent=4).encode(),
            "onetrainer.txt": "".join(f"{line}\n" for line in self.advice(folder, ())).encode(),
        }
        for concept in self._concepts.values():
            for variation in range(concept.variations if LATENTS in self._wanted else 0):
                sizes = [
                    {
                        "crop_resolution": _pair(self._bucket(sample.size, variation, concept.first + number)),
                        "image_path": joined(folder, sample.target),
                    }
                    for number, sample in enumerate(concept.samples)
                ]
                found[f"{concept.cache('image', variation)}/aggregate.pt"] = saved(sizes)
            if TEXT in self._wanted:
                found[f"{concept.cache('text')}/aggregate.pt"] = saved([{} for _ in concept.samples])
        return found

    def advice(self, folder: str, samples: Iterable[Sample]) -> Sequence[str]:
        """See ``Format``."""
        step = getattr(self._tables[0], "step", 64)
        lines = [
            "clear_cache_before_training must be off: it deletes this export at the start of the training",
            f"concept_file_name: {joined(folder, 'concepts.json')}   cache_dir: {joined(folder, 'cache')}",
            f"latent_caching: on; resolution: {self._resolution()}; sides are multiples of {step}. In the concepts"
            " you can change names, balancing, type and loss weight; anything else makes the trainer encode again",
        ]
        if self._unknown:
            folders = count_of(self._unknown, "folders are")
            lines.append(f"{folders} in no concept of --trainer-config: their concepts have defaults")
        if regularization := sum(sample.is_reg for concept in self._concepts.values() for sample in concept.samples):
            ordinary = count_of(regularization, "regularization images are")
            lines.append(f"{ordinary} ordinary ones here: set type and loss weight of their concepts")
        if (dropped := self._dropped()) > 0:
            lines.append(
                f"batch_size {self._config.batch}: {count_of(dropped, 'samples')} of an epoch fill no batch of their"
                " bucket, and the trainer drops them and does not report it: `latentcache plan DATA --for onetrainer"
                " --suggest`"
            )
        if not self._is_masked and MASK in self._wanted:
            lines.append("masked_training: on, if the masks are to count")
        if TEXT in self._wanted:
            lines.append(
                "train must be off for every text encoder, its layer skip 0, and embeddings must not be trained"
            )
        elif self._wanted:
            lines.append("the trainer encodes text itself, once, into the same cache_dir")
        if self._geometry.flip and not self._flips():
            lines.append("the cache has flips, which are not exported: no concept of --trainer-config draws them")
        return lines

    def _dropped(self) -> int:
        """Samples of the first epoch that fill no batch."""
        counts = Counter[Size]()
        for concept in self._concepts.values():
            for number, sample in enumerate(concept.samples):
                counts[self._bucket(sample.size, 0, concept.first + number)] += sample.repeats
        return sum(count % self._config.batch for count in counts.values())

    def _flips(self) -> bool:
        """True if a concept flips its images."""
        images = [concept.settings["image"] for concept in self._concepts.values()]
        return any(image["enable_random_flip"] or image["enable_fixed_flip"] for image in images)

    def _draws(self) -> bool:
        return self._flips() or len(self._tables) > 1

    def _resolution(self) -> str:
        if self._geometry.buckets:
            size = self._geometry.buckets[0]
            square = size.height == size.width
            return f"{size.width}, aspect_ratio_bucketing off" if square else f"{size.width}x{size.height}"
        return ",".join(map(str, self._geometry.resolutions))

    def _concept(self, path: str, samples: Sequence[Sample]) -> dict[str, Any]:
        """A concept of its defaults, and of what the user's concept of this folder says."""
        users = self._users_concept(samples[0])
        self._unknown += bool(self._config.concepts and not users)
        flips = {name: bool(users.get("image", {}).get(name)) for name in ("enable_random_flip", "enable_fixed_flip")}
        is_drawn = flips["enable_random_flip"] or len(self._geometry.resolutions) > 1
        balancing = {"balancing": float(samples[0].repeats), "balancing_strategy": "REPEATS"}
        kept = ("name", "type", "balancing", "balancing_strategy", "loss_weight")
        text = dict(self._text)
        if TEXT not in self._wanted:  # text that the trainer caches by number must not outlive a change of the images
            listing = "\0".join(f"{sample.target}\0{sample.caption}" for sample in samples)
            text["prompt_path"] = f"latentcache-{hashlib.sha256(listing.encode()).hexdigest()[:16]}"
        return {
            "__version": 2,
            "name": path.replace("\\", "/").rpartition("/")[2],
            "type": "STANDARD",
            "loss_weight": 1.0,
            **balancing,
            **{name: users[name] for name in kept if name in users},
            "image": {"__version": 0, **self._image, **flips, "enable_crop_jitter": False},
            "text": {"__version": 0, **text},
            "path": path,
            "seed": 0,
            "enabled": True,
            "include_subdirectories": False,
            "image_variations": int(users.get("image_variations", 1)) if is_drawn else 1,
            "text_variations": 1,
            "concept_stats": {},
        }

    def _users_concept(self, sample: Sample) -> Mapping[str, Any]:
        """The concept of the user's file whose folder has this image; empty: none has."""
        parents = (self._root / sample.name).parents
        for concept in self._config.concepts:
            path = Path(str(concept.get("path", ""))).expanduser().absolute()
            if path in (parents if concept.get("include_subdirectories") else parents[:1]):
                return concept
        return {}

    def _bucket(self, image: Size, variation: int, number: int) -> Size:
        """The bucket that the trainer draws for an image."""
        draw = self._draw(_RESOLUTION_STEP, variation, number)
        return draw.choice([table.nearest(image) for table in self._tables])

    def _draw(self, steps: tuple[int, int], variation: int, number: int) -> random.Random:
        """The generator of one step of its pipeline, as ``PipelineModule._get_rand`` makes it."""
        return random.Random(hash((_SEED, steps[self._is_masked], variation, number)))

    def _latents(self, sample: Sample, concept: Concept, variation: int) -> bytes:
        number = concept.first + self._positions[sample.target]
        bucket = self._bucket(sample.size, variation, number)
        placement, image = self._recipe.geometry.place(sample.size, bucket), concept.settings["image"]
        is_flipped = image["enable_fixed_flip"]
        if image["enable_random_flip"]:
            is_flipped = self._draw(_FLIP_STEP, variation, number).random() < 0.5
        item = {
            "latent_image": _tensor(sample.latents, bucket, is_flipped=is_flipped),
            "original_resolution": _pair(sample.size),
            "crop_offset": (placement.top, placement.left),
        }
        if MASK in self._wanted:
            item["latent_mask"] = _tensor(sample.masks, bucket, is_flipped=is_flipped)
        return saved(item)

    def _text_of(self, sample: Sample) -> bytes:
        parts = np.split(sample.text[IDS], np.cumsum(self._lengths)[:-1], axis=1)
        named = _TEXTS[self._pipeline](sample.text[TEXT], sample.text.get(POOLED))
        item = {
            name: torch.from_numpy(np.ascontiguousarray(values)).to(self._dtype) for name, values in named.items()
        }
        single = len(parts) == 1
        for number, (ids, mask) in enumerate(parts, 1):
            end = "" if single else f"_{number}"
            item[f"tokens{end}"] = torch.from_numpy(ids.astype(np.int64))
            item[f"tokens_mask{end}"] = torch.from_numpy(mask.astype(np.int64))
        return saved(item)


def _sd_text(sequence: Array, pooled: Array | None) -> dict[str, Array]:
    return {"text_encoder_hidden_state": sequence}


def _sdxl_text(sequence: Array, pooled: Array) -> dict[str, Array]:
    return {
        "text_encoder_1_hidden_state": sequence[:, :_FIRST_WIDTH],
        "text_encoder_2_hidden_state": sequence[:, _FIRST_WIDTH:],
        "text_encoder_2_pooled_state": pooled,
    }


def _sd3_text(sequence: Array, pooled: Array) -> dict[str, Array]:
    return {
        "text_encoder_1_hidden_state": sequence[:77, :_FIRST_WIDTH],
        "text_encoder_1_pooled_state": pooled[:_FIRST_WIDTH],
        "text_encoder_2_hidden_state": sequence[:77, _FIRST_WIDTH : len(pooled)],
        "text_encoder_2_pooled_state": pooled[_FIRST_WIDTH:],
        "text_encoder_3_hidden_state": sequence[77:],
    }


def _flux_text(sequence: Array, pooled: Array) -> dict[str, Array]:
    return {"text_encoder_1_pooled_state": pooled, "text_encoder_2_hidden_state": sequence}


#: Pipeline of diffusers -> what its embeddings are called in a file of text.
_TEXTS: Mapping[str, Callable[[Array, Any], dict[str, Array]]] = {
    "StableDiffusionPipeline": _sd_text,
    "StableDiffusionXLPipeline": _sdxl_text,
    "StableDiffusion3Pipeline": _sd3_text,
    "FluxPipeline": _flux_text,
}


def _settings_of(release: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Settings of a concept's images and text, with their defaults, in a release or a checkout of it."""
    if release in RELEASES:
        return _IMAGE, _TEXT
    file = Path(release).expanduser() / "modules/util/config/ConceptConfig.py"
    try:
        tree = ast.parse(file.read_text("utf-8"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        return _defaults(classes["ConceptImageConfig"]), _defaults(classes["ConceptTextConfig"])
    except (OSError, SyntaxError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise UsageError(
            "unknown release, and no folder of OneTrainer",
            argument="release",
            value=release,
            why=str(error),
            fix=f"--release {'|'.join(RELEASES)} (all since 2024-11-09 are alike), or the folder of yours",
        ) from error


def _defaults(config: ast.ClassDef) -> dict[str, Any]:
    """Name -> default, of the lines ``data.append((name, default, type, nullable))``."""
    found = dict[str, Any]()
    for node in ast.walk(config):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append":
            name, default, *_ = cast("ast.Tuple", node.args[0]).elts
            found[ast.literal_eval(name)] = ast.literal_eval(default)
    return found


def _tensor(latents: Sequence[Latent], bucket: Size, *, is_flipped: bool) -> torch.Tensor:
    """(C, h, w) of one size; the flip only differs if its pixels do."""
    latent = next(latent for latent in latents if latent.bucket == bucket)
    values = latent.flipped if is_flipped and latent.flipped is not None else latent.values
    return torch.from_numpy(values)


def _pair(size: Size) -> tuple[int, int]:
    return size.height, size.width
