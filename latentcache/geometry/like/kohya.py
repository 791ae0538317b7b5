"""Buckets of kohya's sd-scripts, which lora-scripts uses too.

Rules (kohya-ss/sd-scripts 48d368f): ``make_bucket_resolutions`` of ``library/model_util.py``, and ``BucketManager``
and ``adjust_min_max_bucket_reso_by_steps`` of ``library/train_util.py``. The same in lora-scripts fdefba9,
``scripts/stable``. There sizes are (width, height); here they are ``Size``.

Settings are read from a data set configuration (``[[datasets]]`` and their subsets), and from a TOML file with the
options of its command line, as ``--config_file`` takes it and as lora-scripts saves it. Names and defaults are those
of ``library/config_util.py`` and ``library/train_util.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from latentcache.errors import RecipeError, UsageError
from latentcache.geometry.like import trainer
from latentcache.geometry.sizes import Size

#: Defaults of ``min_bucket_reso``, ``max_bucket_reso`` and ``bucket_reso_steps``, in pixels.
MIN_SIDE, MAX_SIDE, STEP = 256, 1024, 64
#: Settings that forbid cached latents, and settings that forbid cached text.
_NO_LATENTS = ("random_crop", "color_aug", "face_crop_aug_range")
_NO_TEXT = ("shuffle_caption", "caption_dropout_rate", "caption_tag_dropout_rate", "caption_dropout_every_n_epochs",
            "token_warmup_step", "enable_wildcard")  # fmt: skip
#: Name in sd-scripts -> its default.
_SIZES = {
    "enable_bucket": False,
    "min_bucket_reso": MIN_SIDE,
    "max_bucket_reso": MAX_SIDE,
    "bucket_reso_steps": STEP,
    "bucket_no_upscale": False,
}
_CAPTIONS = {"caption_extension": ".caption", "caption_prefix": "", "caption_suffix": ""}
#: Options that name images; a build reads the images of DATA instead.
_OF_DATA = ("train_data_dir", "reg_data_dir", "in_json", "conditioning_data_dir")


class KohyaTable(trainer.Table):
    """The buckets of one resolution, whose area no bucket exceeds; ``buckets`` is ``enable_bucket``."""

    title: ClassVar[str] = "kohya"
    without_buckets: ClassVar[str] = "enable_bucket = false"
    min_side: int = MIN_SIDE
    max_side: int = MAX_SIDE

    def __post_init__(self) -> None:
        (low, high), (height, width) = self._limits, (self.resolution.height, self.resolution.width)
        if self.buckets and not (0 < low <= min(height, width) and max(height, width) <= high):
            raise RecipeError(
                f"kohya takes no resolution of {self.resolution}: sides are {low} to {high} pixels",
                argument="resolutions",
                value=max(height, width),
                why="min_bucket_reso and max_bucket_reso of its settings limit the resolution too",
                fix=f"set --min-side ({self.step} or more) and --max-side around it",
            )

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """All buckets, in the trainer's order: by width, then by height."""
        if not self.buckets:
            return (self.resolution,)
        low, high = self._limits
        area = self.resolution.area
        step = self.step
        square = int(math.sqrt(area) // step) * step
        pairs = {(square, square)}
        for width in range(low, high + 1, step):
            height = min(high, area // width // step * step)
            if height >= low:
                pairs |= {(width, height), (height, width)}
        return tuple(Size(height, width) for width, height in sorted(pairs))

    def nearest(self, image: Size) -> Size:
        """The bucket of an image that may be enlarged: of its own size, else of the nearest width / height."""
        if image in self.sizes:
            return image
        return super().nearest(image)

    def within(self, image: Size) -> Size | None:
        """The bucket of an image that must not be enlarged; None: it is smaller than a step."""
        if not self.buckets:
            return self.resolution if self.resolution.fits(image) else None
        resized = self._reduced(image)
        height, width = (side - side % self.step for side in (resized.height, resized.width))
        return Size(height, width) if height and width else None

    def resized(self, image: Size, bucket: Size, *, upscale: bool) -> Size:
        """Size that an image is resized to before its middle is cut out."""
        if not upscale and self.buckets:
            return self._reduced(image)
        is_wider = image.width / image.height > bucket.width / bucket.height
        scale = bucket.height / image.height if is_wider else bucket.width / image.width
        return Size(int(image.height * scale + 0.5), int(image.width * scale + 0.5))

    @property
    def words(self) -> str:
        """See ``Table``."""
        limits = f", min_bucket_reso {self.min_side}, max_bucket_reso {self.max_side}" if self.buckets else ""
        return f"{super().words}{limits}"

    @property
    def _limits(self) -> tuple[int, int]:
        """The shortest side rounded down to a step, the longest up."""
        return self.min_side // self.step * self.step, -(-self.max_side // self.step) * self.step

    def _reduced(self, image: Size) -> Size:
        """The size of an image after it is shrunk to the area of the resolution, with one side on the grid."""
        area = self.resolution.area
        if image.area <= area:
            return image
        aspect = image.width / image.height
        width = math.sqrt(area * aspect)
        across, down = self._rounded(width), self._rounded(area / width)
        by_width = across / (self._rounded(across / aspect) or 1)
        by_height = self._rounded(down * aspect) / (down or 1)
        if abs(by_width - aspect) < abs(by_height - aspect):
            return Size(max(int(across / aspect + 0.5), 1), max(across, 1))
        return Size(max(down, 1), max(int(down * aspect + 0.5), 1))

    def _rounded(self, side: float) -> int:
        pixels = int(side + 0.5)
        return pixels - pixels % self.step


def letterbox(image: Size, bucket: Size) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the image inside its bucket, as ``get_crop_ltrb`` gives them to SDXL."""
    aspect = image.width / image.height
    if bucket.width / bucket.height > aspect:
        width = bucket.height * aspect
        height = float(bucket.height)
    else:
        width = float(bucket.width)
        height = bucket.width / aspect
    left, top = (bucket.width - width) // 2, (bucket.height - height) // 2
    return left, top, left + width, top + height


class KohyaTrainer(trainer.Trainer):
    """sd-scripts and lora-scripts. See :class:`~latentcache.geometry.like.trainer.Trainer`."""

    name = "kohya"
    table = KohyaTable
    limits = ("min_side", "max_side")
    keeps_batch = True

    def read(self, path: Path, value: Any) -> trainer.TrainerSettings:
        """See ``Trainer``."""
        subsets = list(_subsets(value))
        names_sets = any("subsets" in dataset for dataset in value.get("datasets", ()))
        _check(path, subsets)
        resolutions = tuple(dict.fromkeys(_resolution(path, subset.get("resolution")) for subset in subsets))
        sides = " and ".join(f"{size.width}x{size.height}" for size in resolutions)
        words = [f"resolution {sides}"]
        for name, default in {**_SIZES, **_CAPTIONS, **({"num_repeats": 1} if names_sets else {})}.items():
            values = " and ".join(dict.fromkeys(str(subset.get(name, default)) for subset in subsets))
            is_given = any(name in subset for subset in subsets)
            words.append(trainer.shown(name, {name: values or "''"} if is_given else {}, values or "''"))
        source = trainer.source_of(path)
        first = subsets[0]
        if not names_sets:
            source = {"config": "", **_captions(first)}
            lines = source["caption_lines"]
            words.append("each line is a caption" if lines == "all" else "the first line of a file is its caption")
            unread = [name for name in _OF_DATA if first.get(name)]
            words += [f"not read: {', '.join(unread)}, DATA has the images"] if unread else []
        flips = any(subset.get("flip_aug") for subset in subsets)
        trained = any(subset.get("network_train_unet_only") is False for subset in subsets)
        return trainer.TrainerSettings(
            words=", ".join(words),
            options=_options(resolutions, first) | {"flip": flips or None},
            source=source,
            no_latents=trainer.refused_in(subsets, _NO_LATENTS),
            # The text encoder of a LoRA is trained unless only the U-Net is.
            no_text=trainer.refused_in(subsets, _NO_TEXT) + (("network_train_unet_only = false",) if trained else ()),
            needs_masks=any(subset.get("alpha_mask") for subset in subsets),
            batch=int(first.get("train_batch_size", first.get("batch_size", 1))),
        )

    def changes(self, tables: Sequence[KohyaTable]) -> Iterator[tuple[str, Sequence[KohyaTable]]]:
        """See ``Trainer``: a coarser step, narrower limits."""
        with_buckets = [table for table in tables if table.buckets]
        if not with_buckets:
            return
        first = with_buckets[0]
        sides = [side for table in with_buckets for side in (table.resolution.height, table.resolution.width)]
        changes = [("bucket_reso_steps", "step", side) for side in (first.step * 2, first.step * 4)]
        changes += [("min_bucket_reso", "min_side", side) for side in range(first.min_side, min(sides), first.step)]
        changes += [("max_bucket_reso", "max_side", side) for side in range(max(sides), first.max_side, first.step)]
        for name, attribute, side in changes:
            changed: dict[str, Any] = {attribute: side}
            try:
                narrower = [replace(table, **changed) for table in with_buckets]
            except RecipeError:  # limits that the trainer does not take
                continue
            yield f"{name} = {side}", narrower


def _subsets(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Each subset with the settings of its data set and the general ones; a file of options is one subset."""
    if "datasets" not in value:
        plain = {name: entry for name, entry in value.items() if not isinstance(entry, dict)}
        for section in value.values():
            plain |= section if isinstance(section, dict) else {}
        yield plain
        return
    for dataset in value["datasets"]:
        for subset in dataset.get("subsets") or [{}]:
            yield {**value.get("general", {}), **dataset, **subset}


def _check(path: Path, subsets: Sequence[Mapping[str, Any]]) -> None:
    """Raise a UsageError for settings that one cache cannot follow."""
    if named := [subset["dataset_config"] for subset in subsets if subset.get("dataset_config")]:
        problem, fix = f"{path}: has its data sets in another file", f"--trainer-config {named[0]}"
        raise UsageError(problem, where=str(path), fix=fix)
    folders = dict[str, set[str]]()
    for subset in subsets:
        parts = [str(subset.get(name)) for name in ("image_dir", "metadata_file", "num_repeats", "is_reg")]
        folders.setdefault(str(subset.get("resolution")), set()).add(" ".join(parts))
    trainer.check_alike(path, subsets, _SIZES)
    if len({frozenset(names) for names in folders.values()}) > 1:
        raise trainer.several(path, "image_dir or num_repeats at their resolutions")


def _captions(settings: Mapping[str, Any]) -> dict[str, str]:
    """Options of DATA for the captions, as ``process_caption`` makes them, and for masks."""
    prefix, suffix = settings.get("caption_prefix"), settings.get("caption_suffix")
    return {
        "caption_ext": str(settings.get("caption_extension") or _CAPTIONS["caption_extension"]),
        "caption_prefix": f"{prefix} " if prefix else "",
        "caption_suffix": f" {suffix}" if suffix else "",
        "caption_lines": "all" if settings.get("enable_wildcard") else "first",
        **({"masks": "alpha"} if settings.get("alpha_mask") else {}),
    }


def _options(resolutions: tuple[Size, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``build`` for the sizes."""
    sizes = {name: type(default)(settings.get(name, default)) for name, default in _SIZES.items()}
    options = trainer.size_options(resolutions, has_buckets=bool(sizes["enable_bucket"]))
    if sizes["enable_bucket"]:
        options |= {"min_side": sizes["min_bucket_reso"], "max_side": sizes["max_bucket_reso"]}
        options |= {"bucket_step": sizes["bucket_reso_steps"], "upscale": not sizes["bucket_no_upscale"]}
    return options


def _resolution(path: Path, value: Any) -> Size:
    sides = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    if value is None or not 1 <= len(sides) <= 2:
        fix = "add resolution = 1024, as the trainer needs it"
        raise UsageError(f"{path}: has no resolution", where=str(path), fix=fix)
    width, height = int(sides[0]), int(sides[-1])
    return Size(height, width)
