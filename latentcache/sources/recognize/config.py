"""Configuration files of trainers: parsed once, their folders found, and every setting read, kept or counted.

Paths are looked for in the folder of the file and in the working directory, where trainers look for them. Two
different folders are an error.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from latentcache.errors import SourceError, SourceNotFoundError, count_of
from latentcache.fields.table import Rejected
from latentcache.sources.causes import rejected
from latentcache.sources.formats.files import read_document, shown
from latentcache.sources.layout import ImageSet, Layout, above

Pair = tuple[str, str]
#: Larger files are not read as configurations.
MAX_BYTES = 1 << 24
#: A resolution up to this number is one in megapixels.
_MEGAPIXELS = 16
#: Settings that a build takes from a configuration that it follows.
_OF_SIZES = frozenset(("resolution", "resolution_type", "maximum_image_size", "enable_bucket", "bucket_reso_steps",
                       "bucket_no_upscale", "min_bucket_reso", "max_bucket_reso", "flip_aug"))  # fmt: skip


class Trainer(NamedTuple):
    """A kind of configuration files."""

    word: str
    names: tuple[str, ...]
    """Names of such files in a folder."""
    fits: Callable[[Any], bool]
    """True if a parsed file has this form."""
    read: Callable[[Config], list[ImageSet]]
    """Its sets, with absolute folders; what else it says is added to the configuration."""


@dataclass(slots=True)
class Config:
    """One configuration file, and what was made of it so far."""

    path: Path
    value: Any
    ignored: set[str] = field(default_factory=set)
    """Settings that are not used, with their values."""
    notes: list[Rejected] = field(default_factory=list)
    used: set[Path] = field(default_factory=set)
    """Absolute paths of files that say what the sets are: this one and those that it names."""
    aside: list[Pair] = field(default_factory=list)
    """(Input, folder) of masks and control images that may be of no set."""
    resolutions: set[int] = field(default_factory=set)
    """Sides of squares of equal area that sets ask for."""
    is_followed: bool = False
    """True if the build takes its sizes and flips from this file too."""
    folder: str = ""
    """Folder that paths may be relative to; empty: the working directory."""

    def take(self, entries: Mapping[str, Any], used: Iterable[str]) -> None:
        """Count the settings of one object that are not used."""
        for name, value in entries.items():
            if name in used or value in (None, "", False) or value == [] or value == {}:
                continue
            if name in ("resolution", "resolution_type") and pixels_in(entries):
                continue  # ``resolutions`` has it
            if not (self.is_followed and name in _OF_SIZES):
                self.ignored.add(f"{name} = {shown(value)}")

    def note(self, detail: str, count: int = 1, cause: str = "config") -> None:
        """One thing in this file that is not used as the trainer would."""
        self.notes.append(rejected(self.path.name, cause, detail, count=count))

    def path_of(self, value: Any, name: str) -> str:
        """The folder or file that a setting names; raises an error if it is not there, or there twice."""
        if not isinstance(value, str) or not value:
            raise self.error(f"{name}: expected a path, found {shown(value)}", f"give {name} in {self.path.name}")
        folders = self.path.parent, Path(self.folder)
        paths = list(dict.fromkeys(Path(os.path.abspath(folder / value)) for folder in folders))  # noqa: PTH100 - links
        there = [path for path in paths if path.exists()]
        if len(there) == 1:
            return str(there[0])
        raise (SourceError if there else SourceNotFoundError)(
            f"{self.path.name}: {name} = {value!r} {'is there twice' if there else 'does not exist'}",
            where=str(self.path),
            why=f"looked for {' and '.join(map(str, paths))}",
            fix=_correct(f"correct {name} in {shlex.quote(str(self.path))}"),
        )

    def error(self, problem: str, fix: str, why: str = "") -> SourceError:
        """An error of this file."""
        return SourceError(f"{self.path.name}: {problem}", where=str(self.path), why=why, fix=fix)


def read_config(path: Path) -> Config:
    """Parse a TOML or JSON file; raises SourceError, with the line."""
    used = {Path(os.path.abspath(path))}  # noqa: PTH100 - links stay
    return Config(
        path, read_document(path, _correct(f"correct {shlex.quote(str(path))}"), max_bytes=MAX_BYTES), used=used
    )


def _correct(action: str) -> str:
    """A correction of a file, or else the plain folder."""
    return f"{action}, or read the folder alone with --layout=folder"


def pixels_in(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """The resolution of a set as the side of a square of equal area; empty: none, or in another measure."""
    resolution = settings.get("resolution")
    sides: list[Any] = resolution if isinstance(resolution, list) else [resolution]
    is_area = settings.get("resolution_type", "pixel_area") == "pixel_area"
    is_plain = is_area and len({*sides}) == 1 and type(sides[0]) is int
    return tuple(sides[:1]) if is_plain and sides[0] > _MEGAPIXELS else ()


def joined(config: Config, word: str, sets: Sequence[ImageSet], base: Path | None) -> Layout:
    """The layout of sets, named below their deepest common folder; ``base`` is the folder of images, if given."""
    if not sets:
        raise config.error("it names no images that could be read", "name a folder of images in it")
    aside = [*config.aside, *(pair for image_set in sets for pair in image_set.paired if pair[1])]
    listed = [image_set.folder for image_set in sets] + [folder for _, folder in aside]
    listed += [os.path.abspath(base)] if base is not None else []  # noqa: PTH100 - links stay
    root = Path(os.path.commonpath(listed))
    if ignored := config.ignored:
        words = f"{count_of(len(ignored), f'settings of {config.path.name} have')} no effect here"
        config.note(f"{words}: {', '.join(sorted(ignored))}", len(ignored), "config-ignored")
    folders = {relative(path, root) for path in listed}
    moved = [
        replace(
            image_set,
            folder=relative(image_set.folder, root),
            paired=tuple((role, folder and relative(folder, root)) for role, folder in image_set.paired),
        )
        for image_set in sets
    ]
    return Layout(
        word=word,
        why=f"{config.path.name} names {count_of(len(sets), 'sets')} of images",
        root=root,
        sets=tuple(moved),
        folders=tuple(path for path in folders if folders.isdisjoint(islice(above(path), 1, None))),
        aside={relative(folder, root): role.partition("_")[0] for role, folder in aside},
        used=frozenset(relative(path, root) for path in config.used if path.is_relative_to(root)),
        resolutions=tuple(sorted(config.resolutions)),
        notes=tuple(config.notes),
    )


def relative(path: Path | str, root: Path) -> str:
    """A path below the root, empty for the root itself."""
    name = Path(path).relative_to(root).as_posix()
    return "" if name == "." else name
