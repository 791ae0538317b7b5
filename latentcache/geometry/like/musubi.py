"""Buckets of kohya's musubi-tuner.

Rules (kohya-ss/musubi-tuner 30c658c): ``BucketSelector`` of ``src/musubi_tuner/dataset/bucket.py`` and
``resize_image_to_bucket`` of ``media_utils.py``. Settings are read from its data set configuration, a TOML or JSON
file. Names and defaults are those of ``config_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from latentcache.errors import RecipeError
from latentcache.geometry.like import trainer
from latentcache.geometry.sizes import Size, floor_to

#: Pixels that every side is a multiple of, for all models but HiDream-O1.
STEP = 16
#: Size settings of a data set, with their defaults.
_SIZES = {"resolution": [960, 544], "enable_bucket": False, "bucket_no_upscale": False}
#: Settings that make a sample of several images or frames.
_UNUSED = ("control_resolution", "no_resize_control", "multiple_target", "frame_stride", "frame_sample", "source_fps",
           "fp_1f_clean_indices")  # fmt: skip


class MusubiTable(trainer.Table):
    """The buckets of one resolution, whose area no bucket exceeds; ``buckets`` is ``enable_bucket``."""

    title: ClassVar[str] = "musubi-tuner"
    without_buckets: ClassVar[str] = "enable_bucket = false"
    step: int = STEP

    def __post_init__(self) -> None:
        if self.buckets and self.step != STEP:
            raise RecipeError(
                f"musubi-tuner rounds sides to {STEP} pixels",
                argument="bucket_step",
                value=self.step,
                fix=f"--bucket-step={STEP}",
            )
        if self.buckets and self.resolution.area < 4 * STEP * STEP:
            raise RecipeError(
                f"musubi-tuner has no buckets at {self.resolution}",
                argument="resolutions",
                value=max(self.resolution.height, self.resolution.width),
                fix="--resolution=256 or more",
            )

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """All buckets, in the trainer's order: by width, then by height."""
        if not self.buckets:
            return (self.resolution,)
        side = int(math.sqrt(self.resolution.area))
        pairs = set[tuple[int, int]]()
        for width in range(floor_to(side // 2, STEP), side + STEP, STEP):
            height = floor_to(self.resolution.area // width, STEP)
            pairs |= {(width, height), (height, width)}
        return tuple(Size(height, width) for width, height in sorted(pairs))

    def within(self, image: Size) -> Size | None:
        """The bucket of an image that must not be enlarged: its own size, rounded down; None: a side is too short."""
        if not self.buckets or image.area > self.resolution.area:
            return self.nearest(image)
        height, width = floor_to(image.height, STEP), floor_to(image.width, STEP)
        return Size(height, width) if height and width else None

    def resized(self, image: Size, bucket: Size, *, upscale: bool) -> Size:
        """Size that an image is resized to before its middle is cut out."""
        scale = max(bucket.width / image.width, bucket.height / image.height)
        return Size(int(image.height * scale + 0.5), int(image.width * scale + 0.5))


class Musubi(trainer.Trainer):
    """See :class:`~latentcache.geometry.like.trainer.Trainer`."""

    name = "musubi"
    table = MusubiTable
    parts_sets = True
    batch_setting = "batch_size"
    step = STEP
    has_videos = True

    def read(self, path: Path, value: Any) -> trainer.TrainerSettings:
        """See ``Trainer``."""
        datasets = [{**value.get("general", {}), **dataset} for dataset in value["datasets"]]
        trainer.check_alike(path, datasets, {"enable_bucket": False, "bucket_no_upscale": False})
        first = datasets[0]
        sides = tuple(dict.fromkeys(_resolution(dataset) for dataset in datasets))
        clips = [int(frames) for dataset in datasets for frames in dataset.get("target_frames", ())]
        frames = sorted({(clip - 1) // 4 * 4 + 1 for clip in clips})  # as the trainer rounds them
        words = [f"resolution [{side.width}, {side.height}]" for side in sides]
        words += [trainer.shown(name, first, default) for name, default in _SIZES.items() if name != "resolution"]
        words += [f"{name} is not used" for name in _UNUSED if any(dataset.get(name) for dataset in datasets)]
        return trainer.TrainerSettings(
            words=", ".join(words),
            options={
                **trainer.size_options(sides, has_buckets=bool(first.get("enable_bucket"))),
                "bucket_step": STEP,
                "upscale": not (first.get("enable_bucket") and first.get("bucket_no_upscale")),
                "frames": tuple(frames) or None,
            },
            source=trainer.source_of(path) | ({"videos": True} if frames else {}),
            no_latents=tuple(
                f"frame_extraction = {kind}"
                for kind in sorted({str(dataset.get("frame_extraction", "head")) for dataset in datasets} - {"head"})
            ),
            batch=int(first.get("batch_size", 1)),
        )


def is_musubi(value: Mapping[str, Any]) -> bool:
    """True for a data set configuration of musubi-tuner; sd-scripts has subsets instead of folders."""
    names = {"image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file"}
    datasets = value.get("datasets")
    return isinstance(datasets, list) and any(names & set(dataset) for dataset in datasets)


def _resolution(dataset: Mapping[str, Any]) -> Size:
    value = dataset.get("resolution", _SIZES["resolution"])
    width, height = value if isinstance(value, list) else (value, value)
    return Size(int(height), int(width))
