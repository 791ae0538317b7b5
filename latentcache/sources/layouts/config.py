"""Configuration files of trainers: parsed once, their folders found, and every setting read, kept or counted.

Paths are looked for in the folder of the file and in the working directory, where trainers look for them; two
different folders are an error.
"""

from __future__ import annotations

import json
import os
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from latentcache.errors import SourceError, SourceNotFoundError, UnusableSampleError
from latentcache.fields.table import Rejected
from latentcache.sources.causes import rejected
from latentcache.sources.layouts.sets import CaptionRule, ImageSet, Layout
from latentcache.sources.lines import decode, parse_json
from latentcache.sources.reading import read_source

#: Larger files are no configuration.
MAX_BYTES = 1 << 24
#: Settings that make other entries -> the option of `latentcache build` that does.
ASKS = {
    "resolution": "--resolution",
    "bucket_reso_steps": "--bucket-step",
    "bucket_no_upscale": "--no-upscale",
    "min_bucket_reso": "--bucket",
    "max_bucket_reso": "--bucket",
    "flip_aug": "--flip",
    "random_crop": "--crop",
    "crop": "--crop",
    "crop_aspect": "--crop",
    "crop_style": "--crop",
    "resolution_type": "--resolution",
    "minimum_image_size": "--min-pixels",
    "maximum_image_size": "--resolution",
}


@dataclass(slots=True)
class Config:
    """One configuration file, and what was made of it so far."""

    path: Path
    value: Any
    ignored: Counter[str] = field(default_factory=Counter)
    """Settings that are not used, and in how many places each is given."""
    asks: dict[str, str] = field(default_factory=dict)
    """Settings that would make other entries -> their value."""
    notes: list[Rejected] = field(default_factory=list)

    def take(
        self, said: Mapping[str, Any], used: Iterable[str], kept: Iterable[str] = ()
    ) -> tuple[tuple[str, str], ...]:
        """Count the settings of one object that are not used; gives those that are kept, as text."""
        known = {*used, *kept}
        for name, value in said.items():
            if name in known or value in (None, "", False) or value == [] or value == {}:
                continue
            if name in ASKS:
                self.asks.setdefault(name, json.dumps(value))
            else:
                self.ignored[name] += 1
        values = {name: said[name] for name in kept if said.get(name)}
        return tuple((name, value if isinstance(value, str) else json.dumps(value)) for name, value in values.items())

    def note(self, detail: str, count: int = 1) -> None:
        """One thing in this file that is not used as the trainer would."""
        self.notes.append(rejected(self.path.name, "config", detail, count=count))

    def all_notes(self) -> tuple[Rejected, ...]:
        """All of them, with one for what was ignored and one for what would make other entries."""
        notes = list(self.notes)
        if self.ignored:
            names = ", ".join(sorted(self.ignored))
            detail = f"{len(self.ignored)} settings of {self.path.name} have no effect here: {names}"
            notes.append(rejected(self.path.name, "config-ignored", detail, count=len(self.ignored)))
        if self.asks:
            said = ", ".join(f"{name} = {value} ({ASKS[name]})" for name, value in sorted(self.asks.items()))
            detail = f"{self.path.name} asks for {said}; the options of build decide"
            notes.append(rejected(self.path.name, "config-asks", detail, count=len(self.asks)))
        return tuple(notes)

    def place(self, said: Any, name: str) -> Path:
        """The folder or file that a setting names.

        Raises:
            SourceNotFoundError: It is not there.
            SourceError: It is no path, or it is there twice.
        """
        if not isinstance(said, str) or not said:
            raise self.error(f"{name}: expected a path, found {json.dumps(said)}", f"give {name} in {self.path.name}")
        own = Path(os.path.abspath(self.path.parent / said))  # noqa: PTH100 - links stay
        there = Path(os.path.abspath(said))  # noqa: PTH100
        found = [one for one in dict.fromkeys((own, there)) if one.exists()]
        if len(found) > 1:
            raise self.error(
                f"{name} = {said!r} is there twice: {own} and {there}", f"write one of them in {self.path}"
            )
        if not found:
            raise SourceNotFoundError(
                f"{self.path.name}: {name} = {said!r} does not exist",
                where=str(self.path),
                why=" and ".join(f"nothing at {one}" for one in dict.fromkeys((own, there))),
                fix=f"correct {name} in {shlex.quote(str(self.path))}, or read the folder alone with --layout folder",
            )
        return found[0]

    def error(self, what: str, fix: str) -> SourceError:
        """An error of this file."""
        return SourceError(f"{self.path.name}: {what}", where=str(self.path), fix=fix)


