"""Buckets, settings file and batch counts that each trainer has. One module beside this one for each trainer."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, ClassVar

from latentcache.errors import RecipeError, UsageError
from latentcache.geometry.sizes import Size, square
from latentcache.value import Value


class Table(Value):
    """The buckets of one resolution."""

    title: ClassVar[str]
    """The trainer."""
    without_buckets: ClassVar[str] = ""
    """Its setting for one size of all images."""
    resolution: Size
    """Pixels: the only bucket if buckets are off, else each has about its area, or its side."""
    step: int = 64
    """Pixels that every side is a multiple of."""
    buckets: bool = True
    """False: all images have one size."""

    @property
    def by_edge(self) -> bool:
        """True: the resolution is the shorter side of a bucket, and decides how an image is resized."""
        return False

    @property
    def sizes(self) -> Sequence[Size]:
        """All buckets, in the trainer's order."""
        raise NotImplementedError

    def nearest(self, image: Size) -> Size:
        """The bucket of an image that may be enlarged: that of the nearest width / height."""
        aspect = image.width / image.height
        return min(self.sizes, key=lambda size: abs(size.width / size.height - aspect))

    def within(self, image: Size) -> Size | None:
        """The bucket of an image that must not be enlarged; None: it is too small. Raises RecipeError."""
        raise RecipeError(
            f"{self.title} enlarges images that are smaller than their bucket",
            argument="upscale",
            value="False",
            fix="leave --no-upscale out; --min-pixels=N rejects small images",
        )

    def resized(self, image: Size, bucket: Size, *, upscale: bool) -> Size:
        """Size that an image is resized to before its middle is cut out."""
        raise NotImplementedError

    @property
    def words(self) -> str:
        """Its sizes, for the output of ``plan``."""
        kind = " (shorter side)" if self.by_edge else ""
        grid = f"sides are multiples of {self.step}" if self.buckets else self.without_buckets
        return f"resolution {self.resolution}{kind}, {grid}"


