"""Masks and control images of a data set: which image is of which sample.

An image beside the sample with ``-masklabel`` or ``-condlabel`` after its stem (OneTrainer), or one of the same name
in a folder for them: with the path that the image has below the folder of its set (SimpleTuner), else with its file
name alone (sd-scripts ``conditioning_data_dir``, ai-toolkit ``control_path``, ``mask_path``). Extensions may differ.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.fields.table import Rejected
from latentcache.sources.causes import counted
from latentcache.sources.layouts.sets import CONTROL_ENDING, MASK_ENDING, ImageSet, Layout

#: Word of ``--masks`` for the transparency of each image, and word that turns masks or control images off.
ALPHA, NONE = "alpha", "none"
#: Inputs by the option that names their folders.
INPUTS = {"masks": ("mask",), "controls": ("control", "control_2", "control_3")}
#: Ending of the stem -> input.
ENDINGS = {MASK_ENDING: "mask", CONTROL_ENDING: "control"}


@dataclass(slots=True)
class Partners:
    """Images of a walk that are masks or control images, and where each was found."""

    beside: dict[tuple[str, str], str] = field(default_factory=dict)
    """(Input, name of the sample without extension) -> file."""
    apart: dict[str, str] = field(default_factory=dict)
    """File in a folder for them, without extension -> with it."""
    stats: dict[str, NDArray[np.uint64]] = field(default_factory=dict)
    """File -> (5,) its stat."""
    roles: dict[str, str] = field(default_factory=dict)
    """File -> ``mask`` or ``control``."""

    def add(self, role: str, name: str, stat: NDArray[np.uint64], ending: str = "") -> None:
        """Note one file; ``ending``: it is beside its image."""
        stem = name.rpartition(".")[0]
        self.roles[name], self.stats[name] = role, stat
        if not ending:
            self.apart[stem] = name
        elif name.endswith(".png"):  # its trainer looks for no other format
            self.beside[role, stem.removesuffix(ending)] = name

    def inputs(self, layout: Layout) -> list[str]:
        """Inputs that the samples of a layout have."""
        found = {name for one in layout.sets for name, _ in one.paired} | {role for role, _ in self.beside}
        return [name for names in INPUTS.values() for name in names if name in found - layout.unpaired]

    def of(self, name: str, one: ImageSet, role: str) -> str | None:
        """The file of a sample, the sample itself for its transparency; None: there is none."""
        stem, folder = name.rpartition(".")[0], dict(one.paired).get(role)
        if folder == "":
            return name
        if folder is not None:
            for own in (stem.removeprefix(one.prefix), *[stem.rpartition("/")[2]][one.paired_by_path :]):
                if (found := self.apart.get(f"{folder}/{own}")) is not None:
                    return found
        return self.beside.get((role, stem))

    def unused(self, used: Mapping[str, int], layout: Layout) -> Iterator[Rejected]:
        """One note for masks and one for control images that belong to no sample, or are not wanted."""
        left = [name for name in self.roles if name not in used]
        for role, count in Counter(self.roles[name] for name in left).items():
            first = next(name for name in left if self.roles[name] == role)
            words = "masks" if role == "mask" else "control images"
            why = "are not wanted" if role in layout.unpaired else "belong to no image"
            yield counted(first, role, count, f"{words} {why}")


def paired_with(layout: Layout, said: Mapping[str, Sequence[str]]) -> Layout:
    """A layout with the folders that options name.

    Raises:
        UsageError: There are too many folders.
    """
    for option, values in said.items():
        given, inputs = [value for value in values if value], INPUTS[option]
        if given == [NONE]:
            layout = replace(layout, unpaired=layout.unpaired.union(inputs))
        elif given:
            if len(given) > len(inputs):
                raise UsageError(f"--{option}: {len(given)} folders", fix=f"give {len(inputs)} at most")
            folders = ["" if one == ALPHA and option == "masks" else one for one in given]
            own = tuple(zip(inputs, folders, strict=False))
            sets = [
                replace(one, paired=(*(pair for pair in one.paired if pair[0] not in inputs), *own))
                for one in layout.sets
            ]
            aside = {folder: inputs[0] for folder in folders if folder}
            layout = replace(layout, sets=tuple(sets), aside={**layout.aside, **aside})
    return layout


def folders_below(layout: Layout, option: str, said: Sequence[str], recorded: Collection[str]) -> Iterator[str]:
    """Folders that ``--masks`` or ``--controls`` names, as names below the root; other words as they are.

    Raises:
        UsageError: One is not there.
    """
    root = layout.root.absolute()
    for one in filter(None, said):
        places = (Path(os.path.abspath(root / one)), Path(os.path.abspath(one)))  # noqa: PTH100 - links stay
        below = next((place for place in places if place.is_dir() and root in place.parents), None)
        is_word = one == NONE or (one == ALPHA and option == "masks")
        if not is_word and below is None and one not in recorded:
            raise UsageError(
                f"--{option}={one}: no such folder in {layout.root}",
                why="names of files are kept below the folder of the data",
                fix=f"give a folder in it, or name both in a latentcache.toml: {option} = {one!r} beside path",
            )
        yield one if is_word or below is None else below.relative_to(root).as_posix()
