"""The user's options for reading DATA; the manifest keeps them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from latentcache.errors import UsageError
from latentcache.fields.settings import Settings, setting
from latentcache.sources.layout import INPUTS, CaptionRule, Layout
from latentcache.value import Value, typed_parts

_NO_OPTION = {"flag": None}
_text = partial(setting, default="")
_PART = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")
_PART_FIX = "give 0/4 on the first of four nodes, 1/4, 2/4 and 3/4 on the others"


#: Word of ``--masks`` for the transparency of each image, and word that turns masks or control images off.
_ALPHA, _NONE = "alpha", "none"


class Part(Value):
    """Part ``index`` of ``of``: what one node of several builds; 0 of 1 is the whole.

    Parts of one count are disjoint, and together they are the whole. No node has to ask another. Records belong to a
    part by their content: equal records are in one part, also after a line moved. Images belong to a part by their
    name, because one node may know their content and another not.
    """

    index: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            why = "parts are counted from 0, and each is below their count"
            raise UsageError("there is no such part", argument="part", value=str(self), why=why, fix=_PART_FIX)

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    @classmethod
    def parse(cls, words: str) -> Part:
        """``0/4`` as a part; raises UsageError."""
        match = _PART.fullmatch(words)
        if match is None:
            raise UsageError("expected two integers", argument="part", value=words, why="such as 0/4", fix=_PART_FIX)
        return cls(index=int(match[1]), of=int(match[2]))

    def holds(self, content: bytes) -> bool:
        """True if a record with this content hash (16 bytes) is in this part."""
        # The last eight bytes: the first eight split validation off.
        return int.from_bytes(content[8:], "little") % self.of == self.index

    def holds_name(self, name: str) -> bool:
        """True if the image of this name is in this part."""
        return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape")) % self.of == self.index


class SourceOptions(Settings):
    """Options of reading DATA, most of them options of the command line. The manifest keeps them."""

    kind: str = field(default="", metadata=_NO_OPTION)
    """``images`` or ``records``; empty: decided by DATA."""
    text_lines: bool = setting("Read each line in a text file as a document.", default=False)
    part: Part | None = field(default=None, metadata=_NO_OPTION)
    layout: str = _text(
        "Read DATA as folder, kohya, imagefolder, ... [default: by what DATA contains]", metavar="WORD"
    )
    caption_ext: str = _text("Caption file extension. [default: .txt, then .caption, then .json]", metavar="EXT")
    default_caption: str | None = setting("Caption for images without one; may be empty. [default: they have none]")
    caption_prefix: str = _text("Put TEXT before every caption.")
    caption_suffix: str = _text("Put TEXT behind every caption.")
    masks: str = _text(
        "Folder in DATA with masks, 'alpha', or 'none' to leave masks out. [default: found]", metavar="FOLDER"
    )
    controls: tuple[str, ...] = setting(
        "Folder in DATA with control images, or 'none'. Repeatable. [default: found]", metavar="FOLDER", default=()
    )
    caption_lines: str = _text(
        "Use a caption's first line, or each line as a caption. [default: as the layout]", metavar="first|all"
    )
    repeats: bool | None = setting("Serve a sample as often per epoch as DATA says, or once. [default: repeats]")
    split: str = _text("Split to read, if DATA has several. [default: train]", metavar="NAME")
    image_column: str = _text(
        "Column with images or file names, or how names end in tars. [default: the only one]", metavar="NAME"
    )
    caption_column: str = _text(
        "Column with captions, or their JSON key in tars. [default: the only one]", metavar="NAME"
    )
    follow_links: bool = setting("Also follow links that lead outside DATA.", default=False)
    config: str = field(default="", metadata=_NO_OPTION)
    """Configuration of a trainer that names the sets in DATA, unless a layout is given; empty: DATA decides."""
    config_folder: str = field(default="", metadata=_NO_OPTION)
    """Working directory in which it was given: its paths may be relative to it."""
    videos: bool = field(default=False, metadata=_NO_OPTION)
    """True: files of videos are samples, as images are; False: they are counted in a note."""

    def __post_init__(self) -> None:
        if self.caption_lines not in ("", "first", "all"):
            raise UsageError(
                "unknown value",
                argument="caption_lines",
                value=self.caption_lines,
                fix="--caption-lines=first|all",
            )

    def as_json(self) -> dict[str, Any]:
        """JSON values of what differs from the defaults."""
        values = [(option, getattr(self, option.name)) for option in fields(self)]
        changed = {option.name: value for option, value in values if value != option.default}
        changed |= {name: list(value) for name, value in changed.items() if isinstance(value, tuple)}
        return changed | ({"part": str(self.part)} if self.part else {})

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of masks and control images."""
        return (self.masks, *self.controls)

    def applied(self, layout: Layout, recorded: Collection[str]) -> tuple[Layout, SourceOptions]:
        """A layout with these options, and these options with folders named below its root."""
        sets = tuple(replace(image_set, captions=self._captions(image_set.captions)) for image_set in layout.sets)
        if self.repeats is False:
            sets = tuple(replace(image_set, repeats=1, balance="") for image_set in sets)
        folders = {"masks": (self.masks,), "controls": self.controls}
        layout, named = _paired_with(replace(layout, sets=sets), folders, recorded)
        return layout, replace(self, masks="".join(named["masks"]), controls=named["controls"])

    def _captions(self, rule: CaptionRule) -> CaptionRule:
        """The caption rule of a set with these options."""
        extensions, text, source = rule.extensions, rule.text, rule.text_source
        if self.caption_ext and extensions:
            extensions = ("." + self.caption_ext.lower().removeprefix("."),)
        if self.default_caption is not None and not text and rule.from_name is None:
            text = self.default_caption
            source = "--default-caption"
        return replace(
            rule,
            extensions=extensions,
            image_column=self.image_column,
            caption_column=self.caption_column,
            text=text,
            text_source=source,
            prefix=self.caption_prefix + rule.prefix,
            suffix=rule.suffix + self.caption_suffix,
            lines=self.caption_lines or rule.lines,
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SourceOptions:
        """Inverse of :meth:`as_json`; raises TypeError for an unknown name."""
        part = {"part": Part.parse(data["part"])} if "part" in data else {}
        return cls(**typed_parts(cls, {**data, **part}))


def _paired_with(
    layout: Layout, options: Mapping[str, Sequence[str]], recorded: Collection[str]
) -> tuple[Layout, dict[str, tuple[str, ...]]]:
    """A layout with the folders that options name, and their names below its root: DATA may be moved.

    Folders ``recorded`` are named so already, and may be gone. Raises UsageError for another one that is not in DATA.
    """
    named = dict[str, tuple[str, ...]]()
    root = layout.root.absolute()
    for option, values in options.items():
        inputs = INPUTS[option]
        folders = list[str]()
        for value in filter(None, values):
            paths = (Path(os.path.abspath(root / value)), Path(os.path.abspath(value)))  # noqa: PTH100 - links stay
            below = next((path for path in paths if path.is_dir() and root in path.parents), None)
            is_word = value == _NONE or (value == _ALPHA and option == "masks")
            if not is_word and below is None and value not in recorded:
                raise UsageError(
                    f"no such folder in {layout.root}",
                    argument=option,
                    value=value,
                    why="names of files are kept below the folder of the data",
                    fix="give a folder in it; DATA may be the folder that holds both",
                )
            folders.append(value if is_word or below is None else below.relative_to(root).as_posix())
        if len(folders) > len(inputs):
            raise UsageError(f"{len(folders)} folders", argument=option, fix=f"give {len(inputs)} at most")
        named[option] = tuple(folders)
        if folders == [_NONE]:
            layout = replace(layout, unpaired=layout.unpaired.union(inputs))
        elif folders:
            named_folders = ["" if folder == _ALPHA and option == "masks" else folder for folder in folders]
            paired = tuple(zip(inputs, named_folders, strict=False))
            sets = [
                replace(old, paired=(*(pair for pair in old.paired if pair[0] not in inputs), *paired))
                for old in layout.sets
            ]
            layout = replace(layout, sets=tuple(sets))
    return layout, named
