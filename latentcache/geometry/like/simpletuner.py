"""Buckets of SimpleTuner.

Rules (bghira/SimpleTuner bc8e6ab): ``calculate_new_size_by_pixel_area`` and ``..._by_pixel_edge`` of
``MultiaspectImage`` in ``helpers/multiaspect/image.py``, and ``TrainingSample.calculate_target_size`` of
``helpers/image_manipulation/training_sample.py``; batches as in ``helpers/metadata/backends``. Settings are read from
the list of data backends (``multidatabackend.json``), and from the ``config.json`` that names it.

SimpleTuner computes the bucket of the first image with a ratio of width to height, and takes it for every later image
with this ratio. It keeps this map in its output folder. So another order of files, or one more image, changes sizes.
Here a ratio always has the same size: the size that SimpleTuner computes for the image nearest to the ratio. An
export writes the map, so the trainer agrees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from latentcache.errors import RecipeError, UsageError
from latentcache.geometry.like import trainer
from latentcache.geometry.sizes import Size, square

#: Megapixels -> side of a square image near this number; other images have another rule.
_SQUARES = {0.25: 512, 0.5: 768, 1.0: 1024, 2.0: 1536, 4.0: 2048}
#: Hundredths of the largest ratio in the map; no model trains on longer images.
_LONGEST = 2000
#: Setting of a backend -> values that make it train on other pixels than the cache has.
_NO_LATENTS: Mapping[str, tuple[Any, ...]] = {
    "vae_cache_clear_each_epoch": (True,),
    "vae_cache_disable": (True,),
    "crop_aspect": ("random", "closest"),
    "crop_style": ("corner",),
}
#: Family -> step of its sides, which ``aspect_bucket_alignment`` does not change.
_ALIGNMENT = {**dict.fromkeys(("sd1x", "sd2x", "sdxl", "sd3", "flux", "sana", "hidream", "auraflow", "kolors"), 64),
              "flux2": 16}  # fmt: skip
#: Defaults of the command line.
_DEFAULTS = {"resolution": 1024, "resolution_type": "pixel_area"}
#: Settings that leave images out or resize them differently. A build ignores them and says so.
_UNUSED = ("minimum_image_size", "minimum_aspect_ratio", "maximum_aspect_ratio", "max_num_samples",
           "maximum_image_size", "target_downsample_size")  # fmt: skip


class SimpleTunerTable(trainer.Table):
    """The buckets of one square resolution: they have its area, or its side as their shorter side."""

    title: ClassVar[str] = "SimpleTuner"
    without_buckets: ClassVar[str] = "crop = true and crop_aspect = square"
    min_side: int | None = None
    """The resolution, if it is the shorter side of a bucket (``resolution_type = pixel``)."""

    def __post_init__(self) -> None:
        edge = self.min_side
        if edge and (not self.buckets or edge % self.step or self.resolution.width != edge):
            raise RecipeError(
                "SimpleTuner: the shortest side is the resolution itself (resolution_type = pixel)",
                argument="min_side",
                value=edge,
                why=f"it is a multiple of {self.step}, as all sides are",
                fix=f"--resolution={edge} --min-side={edge} --bucket-step=STEP; or leave --min-side out",
            )

    @property
    def by_edge(self) -> bool:
        """See ``Table``."""
        return bool(self.min_side)

    @property
    def megapixels(self) -> float:
        """As SimpleTuner converts ``resolution_type = pixel_area``."""
        return self.resolution.width * self.resolution.width / 1000**2

    @cached_property
    def square(self) -> Size:
        """The bucket of square images."""
        near = [side for megapixels, side in _SQUARES.items() if abs(self.megapixels - megapixels) < 0.05]
        side = self._rounded(near[0] if near else math.sqrt(self.megapixels * 1e6))
        return Size(side, side)

    @cached_property
    def size_of_ratio(self) -> Mapping[float, Size]:
        """Ratio of width to height -> the size of its bucket."""
        nearest = dict[float, tuple[float, Size]]()
        for hundredths in range(1, _LONGEST):
            size = self._computed(hundredths / 100)
            ratio = _ratio(size)
            distance = abs(hundredths / 100 - ratio)
            if ratio not in nearest or distance < nearest[ratio][0]:
                nearest[ratio] = distance, size
        return {ratio: size for ratio, (_, size) in nearest.items()} | {1.0: self.square}

    def nearest(self, image: Size) -> Size:
        """The bucket of an image."""
        if not self.buckets:
            return self.square
        if self.by_edge:
            side = self.resolution.width
            ratio = _ratio(image)
            is_tall = image.width < image.height
            width, height = (side, int(side / ratio)) if is_tall else (int(side * ratio), side)
            return Size(self._rounded(height), self._rounded(width))
        size = self._computed(_ratio(image))
        return self.size_of_ratio.get(_ratio(size), size)

    def resized(self, image: Size, bucket: Size, *, upscale: bool) -> Size:
        """Size that an image is resized to before its middle is cut out: the intermediary size.

        Where SimpleTuner's own is smaller than the bucket, and so leaves black bars, this one covers it.
        """
        ratio = image.width / image.height
        if self.by_edge:
            height = bucket.height
            width = int(bucket.height * ratio)
            if ratio < 1:
                width = bucket.width
                height = int(bucket.width / ratio)
            if width < bucket.width:
                width = bucket.width
                height = int(bucket.width / ratio)
            elif height < bucket.height:
                height = bucket.height
                width = int(bucket.height * ratio)
            return Size(height, width)
        target = self._computed(_ratio(image)) if self.buckets else self.square
        if target.width < target.height:
            width = target.width
            height = int(target.width / ratio)
        else:
            width = int(target.height * ratio)
            height = target.height
        if bucket.width > width:
            height += int((bucket.width - width) / ratio)
            width = bucket.width
        elif bucket.height > height:
            width += int((bucket.height - height) * ratio)
            height = bucket.height
        return Size(max(height, bucket.height), max(width, bucket.width))

    def _computed(self, ratio: float) -> Size:
        """The size of the first image of a ratio."""
        edge = self._rounded(int(math.sqrt(self.megapixels * 1e6)))
        root = math.sqrt(max(ratio, 0.01))
        return Size(self._rounded(edge / root), self._rounded(edge * root))

    def _rounded(self, side: float) -> int:
        return max(round(side / self.step) * self.step, self.step)


class SimpleTuner(trainer.Trainer):
    """See :class:`~latentcache.geometry.like.trainer.Trainer`."""

    name = "simpletuner"
    table = SimpleTunerTable
    parts_sets = True
    limits = ("min_side",)
    squares = ("resolutions", "buckets")

    def read(self, path: Path, value: Any) -> trainer.TrainerSettings:
        """See ``Trainer``."""
        general, listed, backend_path = _backends(path, value)
        backends = [
            {**_DEFAULTS, **general, **backend}
            for backend in listed
            if backend.get("dataset_type", "image") == "image" and not backend.get("disabled")
        ]
        if not backends:
            problem = f"{path}: has no backend of images"
            fix = "add a backend with dataset_type = image"
            raise UsageError(problem, where=str(path), fix=fix)
        words, options = _sizes(path, backends, general)
        batch = general.get("train_batch_size")
        rounding = int(general.get("aspect_bucket_rounding") or 2)
        no_latents = [
            f"{backend.get('id')}: {name} = {str(backend[name]).lower()}"
            for backend in backends
            for name, values in _NO_LATENTS.items()
            if backend.get(name) in values and (not name.startswith("crop") or backend.get("crop"))
        ]
        no_latents += [f"aspect_bucket_rounding = {rounding}"] if rounding != 2 else []
        return trainer.TrainerSettings(
            words=", ".join(words),
            options=options,
            source={"config": str(backend_path.resolve()), "layout": ""},
            no_latents=tuple(no_latents),
            no_text=tuple(
                f"{backend.get('id')}: caption_shuffle.enable = true"
                for backend in backends
                if backend.get("caption_shuffle", {}).get("enable")
            ),
            batch=None if batch is None else int(batch),
        )

    def batches(self, samples: int, batch: int, ranks: int) -> tuple[int, int, int]:
        """See ``Trainer``: drops a bucket without a full batch for each rank; else the last batch is smaller."""
        of_rank = -(-samples // ranks)
        if of_rank < batch:
            return 0, 0, samples
        batches = -(-of_rank // batch) * ranks
        return batches, batches * batch - samples, 0

    def least(self, batch: int, ranks: int, accum: int) -> int:
        """See ``Trainer``: ``split_buckets_between_processes`` raises an error for smaller ones."""
        return batch * ranks * accum


def _ratio(size: Size) -> float:
    """Width / height as SimpleTuner rounds it."""
    return round(size.width / size.height, 2)


def _backends(path: Path, value: Any) -> tuple[Mapping[str, Any], list[Mapping[str, Any]], Path]:
    """General settings, the image backends, and the file that lists them."""
    if isinstance(value, list):
        return {}, value, path
    general = {str(name).removeprefix("--"): entry for name, entry in value.items()}
    name = Path(str(general.get("data_backend_config", "config/multidatabackend.json")))
    file = trainer.file_near(path, name)
    if file is None:
        problem = f"{path}: {name} is not there"
        fix = "give multidatabackend.json itself"
        raise UsageError(problem, where=str(path), why="it is looked for here and in the folders above", fix=fix)
    return general, trainer.read_file(file), file


def _sizes(
    path: Path, backends: Sequence[Mapping[str, Any]], general: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Size settings for the user to read, and as options of ``build``."""
    squares = [backend.get("crop") and backend.get("crop_aspect", "square") == "square" for backend in backends]
    edges = [backend["resolution_type"] == "pixel" for backend in backends]
    sides = tuple(dict.fromkeys(map(_side, backends)))
    is_square = any(squares)
    by_edge = any(edges) and not is_square
    if is_square and not all(squares):
        raise trainer.several(path, "crop_aspect")
    if by_edge and (len(sides) > 1 or not all(edges)):
        raise trainer.several(path, "resolution or resolution_type")
    alignment = general.get("aspect_bucket_alignment")
    family = str(general.get("model_family"))
    step = _ALIGNMENT.get(family, int(alignment or 64))
    origin = f" (of {family})" if family in _ALIGNMENT else " (default)" if alignment is None else ""
    words = [f"resolution_type {'pixel' if by_edge else 'pixel_area'}, resolution {side}" for side in sides]
    words += ["crop_aspect square" if is_square else "crop false or preserve"]
    words += [f"aspect_bucket_alignment {step}{origin}"]
    words += [f"{name} is not used" for name in _UNUSED if any(backend.get(name) for backend in backends)]
    styles = [backend.get("crop") and backend.get("crop_style", "random") for backend in backends]
    words += ["crops are centered, crop_style is not used"] if {"random", "face"}.intersection(styles) else []
    options = {"bucket_step": step, **trainer.size_options(map(square, sides), has_buckets=not is_square)}
    return words, options | ({"min_side": sides[0]} if by_edge else {})


def _side(backend: Mapping[str, Any]) -> int:
    """Resolution of a backend as the side of a square, in pixels."""
    value = float(backend["resolution"])
    return int(math.sqrt(value * 1e6)) if backend["resolution_type"] == "area" else int(value)
