"""Buckets of OneTrainer.

Rules (Nerogar/mgds 3a6994a): ``AspectBucketing``, ``SingleAspectCalculation`` and ``AspectBatchSorting`` of
``pipelineModules``. Settings are read from the JSON file that OneTrainer (Nerogar/OneTrainer 23df383) saves, and from
its file of concepts. Names and defaults are those of ``modules/util/config/TrainConfig.py`` and ``ConceptConfig.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from latentcache.errors import UsageError
from latentcache.geometry.like import trainer
from latentcache.geometry.sizes import Size, square
from latentcache.value import Value

_ASPECTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)
#: Start of a model type -> pixels that every side is a multiple of; 64 for other models.
_STEPS = {"STABLE_DIFFUSION_1": 8, "STABLE_DIFFUSION_2": 8, "PIXART": 16, "SANA": 32}
#: Model types that take further images as input, which no export holds.
_MORE_INPUTS = ("DEPTH", "FILL")
#: Settings of a concept's images that change pixels before they are encoded, with their defaults.
PIXELS = {
    "enable_crop_jitter": True,
    **{
        f"enable_{how}_{change}": False
        for change in ("rotate", "brightness", "contrast", "saturation", "hue")
        for how in ("random", "fixed")
    },
    "enable_resolution_override": False,
    "enable_random_circular_mask_shrink": False,
    "enable_random_mask_rotate_crop": False,
}
#: Its file has at least one of these settings.
_KNOWN = {"concept_file_name", "concepts", "aspect_ratio_bucketing", "training_method", "model_type", "resolution"}
#: Settings of a concept's text that draw another caption each time.
_DRAWN_TEXT = ("enable_tag_shuffling", "tag_dropout_enable", "caps_randomize_enable")


class OneTrainerTable(trainer.Table):
    """The buckets of one resolution, in pixels."""

    title: ClassVar[str] = "OneTrainer"
    without_buckets: ClassVar[str] = "aspect_ratio_bucketing = false"

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """All buckets, in the trainer's order: of two equally near buckets an image gets the first."""
        if not self.buckets:
            return (self.resolution,)
        tall = [(1.0, aspect) for aspect in _ASPECTS]
        scaled = [
            (
                height / math.sqrt(height * width) * self.resolution.height,
                width / math.sqrt(height * width) * self.resolution.height,
            )
            for height, width in tall
        ]
        scaled += [(width, height) for height, width in scaled]
        rounded = [
            (round(height / self.step) * self.step, round(width / self.step) * self.step) for height, width in scaled
        ]
        # Its own buckets of a small resolution can have a side of 0, at which its resize fails.
        return tuple(Size(height, width) for height, width in list(set(rounded)) if height and width)

    def nearest(self, image: Size) -> Size:
        """The bucket of the nearest height / width."""
        aspect = image.height / image.width
        return min(self.sizes, key=lambda size: abs(size.height / size.width - aspect))

    def resized(self, image: Size, bucket: Size, *, upscale: bool) -> Size:
        """Size that an image is resized to before its middle is cut out."""
        if image.height / image.width > bucket.height / bucket.width:
            return Size(round(image.height * (bucket.width / image.width)), bucket.width)
        return Size(bucket.height, round(image.width * (bucket.height / image.height)))


class OneTrainer(trainer.Trainer):
    """See :class:`~latentcache.geometry.like.trainer.Trainer`."""

    name = "onetrainer"
    table = OneTrainerTable
    batch_setting = "batch_size"
    squares = ("resolutions",)
    carries_accumulation = True
    draws_resolution = True

    def read(self, path: Path, value: Any) -> trainer.TrainerSettings:
        """See ``Trainer``."""
        config = read_config(path, value)
        values, step = config.values, config.step
        text = str(values.get("resolution", "512"))
        has_buckets = bool(values.get("aspect_ratio_bucketing", True))
        options: dict[str, Any] = {"bucket_step": step}
        if "x" in text and "," not in text and has_buckets:
            width, height = (round(int(side) / step) * step for side in text.split("x"))
            options["buckets"] = (Size(height, width),)
        else:
            sides = [square(int(side)) for side in text.split(",")]
            options |= trainer.size_options(sides, has_buckets=has_buckets)
        flips = ("enable_random_flip", "enable_fixed_flip")
        images = [concept.get("image", {}) for concept in config.concepts]
        options["flip"] = any(image.get(name) for image in images for name in flips) or None
        defaults = {"resolution": "512", "aspect_ratio_bucketing": True, "model_type": "STABLE_DIFFUSION_15"}
        words = [trainer.shown(name, values, default) for name, default in defaults.items()]
        words += [f"sides are multiples of {step}"]
        words += [f"{config.missing} is not there: no concept was read"] if config.missing else []
        return trainer.TrainerSettings(
            words=", ".join(words),
            options=options,
            no_latents=_forbids_pixels(config),
            no_text=_forbids_text(config),
            needs_masks=bool(values.get("masked_training")),
            needs_controls=config.is_inpainting,
            batch=config.batch,
        )

    def batches(self, samples: int, batch: int, ranks: int) -> tuple[int, int, int]:
        """See ``Trainer``: drops samples that do not fill a batch on every rank."""
        rounds = samples // (batch * ranks)
        return rounds * ranks, 0, samples - rounds * ranks * batch

    def steps(self, batches: int, ranks: int, accum: int) -> int:
        """See ``Trainer``: steps of the first epoch, because accumulation goes on into the next."""
        return batches // ranks // accum


