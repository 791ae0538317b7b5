"""What each trainer has: its buckets, its settings file, and how it counts batches. One module for each of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol

from latentcache.errors import RecipeError, UsageError
from latentcache.geometry.sizes import Size
from latentcache.value import Value


class Table(Protocol):
    """The buckets of one resolution."""

    def nearest(self, image: Size) -> Size:
        """The bucket of an image that may be enlarged."""
        ...

    def within(self, image: Size) -> Size | None:
        """The bucket of an image that must not be enlarged; None: it is too small."""
        ...

    def resized(self, image: Size, bucket: Size, *, upscale: bool) -> Size:
        """Size that an image is resized to before its middle is cut out."""
        ...


class SizeOptions(Value):
    """Sizes as the options of a build say them, in pixels."""

    resolutions: tuple[int | Size, ...]
    buckets: tuple[Size, ...]
    """Instead of resolutions: each image has each of these sizes."""
    step: int
    min_side: int | None
    max_side: int | None


class TrainerSettings(Value):
    """What a trainer's settings file says."""

    words: str
    """Its settings, with the trainer's names: those that are used, which are defaults, and those that are not."""
    options: Mapping[str, Any]
    """Options of ``build`` that say the same: ``resolutions``, ``buckets``, ``min_side``, ``flip``, ..."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Options of DATA that say the same, as JSON: ``config``, ``caption_ext``, ..."""
    no_latents: tuple[str, ...] = ()
    """Settings, with their values, that forbid cached latents."""
    no_text: tuple[str, ...] = ()
    """Settings, with their values, that forbid cached text."""


class Trainer(Protocol):
    """One trainer, as ``build --like`` and ``plan --for`` name it."""

    name: str
    parts_sets: bool
    """True: images of other repeats, and regularization images, are in other batches."""
    draws_resolution: bool
    """True: of several resolutions an image has one in an epoch, drawn; False: it has all of them."""

    def tables(self, sizes: SizeOptions) -> Sequence[Table]:
        """Its buckets, for each resolution; raises RecipeError for sizes that it does not take."""
        ...

    def reads(self, path: Path) -> bool:
        """True if this is a settings file of this trainer."""
        ...

    def settings(self, path: Path) -> TrainerSettings:
        """The settings of a file; raises UsageError with the line or the name of what is wrong."""
        ...

    def batches(self, samples: int, batch: int, ranks: int) -> tuple[int, int, int]:
        """Batches of one bucket in an epoch, samples that its last batch lacks, and samples that are dropped."""
        ...

    def steps(self, batches: int, ranks: int, accum: int) -> int:
        """Optimizer steps of an epoch, for the batches of all ranks."""
        ...

    def least(self, batch: int, ranks: int, accum: int) -> int:
        """Samples without which a bucket stops the trainer at its start; 0: none does."""
        ...

    def changes(self, tables: Sequence[Any], batch: int) -> Iterator[tuple[str, Sequence[Any], int]]:
        """Each one setting changed: its words, and the tables and the batch size that follow."""
        ...


def enlarges(trainer: str) -> RecipeError:
    """What ``Table.within`` raises for a trainer without such buckets."""
    return RecipeError(
        f"{trainer} enlarges images that are smaller than their bucket",
        argument="upscale",
        value="False",
        fix="leave --no-upscale out; --min-pixels N rejects small images",
        fix_python="leave upscale out; min_pixels=N rejects small images",
    )


def read_file(path: Path) -> Any:
    """Contents of a trainer's TOML or JSON file, by its ending; raises UsageError with the line."""
    kind, parse = ("TOML", tomllib.loads) if path.suffix == ".toml" else ("JSON", json.loads)
    try:
        return parse(path.read_text("utf-8"))
    except OSError as error:
        what, fix = f"{path}: {error.strerror}", "give the settings file of the trainer"
        raise UsageError(what, where=str(path), fix=fix) from error
    except ValueError as error:
        raise UsageError(
            f"{path} is no {kind} file", where=str(path), why=str(error), fix="mend this line"
        ) from error


def file_near(path: Path, name: Path) -> Path | None:
    """A file that the settings file ``path`` names: beside it, in a folder above, or where the command runs."""
    files = [folder / name for folder in (path.parent, *path.absolute().parents, Path.cwd())]
    return next((file for file in files if file.is_file()), None)


@contextmanager
def forms_named(path: Path, fix: str) -> Iterator[None]:
    """Make a setting of another form a UsageError."""
    try:
        yield
    except UsageError:
        raise
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"{path}: a setting has another form"
        raise UsageError(what, where=str(path), why=str(error), fix=fix) from error
