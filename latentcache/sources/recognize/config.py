"""Configuration files of trainers: parsed once, their folders found, and every setting read, kept or counted.

Paths are looked for in the folder of the file and in the working directory, where trainers look for them. Two
different folders are an error.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from latentcache.errors import SourceError, SourceNotFoundError, count_of, keyword, option
from latentcache.fields.table import Rejected
from latentcache.sources.causes import rejected
from latentcache.sources.formats.text import read_document
from latentcache.sources.layout import CaptionRule, ImageSet, Layout, above
from latentcache.sources.partners import ALPHA, INPUTS

Pair = tuple[str, str]
#: Larger files are no configuration.
MAX_BYTES = 1 << 24
#: A resolution up to this number is one in megapixels.
_MEGAPIXELS = 16
#: Setting that makes other entries -> what to give for it.
NOT_FOLLOWED: Mapping[str, str] = {
    "resolution": "--resolution",
    "resolution_type": "--resolution",
    "maximum_image_size": "--resolution",
    "minimum_image_size": "--min-pixels",
    "bucket_reso_steps": "--bucket-step",
    "bucket_no_upscale": "--no-upscale",
    "min_bucket_reso": "--min-side",
    "max_bucket_reso": "--max-side",
    "flip_aug": "--flip",
    "random_crop": "--crop random",
    **dict.fromkeys(("crop", "crop_aspect", "crop_style"), "--crop"),
    **dict.fromkeys(("shuffle_caption", "enable_tag_shuffling", "caption_shuffle"), "--shuffle-tags"),
    **dict.fromkeys(("keep_tokens", "keep_tags_count", "keep_tokens_separator"), "--keep-tags"),
    **dict.fromkeys(("tag_delimiter", "caption_separator"), "--tag-separator"),
    "secondary_separator": "captions with the other separator in its place",
    **dict.fromkeys(
        ("caption_dropout_rate", "caption_dropout_probability", "caption_dropout_every_n_epochs"),
        "--empty-prompt, and read(caption_dropout=) in training",
    ),
    **dict.fromkeys(
        ("caption_tag_dropout_rate", "tag_dropout_enable"), "captions with fewer tags, and --caption-lines all"
    ),
}
#: Those that a build takes from a configuration that it follows.
_OF_SIZES = {"enable_bucket", "flip_aug"} | {
    name
    for name, option in NOT_FOLLOWED.items()
    if option in ("--resolution", "--bucket-step", "--no-upscale", "--min-side", "--max-side")
}


class Trainer(NamedTuple):
    """A kind of configuration files."""

    word: str
    names: tuple[str, ...]
    """Names of such files in a folder."""
    fits: Callable[[Any], bool]
    """True if a parsed file has this form."""
    read: Callable[[Config, Path | None, Any], Layout]
    """The layout that a file, in a folder if given, describes; the last is ``find_layout``."""


@dataclass(slots=True)
class Config:
    """One configuration file, and what was made of it so far."""

    path: Path
    value: Any
    ignored: set[str] = field(default_factory=set)
    """Settings that are not used."""
    not_followed: dict[str, str] = field(default_factory=dict)
    """Settings that would make other entries -> their value, and what to give for it."""
    notes: list[Rejected] = field(default_factory=list)
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
            if self.is_followed and name in _OF_SIZES:
                continue
            if name in NOT_FOLLOWED:
                self.not_followed.setdefault(name, f"{name} = {json.dumps(value)} ({NOT_FOLLOWED[name]})")
            else:
                self.ignored.add(name)

    def note(self, detail: str, count: int = 1, cause: str = "config") -> None:
        """One thing in this file that is not used as the trainer would."""
        self.notes.append(rejected(self.path.name, cause, detail, count=count))

    def all_notes(self) -> tuple[Rejected, ...]:
        """All of them, with one for what was ignored and one for the settings that would make other entries."""
        if self.ignored:
            words = f"{count_of(len(self.ignored), f'settings of {self.path.name} have')} no effect here"
            self.note(f"{words}: {', '.join(sorted(self.ignored))}", len(self.ignored), "config-ignored")
        if self.not_followed:
            options = ", ".join(sorted(self.not_followed.values()))
            self.note(
                f"the entries follow options, not {self.path.name}: {options}", len(self.not_followed), "config-asks"
            )
        return tuple(self.notes)

    def place(self, value: Any, name: str) -> Path:
        """The folder or file that a setting names; raises an error if it is not there, or there twice."""
        if not isinstance(value, str) or not value:
            raise self.error(
                f"{name}: expected a path, found {json.dumps(value)}", f"give {name} in {self.path.name}"
            )
        beside = Path(os.path.abspath(self.path.parent / value))  # noqa: PTH100 - links stay
        below = Path(os.path.abspath(Path(self.folder, value)))  # noqa: PTH100
        paths = [path for path in dict.fromkeys((beside, below)) if path.exists()]
        if len(paths) > 1:
            raise self.error(
                f"{name} = {value!r} is there twice: {beside} and {below}", f"write one of them in {self.path}"
            )
        if not paths:
            fix, fix_python = _correct(f"correct {name} in {shlex.quote(str(self.path))}")
            raise SourceNotFoundError(
                f"{self.path.name}: {name} = {value!r} does not exist",
                where=str(self.path),
                why=" and ".join(f"nothing at {path}" for path in dict.fromkeys((beside, below))),
                fix=fix,
                fix_python=fix_python,
            )
        return paths[0]

    def error(self, what: str, fix: str, why: str = "") -> SourceError:
        """An error of this file."""
        return SourceError(f"{self.path.name}: {what}", where=str(self.path), why=why, fix=fix)


def read_config(path: Path) -> Config:
    """Parse a TOML or JSON file; raises SourceError, with the line."""
    fix, fix_python = _correct(f"correct {shlex.quote(str(path))}")
    return Config(path, read_document(path, fix, fix_python, max_bytes=MAX_BYTES))


def _correct(what: str) -> tuple[str, str]:
    """A correction of a file, or else the plain folder, for the command line and for Python."""
    return (
        f"{what}, or read the folder alone with {option('layout', 'folder')}",
        f"{what}, or read the folder alone with {keyword('layout', 'folder')}",
    )


def pixels_in(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """The resolution of a set as the side of a square of equal area; empty: none, or in another measure."""
    resolution = settings.get("resolution")
    sides: list[Any] = resolution if isinstance(resolution, list) else [resolution]
    is_area = settings.get("resolution_type", "pixel_area") == "pixel_area"
    is_plain = is_area and len({*sides}) == 1 and type(sides[0]) is int
    return tuple(sides[:1]) if is_plain and sides[0] > _MEGAPIXELS else ()


def joined(config: Config, word: str, why: str, parts: Sequence[Layout], base: Path | None) -> Layout:
    """One layout of several, names below their deepest common folder."""
    if not parts:
        raise config.error("it names no images that could be read", "name a folder of images in it")
    pairs = [(part, image_set) for part in parts for image_set in part.sets]
    listed = [Path(os.path.abspath(base))] if base is not None else []  # noqa: PTH100
    listed += [Path(part.root, folder) for part, image_set in pairs for _, folder in image_set.paired if folder]
    tables = [
        Path(part.root, image_set.captions.table).parent for part, image_set in pairs if image_set.captions.table
    ]
    root = Path(os.path.commonpath([*listed, *tables, *(part.root for part in parts)]))

    def moved(part: Layout, name: str) -> str:
        return relative(Path(part.root, name), root)

    splits = {(moved(part, folder), split) for part in parts for folder, split in part.unread.items()}
    unread = dict(splits)
    if len(unread) < len(splits):
        what = "two sets read different splits of one folder"
        raise config.error(what, "give the folder of each split as a path, such as x/train and x/test")
    folders = {moved(part, folder) for part in parts for folder in part.folders}
    folders.update(relative(folder, root) for folder in listed)
    used = {Path(part.root, name) for part in parts for name in part.used}
    used.add(Path(os.path.abspath(config.path)))  # noqa: PTH100
    return Layout(
        word=word,
        why=why,
        root=root,
        sets=tuple(
            replace(
                image_set,
                folder=moved(part, image_set.folder),
                captions=replace(
                    image_set.captions, table=image_set.captions.table and moved(part, image_set.captions.table)
                ),
                files=frozenset(moved(part, name) for name in image_set.files),
                paired=tuple((name, folder and moved(part, folder)) for name, folder in image_set.paired),
            )
            for part, image_set in pairs
        ),
        folders=tuple(path for path in folders if folders.isdisjoint(islice(above(path), 1, None))),
        aside={
            **{moved(part, folder): role for part in parts for folder, role in part.aside.items()},
            **{
                moved(part, folder): name.partition("_")[0]
                for part, image_set in pairs
                for name, folder in image_set.paired
                if folder
            },
        },
        unread=unread,
        split=next((part.split for part in parts if part.unread), ""),
        used=frozenset(relative(path, root) for path in used if path.is_relative_to(root)),
        resolutions=tuple(sorted(config.resolutions.union(*(part.resolutions for part in parts)))),
        notes=(
            *(replace(note, name=moved(part, note.name)) for part in parts for note in part.notes),
            *config.all_notes(),
        ),
    )


def partners(config: Config, entries: Mapping[str, Sequence[tuple[str, Any]]]) -> tuple[Pair, ...]:
    """(Input, folder) of masks and control images; a mask ``alpha`` is the image's own."""
    paired = list[Pair]()
    for kind, named in entries.items():
        inputs = INPUTS[kind]
        if len(named) > len(inputs):
            raise config.error(f"{kind} names {count_of(len(named), 'folders')}", f"name {len(inputs)} at most")
        for role, (setting, path) in zip(inputs, named, strict=False):
            folder = None if (kind, path) == ("masks", ALPHA) else config.place(path, setting)
            paired.append((role, str(folder or "")))
    return tuple(paired)


def of_set(folder: Path, rule: CaptionRule, table: Path | None = None, **more: Any) -> Layout:
    """A layout of one folder, or of the images in it that a table lists."""
    image_set = ImageSet(folder="", captions=replace(rule, table=str(table or "")), **more)
    used = frozenset([str(table)]) if table is not None else frozenset[str]()
    return Layout(word="", why="", root=folder, sets=(image_set,), used=used)


def relative(path: Path, root: Path) -> str:
    """A path below the root, empty for the root itself."""
    name = path.relative_to(root).as_posix()
    return "" if name == "." else name