class TrainingConfig(Value):
    """OneTrainer's settings, as far as a cache depends on them."""

    values: Mapping[str, Any]
    """Settings of the file; missing ones have their defaults."""
    concepts: Sequence[Mapping[str, Any]]
    """Concepts that are enabled and not for validation."""
    missing: str = ""
    """Name of the concepts file, if it is missing."""

    @property
    def model(self) -> str:
        """Type of the model."""
        return str(self.values.get("model_type", "STABLE_DIFFUSION_15"))

    @property
    def is_inpainting(self) -> bool:
        """True for a model that takes a mask and a conditioning image."""
        return self.model.endswith("INPAINTING")

    @property
    def batch(self) -> int:
        """Images of a batch on each rank."""
        return int(self.values.get("batch_size", 1))

    @property
    def step(self) -> int:
        """Pixels that every side is a multiple of."""
        return next((step for start, step in _STEPS.items() if self.model.startswith(start)), 64)


def read_config(path: Path, values: Any) -> TrainingConfig:
    """The settings in the contents of a file, and its concepts; raises UsageError and ValueError."""
    if not isinstance(values, dict) or not values.keys() & _KNOWN:
        problem = f"{path}: OneTrainer saves no such file"
        fix = "give the JSON file that OneTrainer saves"
        raise UsageError(problem, where=str(path), fix=fix)
    concepts = values.get("concepts")
    missing = ""
    if concepts is None:
        name = Path(str(values.get("concept_file_name", "training_concepts/concepts.json")))
        file = trainer.file_near(path, name)
        concepts, missing = ([], str(name)) if file is None else (trainer.read_file(file), "")
    enabled = [
        concept for concept in concepts if concept.get("enabled", True) and concept.get("type") != "VALIDATION"
    ]
    config = TrainingConfig(values=values, concepts=enabled, missing=missing)
    if config.batch < 1:
        raise ValueError(f"batch_size is {config.batch}")
    return config


def _forbids_pixels(config: TrainingConfig) -> tuple[str, ...]:
    """Settings that make it train on other pixels than the cache has."""
    reasons = [] if config.values.get("latent_caching", True) else ["latent_caching = false"]
    if config.is_inpainting and not config.values.get("custom_conditioning_image"):
        reasons.append("custom_conditioning_image = false: it then encodes each image with its mask once more")
    if any(word in config.model for word in _MORE_INPUTS):
        reasons.append(f"model_type = {config.model}: it caches further images, which no export holds")
    for concept in config.concepts:
        reasons += trainer.refused(concept.get("image", {}), PIXELS, f"concept {_name(concept)}: ")
    return tuple(reasons)


def _forbids_text(config: TrainingConfig) -> tuple[str, ...]:
    """Settings that make it encode text while it trains, or another text than the caption."""
    values = config.values
    reasons = list[str]()
    for part in ("text_encoder", "text_encoder_2", "text_encoder_3")[: _encoders(config.model)]:
        reasons += trainer.refused(values.get(part, {}), {"train": True}, f"{part}.")
        reasons += trainer.refused(values, {f"{part}_layer_skip": 0})
    embeddings = values.get("additional_embeddings", [])
    if values.get("training_method") == "EMBEDDING" or any(entry.get("train", True) for entry in embeddings):
        reasons.append("embeddings are trained")
    for concept in config.concepts:
        label = f"concept {_name(concept)}: "
        reasons += trainer.refused(concept.get("text", {}), dict.fromkeys(_DRAWN_TEXT, False), label)
        if (source := concept.get("text", {}).get("prompt_source", "sample")) != "sample":
            reasons.append(f"{label}prompt_source = {source}")
    return tuple(reasons)


def _encoders(model: str) -> int:
    """Number of text encoders that a model type can train."""
    if model in ("STABLE_DIFFUSION_3", "STABLE_DIFFUSION_35"):
        return 3
    return 2 if model.startswith(("STABLE_DIFFUSION_XL", "FLUX_DEV", "FLUX_FILL")) else 1


def _name(concept: Mapping[str, Any]) -> str:
    return str(concept.get("name") or concept.get("path", ""))
