"""Folders as kohya's sd-scripts has them: ``10_name class/`` is seen ten times per epoch, with class words.

Rule (kohya-ss/sd-scripts 48d368f, ``library/config_util.py``, ``generate_dreambooth_subsets_config_by_subdirs``):
what is before the first ``_`` is the number of repeats, the rest are the class words; other folders are ignored.
Captions (``library/train_util.py``, ``DreamBoothDataset``): the first line of the file; without one the class words.
Folders of regularization images are in a folder of their own (``reg_data_dir``); see :func:`balanced`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import count_of
from latentcache.sources.layouts.sets import CaptionRule, ImageSet, Layout
from latentcache.sources.layouts.tree import Folder, Tree

Ints = NDArray[np.int64]
WORD = "kohya"
#: Names of the folders that hold training images and regularization images, as kohya_ss makes them.
IMAGE_FOLDERS, REG_FOLDERS = ("img", "image", "images"), ("reg", "regularization")
_NAME = re.compile(r"([0-9]+)_(.*)", re.DOTALL)
#: More repeats than that are rather a year or a number of a series.
_MOST = 1000


def caption_rule(class_words: str, *, extensions: tuple[str, ...] = (".txt", ".caption")) -> CaptionRule:
    """Where kohya looks for captions."""
    return CaptionRule(
        extensions=extensions,
        face_crops=True,
        lines="first",
        text=class_words,
        text_source="class words" if class_words else "",
    )


def recognize(tree: Tree) -> Layout | None:
    """Folders named ``N_class words`` that hold images, in DATA or in its folder ``img``."""
    base = next((name for name in ("", *IMAGE_FOLDERS) if _named(tree, name)), None)
    if base is None:
        return None
    train = _named(tree, base)
    reg = [one for name in REG_FOLDERS if name in tree.top.folders for one in _named(tree, name)]
    root = str(tree.root)
    sets = (*(_set(one, root, is_reg=False) for one in train), *(_set(one, root, is_reg=True) for one in reg))
    first = sets[0]
    why = f"{first.folder}/ reads as {first.repeats} repeats of {first.class_words or 'no class words'!r}"
    doubt = _doubt(tree, base, [*train, *reg])
    return Layout(word=WORD, why=why, root=tree.root, sets=sets, doubt=doubt)


def _named(tree: Tree, base: str) -> list[Folder]:
    """Folders in a folder that are named so and hold images."""
    if base and base not in tree.top.folders:
        return []
    found = []
    for name in tree.folder(base).folders:
        match = _NAME.fullmatch(name)
        if match and int(match[1]) >= 1:
            folder = tree.folder(f"{base}/{name}" if base else name)
            found += [folder] if folder.images else []
    return found


def balanced(sets: Sequence[ImageSet], sizes: Sequence[int]) -> dict[int, Ints]:
    """Set of regularization images -> repeats of each of its images, in order; 0: left out by the trainer.

    Rule (``library/train_util.py``, ``DreamBoothDataset``): images are taken in order, each with its repeats,
    until they are as many as the training images with theirs; if all are fewer, each in turn is repeated once more.
    """
    found = dict[int, Ints]()
    for name in {one.balance for one in sets} - {""}:
        own = [number for number, one in enumerate(sets) if one.balance == name]
        wanted = sum(sizes[number] * sets[number].repeats for number in own if not sets[number].is_reg)
        reg = [number for number in own if sets[number].is_reg and sizes[number]]
        images = sum(sizes[number] for number in reg)
        missing = wanted - sum(sizes[number] * sets[number].repeats for number in reg)
        before = images_before = 0
        for number in reg if wanted else ():
            each, place = sets[number].repeats, np.arange(sizes[number])
            if missing < 0:
                found[number] = np.where(before + each * place < wanted, each, 0)
            else:
                found[number] = each + missing // images + (images_before + place < missing % images)
            before, images_before = before + sizes[number] * each, images_before + sizes[number]
    return found


def _set(folder: Folder, root: str, *, is_reg: bool) -> ImageSet:
    match = _NAME.fullmatch(folder.path.rpartition("/")[2])
    assert match is not None
    return ImageSet(
        folder=folder.path,
        recursive=False,
        repeats=int(match[1]),
        class_words=match[2],
        is_reg=is_reg,
        balance=root,
        captions=caption_rule(match[2]),
    )


def _doubt(tree: Tree, base: str, named: list[Folder]) -> str:
    """What kohya would leave out, or numbers that are hardly repeats."""
    numbers = [folder.path.rpartition("/")[2].partition("_")[0] for folder in named]
    odd = [number for number in numbers if number.startswith("0") or int(number) > _MOST]
    if odd:
        return f"{odd[0]} is hardly a number of repeats"
    own, top = {folder.path for folder in named}, tree.folder(base)
    if top.images:
        return count_of(top.images, "images are in no such folder")
    others = [f"{base}/{name}" if base else name for name in top.folders]
    left = next((one for path in others if path not in own and (one := tree.folder(path)).images), None)
    return f"{count_of(left.images, 'images')} in {left.path}/ would be left out" if left else ""
