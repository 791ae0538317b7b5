"""Images in archives: WebDataset tars, parquet files as the Hugging Face hub has them, data sets that were saved.

Splits (huggingface/datasets 5.2, ``data_files.py``): ``data/train-00000-of-00001.parquet`` is of the split ``train``;
``save_to_disk`` of a dict of data sets makes a folder for each split. Of several splits one is read: the one that is
asked for, else ``train``. Whether a file holds images is seen in the head of the first ones of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from latentcache.errors import SourceError, UnusableSampleError, count_of
from latentcache.sources.archives.entries import shows_images
from latentcache.sources.archives.tars import ARROW, PARQUET, TAR, is_packed, kind_of_archive
from latentcache.sources.corpus import (
    DICT_NAME,
    INFO_NAME,
    STATE_NAME,
    is_saved,
    saved_files,
    saved_splits,
    splits_of,
)
from latentcache.sources.layouts.sets import ImageSet, Layout, unfit
from latentcache.sources.layouts.tree import Tree
from latentcache.sources.walk import TABLE_NAMES

TARS_WORD, ROWS_WORD, SAVED_WORD = "webdataset", "parquet", "saved"
#: Archives of one kind whose heads are read before they are taken for something else.
_LOOKED_AT = 3


def recognize_tars(tree: Tree) -> Layout | None:
    """Tars that hold images, or nothing but tars that are compressed."""
    names = _named(tree, lambda name: kind_of_archive(name) == TAR)
    packed = _named(tree, is_packed)
    if not (names and _hold_images(tree.root, names, TAR)) and not (packed and not names and _is_alone(tree, packed)):
        return None
    return _layout(
        tree, TARS_WORD, [ImageSet(folder="", archives=TAR, files=frozenset((*names, *packed)))], names or packed
    )


def recognize_rows(tree: Tree) -> Layout | None:
    """Parquet files with a column of images."""
    names = _named(tree, lambda name: kind_of_archive(name) == PARQUET)
    if not names or find_spec("pyarrow") is None or not _hold_images(tree.root, names, PARQUET):
        return None
    return _layout(tree, ROWS_WORD, [_set(split, files, PARQUET) for split, files in _by_split(names)], names)


def recognize_saved(tree: Tree) -> Layout | None:
    """A data set that ``datasets`` saved, with a column of images."""
    if not is_saved(tree.root) or find_spec("pyarrow") is None:
        return None
    try:
        splits = saved_splits(tree.root)
        found = [(split, list(saved_files(tree.root, split))) for split in splits]
    except SourceError:
        return None  # who reads it as records says why
    names = [name for _, files in found for name in files]
    if not _hold_images(tree.root, names, ARROW):
        return None
    used = {f"{split}/{name}" if split else name for split in ("", *splits) for name in (STATE_NAME, INFO_NAME)}
    layout = _layout(tree, SAVED_WORD, [_set(split, files, ARROW) for split, files in found], names)
    return replace(layout, used=frozenset((*used, DICT_NAME)), doubt="")


#: Word -> how it is recognized.
FORMS: dict[str, Callable[[Tree], Layout | None]] = {
    TARS_WORD: recognize_tars,
    ROWS_WORD: recognize_rows,
    SAVED_WORD: recognize_saved,
}


def recognize(tree: Tree) -> Layout | None:
    """The first form of archives that a folder has."""
    return next((found for ask in FORMS.values() if (found := ask(tree)) is not None), None)


def is_of_images(path: Path) -> bool:
    """True if a file is an archive whose head shows images, or cannot be read."""
    kind = kind_of_archive(path.name)
    is_readable = kind == TAR or (kind and find_spec("pyarrow") is not None)
    return bool(is_readable) and _hold_images(path.parent, [path.name], kind)


def recognize_file(path: Path, word: str = "") -> Layout:
    """The layout of one archive; nothing beside it is listed.

    Raises:
        UsageError: ``word`` is another layout.
    """
    kind = kind_of_archive(path.name)
    own = {TAR: TARS_WORD, PARQUET: ROWS_WORD, ARROW: SAVED_WORD}[kind]
    if word not in ("", own):
        raise unfit(path, word, f"it is a file of the layout {own}")
    one = ImageSet(folder="", archives=kind, files=frozenset((path.name,)))
    return Layout(word=own, why=f"{path.name} holds images", root=path.parent, sets=(one,), folders=())


def _named(tree: Tree, wanted: Callable[[str], bool]) -> list[str]:
    """Names below the root, in byte order, of files that are no metadata table."""
    return sorted(
        f"{folder.path}/{name}" if folder.path else name
        for folder in tree.below()
        for name in folder.others
        if wanted(name) and name not in TABLE_NAMES
    )


def _is_alone(tree: Tree, names: Sequence[str]) -> bool:
    """True if there is nothing else than these files."""
    return sum(folder.images + len(folder.others) for folder in tree.below()) == len(names)


def _hold_images(root: Path, names: Sequence[str], kind: str) -> bool:
    """True if one of the first archives does; if none can be read, so that somebody says why."""
    read = False
    for name in names[:_LOOKED_AT]:
        try:
            if shows_images(root / name, kind):
                return True
            read = True
        except UnusableSampleError:
            continue
    return bool(names) and not read


def _by_split(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(split, files)."""
    pairs = sorted(zip(splits_of(names), names, strict=True))
    return [(split, [name for _, name in some]) for split, some in groupby(pairs, key=lambda pair: pair[0])]


def _set(split: str, files: Sequence[str], kind: str) -> ImageSet:
    return ImageSet(folder="", name=split, split=split, archives=kind, files=frozenset(files))


def _layout(tree: Tree, word: str, sets: Sequence[ImageSet], names: Sequence[str]) -> Layout:
    images = sum(folder.images for folder in tree.below())
    more = f" and {count_of(len(names) - 1, 'more files')}" if len(names) > 1 else ""
    return Layout(
        word=word,
        why=f"{names[0]}{more} hold images" if more else f"{names[0]} holds images",
        root=tree.root,
        sets=tuple(sets),
        doubt=f"{count_of(images, 'images')} beside the archives would be left out" if images else "",
    )