def read_config(path: Path) -> Config:
    """Parse a TOML or JSON file.

    Raises:
        SourceError: It cannot be read or parsed; the line is named.
    """
    try:
        data, _ = read_source(path, max_bytes=MAX_BYTES)
        text = decode(data)
        value = tomllib.loads(text) if path.suffix == ".toml" else parse_json(text)
    except tomllib.TOMLDecodeError as error:
        raise _unreadable(path, str(error)) from error
    except UnusableSampleError as error:
        raise _unreadable(path, error.what) from error
    return Config(path, value)


def _unreadable(path: Path, why: str) -> SourceError:
    fix = f"correct {shlex.quote(str(path))}, or read its folder alone with --layout folder"
    return SourceError(f"{path.name} cannot be read", where=str(path), why=why, fix=fix)


def joined(config: Config, word: str, why: str, parts: Sequence[Layout], base: Path | None) -> Layout:
    """One layout of several, names below their deepest common folder.

    Args:
        config: The file that names them.
        word: Of the layout.
        why: As in :class:`Layout`.
        parts: In the order of the file.
        base: The folder that was given as DATA, which is listed as a whole; None: the file was.

    Raises:
        SourceError: There are none.
    """
    if not parts:
        raise config.error("it names no images that could be read", "name a folder of images in it")
    places = [Path(os.path.abspath(base))] if base is not None else []  # noqa: PTH100
    root = Path(os.path.commonpath([*places, *(part.root for part in parts)]))
    moved = [_below(part, root) for part in parts]
    folders = {folder for part in moved for folder in part.folders} | {relative(place, root) for place in places}
    used = {name for part in moved for name in part.used}
    if config.path.is_relative_to(root):
        used.add(relative(Path(os.path.abspath(config.path)), root))  # noqa: PTH100
    return Layout(
        word=word,
        why=why,
        root=root,
        sets=tuple(one for part in moved for one in part.sets),
        folders=tuple(one for one in folders if not any(_is_below(one, other) for other in folders)),
        aside={folder: role for part in moved for folder, role in part.aside.items()},
        used=frozenset(used),
        notes=(*(note for part in moved for note in part.notes), *config.all_notes()),
    )


def aside(folder: Path, role: str) -> Layout:
    """A layout of a folder of masks or control images."""
    return Layout(word="", why="", root=folder, sets=(), aside={"": role})


def of_folder(folder: Path, rule: CaptionRule, **more: Any) -> Layout:
    """A layout of one folder."""
    return Layout(word="", why="", root=folder, sets=(ImageSet(folder="", captions=rule, **more),))


def relative(path: Path, root: Path) -> str:
    """A path below the root, empty for the root itself."""
    found = path.relative_to(root).as_posix()
    return "" if found == "." else found


def _is_below(folder: str, other: str) -> bool:
    return folder != other and (not other or folder.startswith(other + "/"))


def _below(layout: Layout, root: Path) -> Layout:
    """A layout with names below a folder above its root."""
    start = relative(layout.root, root)

    def moved(name: str) -> str:
        return "/".join(part for part in (start, name) if part)

    sets = [
        replace(
            one,
            folder=moved(one.folder),
            captions=replace(one.captions, table=moved(one.captions.table) if one.captions.table else ""),
            files=frozenset(map(moved, one.files)),
            paired=tuple((name, folder and relative(Path(layout.root, folder), root)) for name, folder in one.paired),
        )
        for one in layout.sets
    ]
    return replace(
        layout,
        root=root,
        sets=tuple(sets),
        folders=tuple(map(moved, layout.folders)),
        aside={moved(folder): role for folder, role in layout.aside.items()},
        used=frozenset(map(moved, layout.used)),
        notes=tuple(replace(note, name=moved(note.name)) for note in layout.notes),
    )
