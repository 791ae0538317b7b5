"""Masks and control images of a data set: which image is of which sample.

Beside the sample, the stem of a partner ends in ``-masklabel`` or ``-condlabel`` (OneTrainer). In a folder for
partners it has the path of its image below the folder of the set (SimpleTuner). Else the file name alone decides:
sd-scripts ``conditioning_data_dir``, ai-toolkit ``control_path`` and ``mask_path``. Extensions may differ.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from latentcache.errors import UsageError
from latentcache.sources.causes import Notes
from latentcache.sources.layout import CONTROL_ENDING, MASK_ENDING, ImageSet, Layout

#: Word of ``--masks`` for the transparency of each image, and word that turns masks or control images off.
ALPHA, NONE = "alpha", "none"
#: Inputs by the option that names their folders.
INPUTS = {"masks": ("mask",), "controls": ("control", "control_2", "control_3")}
#: Ending of the stem -> input.
ENDINGS = {MASK_ENDING: "mask", CONTROL_ENDING: "control"}


class Partners:
    """Images of a walk that are masks or control images, by their positions among the files."""

    def __init__(self) -> None:
        self._beside, self._apart = dict[tuple[str, str], int](), dict[str, int]()
        """(Input, name of the sample without extension), and name of a file apart without extension -> file."""
        self._roles = dict[int, tuple[str, str]]()
        """File -> ``mask`` or ``control``, and its name."""

    def add(self, role: str, name: str, file: int, ending: str = "") -> None:
        """Note one file; ``ending``: it is beside its image."""
        stem, self._roles[file] = name.rpartition(".")[0], (role, name)
        if not ending:
            self._apart[stem] = file
        elif name.endswith(".png"):  # its trainer looks for no other format
            self._beside[role, stem.removesuffix(ending)] = file

    def inputs(self, layout: Layout) -> list[str]:
        """Inputs that the samples of a layout have."""
        roles = {name for image_set in layout.sets for name, _ in image_set.paired}
        roles |= {role for role, _ in self._beside}
        return [name for names in INPUTS.values() for name in names if name in roles - layout.unpaired]

    def of(self, name: str, image: int, image_set: ImageSet, role: str) -> int:
        """The file of a sample: ``image``, its own, for its transparency; -1: there is none."""
        stem, folder = name.rpartition(".")[0], dict(image_set.paired).get(role)
        if folder == "":
            return image
        if folder is not None:
            for inner in (
                stem.removeprefix(image_set.prefix),
                *[stem.rpartition("/")[2]][image_set.paired_by_path :],
            ):
                if (file := self._apart.get(f"{folder}/{inner}")) is not None:
                    return file
        return self._beside.get((role, stem), -1)

    def note_unused(self, used: Collection[int], layout: Layout, notes: Notes) -> None:
        """Count masks and control images that belong to no sample, or are not wanted."""
        for file, (role, name) in self._roles.items():
            if file not in used:
                why = "are not wanted" if role in layout.unpaired else "belong to no image"
                notes.count(role, f"{'masks' if role == 'mask' else 'control images'} {why}", (name,))


def paired_with(
    layout: Layout, options: Mapping[str, Sequence[str]], recorded: Collection[str]
) -> tuple[Layout, dict[str, tuple[str, ...]]]:
    """A layout with the folders that options name, and their names below its root: DATA may be moved.

    Folders ``recorded`` are named so already, and may be gone. Raises UsageError for another one that is not in DATA.
    """
    named, root = dict[str, tuple[str, ...]](), layout.root.absolute()
    for option, values in options.items():
        inputs, folders = INPUTS[option], list[str]()
        for value in filter(None, values):
            paths = (Path(os.path.abspath(root / value)), Path(os.path.abspath(value)))  # noqa: PTH100 - links stay
            below = next((path for path in paths if path.is_dir() and root in path.parents), None)
            is_word = value == NONE or (value == ALPHA and option == "masks")
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
        if folders == [NONE]:
            layout = replace(layout, unpaired=layout.unpaired.union(inputs))
        elif folders:
            named_folders = ["" if folder == ALPHA and option == "masks" else folder for folder in folders]
            paired = tuple(zip(inputs, named_folders, strict=False))
            sets = [
                replace(old, paired=(*(pair for pair in old.paired if pair[0] not in inputs), *paired))
                for old in layout.sets
            ]
            layout = replace(layout, sets=tuple(sets))
    return layout, named