class TrainerSettings(Value):
    """The contents of a trainer's settings file."""

    words: str
    """Its settings by the trainer's names: used ones, those that are defaults, and those that no cache follows."""
    options: Mapping[str, Any]
    """The settings as options of ``build``: ``resolutions``, ``buckets``, ``min_side``, ``flip``, ..."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """The settings as options of DATA, as JSON: ``config``, ``caption_ext``, ..."""
    no_latents: tuple[str, ...] = ()
    """Settings, with their values, that forbid cached latents."""
    no_text: tuple[str, ...] = ()
    """Settings, with their values, that forbid cached text."""
    needs_masks: bool = False
    """True: the trainer needs a mask for each image."""
    needs_controls: bool = False
    """True: the trainer needs latents of a conditioning image for each image."""
    batch: int | None = None
    """Images of a batch on each rank; None: the file does not set it."""


class Trainer:
    """One trainer, as ``build --like`` and ``plan --for`` name it."""

    name: str
    table: type[Table]
    limits: Sequence[str] = ()
    """Subset of ``min_side`` and ``max_side``: limits that it has settings for."""
    squares: Sequence[str] = ()
    """Subset of ``resolutions`` and ``buckets``: sizes that are one number in its settings."""
    step: int | None = None
    """Default of ``bucket_step`` in pixels; None: the default of every build."""
    has_videos: bool = False
    parts_sets: bool = False
    """True: no batch mixes images with different repeats, or regularization images with others."""
    batch_setting: str = "train_batch_size"
    """Name of the setting of its batch size."""
    keeps_batch: bool = False
    """True: ``--suggest`` never halves the batch size, because every batch would be small."""
    adds_flips: bool = False
    """True: an epoch has each image and its flip; False: one of both is drawn."""
    draws_resolution: bool = False
    """True: an epoch draws one of several resolutions for an image; False: it has all of them."""
    repeats: bool = False
    """True: samples of the bucket fill its last batch again; False: that batch is smaller."""
    carries_accumulation: bool = False
    """True: gradients accumulate over the end of an epoch."""

    def tables(
        self,
        *,
        resolutions: Sequence[int | Size] = (),
        buckets: Sequence[Size] = (),
        step: int,
        min_side: int | None = None,
        max_side: int | None = None,
    ) -> Sequence[Table]:
        """Its buckets, for each resolution in pixels, or for each size that all images have (``buckets``).

        ``step``: pixels that every side is a multiple of. Raises RecipeError for sizes that it does not take.
        """
        title = self.table.title
        options = dict[str, Any]()
        for limit, side, kind in (("min_side", min_side, "shortest"), ("max_side", max_side, "longest")):
            if side and limit not in self.limits:
                problem = f"{title} has no {kind} side of a bucket"
                raise RecipeError(problem, argument=limit, value=side, fix="leave it out")
            options |= {limit: side} if side else {}
        name, sizes = ("buckets", buckets) if buckets else ("resolutions", resolutions)
        sides = [square(size) for size in sizes]
        oblong = next((side for side in sides if side.height != side.width), None)
        if oblong is not None and name in self.squares:
            bucket = "" if "buckets" in self.squares else f", or --bucket={oblong}"
            raise RecipeError(
                f"{title} has one number as a resolution",
                argument=name,
                value=str(oblong),
                fix=f"--resolution=PIXELS{bucket}",
            )
        return [self.table(resolution=side, step=step, buckets=not buckets, **options) for side in sides]

    def settings(self, path: Path) -> TrainerSettings:
        """Read a settings file; raises UsageError with the wrong line or setting."""
        try:
            return self.read(path, read_file(path))
        except UsageError:
            raise
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            problem, fix = f"{path}: a setting has another form", f"give the file as {self.name} reads it"
            raise UsageError(problem, where=str(path), why=str(error), fix=fix) from error

    def read(self, path: Path, value: Any) -> TrainerSettings:
        """Read the parsed contents of a settings file."""
        raise NotImplementedError

    def batches(self, samples: int, batch: int, ranks: int) -> tuple[int, int, int]:
        """Batches of one bucket in an epoch, samples that its last batch lacks, and samples that are dropped.

        Unless a trainer says otherwise, the last batch is smaller and nothing is dropped.
        """
        batches = -(-samples // batch)
        return batches, batches * batch - samples, 0

    def fits(self, image: Size, bucket: Size) -> bool:
        """False for an image that the trainer leaves out because its bucket cuts off too much."""
        return True

    def steps(self, batches: int, ranks: int, accum: int) -> int:
        """Optimizer steps of an epoch, for the batches of all ranks; the last one may have fewer."""
        return -(-batches // (ranks * accum))

    def least(self, batch: int, ranks: int, accum: int) -> int:
        """Samples that each bucket needs so that the trainer starts; 0: any number will do."""
        return 0

    def changes(self, tables: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
        """Yield each size setting that ``--suggest`` can change, and the tables with this change."""
        yield self.table.without_buckets, [replace(table, buckets=False) for table in tables]


def shown(name: str, values: Mapping[str, Any], default: Any) -> str:
    """A setting with its value, for ``TrainerSettings.words``."""
    return f"{name} {values[name]}" if name in values else f"{name} {default} (default)"


def size_options(sides: Iterable[Size], *, has_buckets: bool) -> dict[str, Any]:
    """Options of ``build`` for resolutions, each once; without buckets each is the size of all images."""
    sizes = tuple(dict.fromkeys(sides))
    if not has_buckets:
        return {"buckets": sizes}
    return {"resolutions": tuple(size.height if size.height == size.width else size for size in sizes)}


def source_of(path: Path) -> dict[str, Any]:
    """Options of DATA for a file that names the folders of images."""
    return {"config": str(path.resolve()), "config_folder": str(Path.cwd()), "layout": ""}


def refused(values: Mapping[str, Any], names: Mapping[str, Any], label: str = "") -> tuple[str, ...]:
    """Settings that forbid a cache, with their values; ``names``: setting -> its default."""
    return tuple(
        f"{label}{name} = {str(values.get(name, default)).lower()}"
        for name, default in names.items()
        if values.get(name, default)
    )


def check_alike(path: Path, sets: Sequence[Mapping[str, Any]], names: Mapping[str, Any]) -> None:
    """Raise a UsageError if sets of images differ in one of these settings; ``names``: setting -> its default."""
    for name, default in names.items():
        if len({str(values.get(name, default)) for values in sets}) > 1:
            raise several(path, name)


def several(path: Path, setting: str) -> UsageError:
    """The error for a setting with several values, of which a cache follows one."""
    return UsageError(
        f"{path}: data sets have several values of {setting}",
        where=str(path),
        why="a cache has one table of sizes, and every image at all resolutions",
        fix="build one cache for each, with a configuration of its own",
    )


def refused_in(sets: Iterable[Mapping[str, Any]], names: Sequence[str]) -> tuple[str, ...]:
    """Settings that forbid a cache and are on in any of the sets, each once."""
    return tuple(dict.fromkeys(word for values in sets for word in refused(values, dict.fromkeys(names, False))))


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


#: Ending of a file -> its kind and its parser; other files are JSON.
_PARSERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    ".toml": ("TOML", tomllib.loads),
    ".yaml": ("YAML", _yaml),
    ".yml": ("YAML", _yaml),
}


def read_file(path: Path) -> Any:
    """Contents of a trainer's TOML, YAML or JSON file, by its ending; raises UsageError with the line."""
    kind, parse = _PARSERS.get(path.suffix, ("JSON", json.loads))
    try:
        return parse(path.read_text("utf-8"))
    except OSError as error:
        problem = f"{path}: {error.strerror}"
        fix = "give the settings file of the trainer"
        raise UsageError(problem, where=str(path), fix=fix) from error
    except ValueError as error:
        raise UsageError(
            f"{path} is no {kind} file", where=str(path), why=str(error), fix="mend this line"
        ) from error


def file_near(path: Path, name: Path) -> Path | None:
    """Find a file that the settings file ``path`` names: beside it, in a folder above, or where the command runs."""
    files = [folder / name for folder in (path.parent, *path.absolute().parents, Path.cwd())]
    return next((file for file in files if file.is_file()), None)
