"""Settings of a trainer: the sizes that it trains on, and what its other settings make impossible.

Read are a data set configuration of sd-scripts (``[[datasets]]`` and their subsets), and a TOML file with its command
line's options, as ``--config_file`` takes it and as lora-scripts saves it. Names and defaults are those of sd-scripts
48d368f, ``library/config_util.py`` and ``library/train_util.py``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from latentcache.errors import UsageError
from latentcache.geometry.like.kohya import MAX_SIDE, MIN_SIDE, STEP
from latentcache.geometry.sizes import Size
from latentcache.value import Value

#: Settings with which sd-scripts takes no cached latents, and no cached text.
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


class TrainerSettings(Value):
    """What a configuration says."""

    resolutions: tuple[Size, ...]
    enable_bucket: bool
    min_bucket_reso: int
    max_bucket_reso: int
    bucket_reso_steps: int
    bucket_no_upscale: bool
    flip_aug: bool
    defaults: tuple[str, ...]
    """Settings of sizes that it does not have."""
    no_latents: tuple[str, ...]
    """Settings, with their values, that forbid cached latents."""
    no_text: tuple[str, ...]
    """Settings, with their values, that forbid cached text."""

    @property
    def words(self) -> str:
        """The sizes, with the trainer's names, and which are its defaults."""
        sizes = {name: value for name, value in asdict(self).items() if name in _SIZES}
        resolutions = " and ".join(f"{size.width}x{size.height}" for size in self.resolutions)
        return ", ".join(
            [f"resolution {resolutions}"]
            + [f"{name} {value}{' (default)' if name in self.defaults else ''}" for name, value in sizes.items()]
        )


def read_settings(path: Path) -> TrainerSettings:
    """The settings of a file; raises UsageError with the line or the name of what is wrong."""
    try:
        value = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", where=str(path), fix="give the trainer's TOML file") from error
    except ValueError as error:
        raise UsageError(f"{path} is no TOML file", where=str(path), why=str(error), fix="mend this line") from error
    try:
        return _settings(path, list(_subsets(value)))
    except (TypeError, ValueError, AttributeError) as error:
        fix = "give it as sd-scripts reads it, for example resolution = 1024"
        raise UsageError(f"{path}: a setting has another form", where=str(path), why=str(error), fix=fix) from error


def _subsets(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings of each subset, with those of its data set and the general ones; sections of options are one."""
    if "datasets" not in value:
        plain = {name: entry for name, entry in value.items() if not isinstance(entry, dict)}
        for section in value.values():
            plain |= section if isinstance(section, dict) else {}
        yield plain
        return
    for dataset in value["datasets"]:
        for subset in dataset.get("subsets") or [{}]:
            yield {**value.get("general", {}), **dataset, **subset}


def _settings(path: Path, subsets: list[Mapping[str, Any]]) -> TrainerSettings:
    resolutions = dict.fromkeys(_resolution(path, subset.get("resolution")) for subset in subsets)
    sizes = dict[str, Any]()
    for name, default in _SIZES.items():
        values = {subset.get(name, default) for subset in subsets}
        if len(values) > 1:
            raise UsageError(
                f"{path}: data sets have several values of {name}: {', '.join(map(str, values))}",
                where=str(path),
                why="a cache has one table of sizes",
                fix="build one cache for each, with a configuration of its own",
            )
        sizes[name] = type(default)(values.pop())
    return TrainerSettings(
        resolutions=tuple(resolutions),
        **sizes,
        flip_aug=any(subset.get("flip_aug") for subset in subsets),
        defaults=tuple(name for name in _SIZES if all(name not in subset for subset in subsets)),
        no_latents=_set(subsets, _NO_LATENTS),
        no_text=_set(subsets, _NO_TEXT) + _trained_text(subsets),
    )


def _resolution(path: Path, value: Any) -> Size:
    sides = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    if value is None or not 1 <= len(sides) <= 2:
        fix = "add resolution = 1024, as the trainer needs it"
        raise UsageError(f"{path}: has no resolution", where=str(path), fix=fix)
    width, height = int(sides[0]), int(sides[-1])
    return Size(height, width)


def _set(subsets: list[Mapping[str, Any]], names: tuple[str, ...]) -> tuple[str, ...]:
    found = {name: subset[name] for subset in subsets for name in names if subset.get(name)}
    return tuple(f"{name} = {str(value).lower()}" for name, value in found.items())


def _trained_text(subsets: list[Mapping[str, Any]]) -> tuple[str, ...]:
    """The text encoder of a LoRA is trained unless only the U-Net is."""
    trained = any(subset.get("network_train_unet_only") is False for subset in subsets)
    return ("network_train_unet_only = false",) if trained else ()
