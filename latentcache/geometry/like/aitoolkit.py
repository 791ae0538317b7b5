"""Buckets of ai-toolkit.

Rules (ostris/ai-toolkit 27a03a9): ``get_bucket_for_image_size`` of ``toolkit/buckets.py`` and ``setup_buckets`` of
``toolkit/dataloader_mixins.py``. Settings are read from the file of a job, YAML or JSON; names and defaults are those
of ``toolkit/config_modules.py``.

There is no list of buckets. The size of each image is rounded to the step of the model, so images of many sizes have
many buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from latentcache.geometry.like import trainer
from latentcache.geometry.sizes import Size, square

#: ``arch`` of a model -> step of its sides (``get_bucket_divisibility``), if it is not 16.
_STEPS = {"sd3": 32, "flux": 32, "flex1": 32, "flex2": 32, "chroma": 32, "qwen_image": 32, "wan22_5b": 32}
#: Models by the flags of older settings.
_FLAGS = {"is_v2": "sd2", "is_v3": "sd3", "is_xl": "sdxl", "is_pixart_sigma": "pixart_sigma", "is_pixart": "pixart",
          "is_auraflow": "auraflow", "is_flux": "flux", "is_lumina2": "lumina2"}  # fmt: skip
#: Settings of a data set that forbid cached latents, and those that forbid cached text.
_NO_LATENTS = ("random_crop", "random_scale", "flip_y", "augments", "augmentations", "standardize_images",
               "cache_tensors_to_disk", "auto_frame_count")  # fmt: skip
_NO_TEXT = ("shuffle_tokens", "token_dropout_rate", "random_triggers", "diff_output_preservation")


class Job(NamedTuple):
    """The parts of a training job that a cache depends on."""

    datasets: Sequence[Mapping[str, Any]]
    """Each with the trigger word of the job, unless it has its own."""
    train: Mapping[str, Any]
    arch: str


class AiToolkitTable(trainer.Table):
    """The buckets of one resolution. No bucket has a larger area than its square; the model decides the step."""

    title: ClassVar[str] = "ai-toolkit"
    without_buckets: ClassVar[str] = "square_crop = true"

    def nearest(self, image: Size) -> Size:
        """The bucket of an image: its size, shrunk to the area of the resolution and rounded."""
        if not self.buckets:
            return self.resolution
        area = min(image.area, self.resolution.area)
        scale = (area / image.area) ** 0.5
        across, down = image.width * scale / self.step, image.height * scale / self.step
        sides = product((math.floor(across), math.ceil(across)), (math.floor(down), math.ceil(down)))
        pairs = [(width * self.step, height * self.step) for width, height in sides if width and height]
        fitting = [pair for pair in pairs if math.prod(pair) <= self.resolution.area]
        smallest = (max(self.step, math.floor(side) * self.step) for side in (across, down))
        width, height = min(fitting or [(*smallest,)], key=lambda pair: abs(math.prod(pair) - area))
        return Size(height, width)

    def resized(self, image: Size, bucket: Size, *, upscale: bool) -> Size:
        """Size that an image is resized to before its middle is cut out."""
        scale = max(bucket.width / image.width, bucket.height / image.height)
        return Size(math.ceil(image.height * scale), math.ceil(image.width * scale))


class AiToolkit(trainer.Trainer):
    """See :class:`~latentcache.geometry.like.trainer.Trainer`."""

    name = "ai-toolkit"
    table = AiToolkitTable
    parts_sets = True
    batch_setting = "batch_size"
    squares = ("resolutions", "buckets")
    step = 16
    adds_flips = True
    repeats = True
    carries_accumulation = True

    def read(self, path: Path, value: Any) -> trainer.TrainerSettings:
        """See ``Trainer``."""
        job = read_job(value)
        trainer.check_alike(path, job.datasets, {"resolution": 512, "square_crop": False})
        first = job.datasets[0]
        step = step_of(job.arch)
        resolution = first.get("resolution", 512)
        sides = [square(int(side)) for side in (resolution if isinstance(resolution, list) else [resolution])]
        words = [trainer.shown("resolution", first, 512), trainer.shown("square_crop", first, False)]
        words += [f"sides are multiples of {step} ({job.arch})"]
        words += [f"trigger_word {word!r}" for word in sorted({*map(trigger_of, job.datasets)} - {""})]
        other = [f"scale = {dataset['scale']}" for dataset in job.datasets if dataset.get("scale", 1) != 1]
        other += ["num_frames: videos" for dataset in job.datasets if dataset.get("num_frames", 1) != 1]
        return trainer.TrainerSettings(
            words=", ".join(words),
            options={
                **trainer.size_options(sides, has_buckets=not first.get("square_crop")),
                "bucket_step": step,
                "flip": any(dataset.get("flip_x") for dataset in job.datasets) or None,
            },
            source=trainer.source_of(path),
            no_latents=trainer.refused_in(job.datasets, _NO_LATENTS) + tuple(other),
            no_text=trainer.refused_in(job.datasets, _NO_TEXT)
            + trainer.refused_in([job.train], ["train_text_encoder"]),
            batch=int(job.train.get("batch_size", 1)),
        )


def read_job(value: Mapping[str, Any]) -> Job:
    """Read a job; raises TypeError, KeyError or IndexError for another form."""
    process = value["config"]["process"][0]
    model = process.get("model", {})
    general = {"trigger_word": process.get("trigger_word")}
    arch = model.get("arch") or next((arch for flag, arch in _FLAGS.items() if model.get(flag)), "sd1")
    datasets = [general | dataset for dataset in process["datasets"]]
    return Job(datasets, process.get("train", {}), str(arch).partition(":")[0])


def is_job(value: Any) -> bool:
    """True for a job of ai-toolkit with data sets."""
    config = value.get("config") if isinstance(value, dict) else None
    processes = config.get("process") if isinstance(config, dict) else None
    return isinstance(processes, list) and any("datasets" in process for process in processes)


def step_of(arch: str) -> int:
    """Pixels that every side is a multiple of: ``get_bucket_divisibility`` of a model."""
    return _STEPS.get(arch, 16)


def trigger_of(dataset: Mapping[str, Any]) -> str:
    """The trigger word of a data set, or an empty string."""
    return str(dataset.get("trigger_word") or "")
