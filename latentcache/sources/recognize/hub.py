"""Data sets as the Hugging Face hub has them, and WebDataset tars.

Metadata tables (huggingface/datasets b7cb10b, ``folder_based_builder.py``): file names are relative to the folder of
the table. If there is a table anywhere, images without a row are not used. A folder named ``train``, ``validation``
or ``test`` makes a split. Archives: ``data/train-00000-of-00001.parquet`` is of the split ``train``; ``save_to_disk``
of a dict of data sets makes a folder for each split. Whether a file holds images is seen in the head of the first
ones of each kind.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from latentcache.errors import SourceError, TableError, UnusableSampleError, count_of
from latentcache.sources.archives.entries import shows_images
from latentcache.sources.archives.tars import ARROW, PACKED, PARQUET, TAR, kind_of_archive
from latentcache.sources.layout import CaptionRule, ImageSet, Layout, unfit
from latentcache.sources.recognize.records import (
    DICT_NAME,
    INFO_NAME,
    STATE_NAME,
    is_saved,
    saved_files,
    saved_splits,
)
from latentcache.sources.splits import SPLITS, splits_of
from latentcache.sources.walk import TABLE_NAMES, Tree

TABLES_WORD = "imagefolder"
#: Kind of archive -> word of its layout.
WORDS = {TAR: "webdataset", PARQUET: "parquet", ARROW: "saved"}
#: Archives of one kind whose heads are read before they are taken for something else.
_LOOKED_AT = 3


def _tables(tree: Tree) -> Layout | None:
    sets = []
    for folder in tree.below():
        names = [name for name in TABLE_NAMES if name in folder.others]
        if len(names) > 1:
            second = tree.root / folder.path / names[1]
            raise TableError(
                f"a data folder has two tables: {' and '.join(names)}",
                where=str(second.parent),
                why="expected one: both would say which images are used and their captions",
                fix=f"remove or rename one, e.g. `mv {shlex.quote(str(second))} {shlex.quote(f'{second}.off')}`",
            )
        parts = [SPLITS[part.lower()] for part in folder.path.split("/") if part.lower() in SPLITS]
        for name in names:
            rule = CaptionRule(table=f"{folder.path}/{name}" if folder.path else name)
            sets.append(ImageSet(folder=folder.path, captions=rule, split=parts[-1] if parts else ""))
    if not sets:
        return None
    why = _listing([one.captions.table for one in sets], "tables", "list the images", "lists the images")
    return Layout(word=TABLES_WORD, why=why, root=tree.root, sets=tuple(sets))


def _tars(tree: Tree) -> Layout | None:
    names, packed = _named(tree, ".tar"), _named(tree, *PACKED)
    files = sum(folder.images + len(folder.others) for folder in tree.below())
    if not (_contain_images(tree.root, names, TAR) or (packed and not names and files == len(packed))):
        return None
    return _layout(tree, TAR, [("", [*names, *packed])], names or packed)


def _rows(tree: Tree) -> Layout | None:
    names = _named(tree, ".parquet")
    if not _contain_images(tree.root, names, PARQUET, unread=not _named(tree, ".jsonl", ".ndjson")):
        return None
    splits = splits_of(names)
    pairs = list(zip(splits, names, strict=True))
    each = [(split, [name for its, name in pairs if its == split]) for split in sorted({*splits})]
    return _layout(tree, PARQUET, each, names)


def _saved(tree: Tree) -> Layout | None:
    """A data set that ``datasets`` saved, with a column of images."""
    if not is_saved(tree.root):
        return None
    try:
        splits = saved_splits(tree.root)
        found = [(split, list(saved_files(tree.root, split))) for split in splits]
    except SourceError:
        return None  # who reads it as records says why
    names = [name for _, files in found for name in files]
    if not _contain_images(tree.root, names, ARROW):
        return None
    used = {f"{split}/{name}" if split else name for split in ("", *splits) for name in (STATE_NAME, INFO_NAME)}
    return replace(_layout(tree, ARROW, found, names), used=frozenset((*used, DICT_NAME)), doubt="")


Recognizer = Callable[[Tree], Layout | None]
#: Word -> how it is recognized.
ARCHIVES: dict[str, Recognizer] = {WORDS[TAR]: _tars, WORDS[PARQUET]: _rows, WORDS[ARROW]: _saved}
FORMS: dict[str, Recognizer] = {TABLES_WORD: _tables, **ARCHIVES}


def is_of_images(path: Path) -> bool:
    """True if a file is an archive whose head shows images, or cannot be read."""
    kind = kind_of_archive(path.name)
    return bool(kind) and _contain_images(path.parent, [path.name], kind)


def recognize_file(path: Path, word: str = "") -> Layout:
    """The layout of one archive; nothing beside it is listed. Raises UsageError if ``word`` is another layout."""
    kind = kind_of_archive(path.name)
    own = WORDS[kind]
    if word not in ("", own):
        raise unfit(path, word, f"it is a file of the layout {own}")
    one = ImageSet(folder="", archives=kind, files=frozenset((path.name,)))
    return Layout(word=own, why=f"{path.name} holds images", root=path.parent, sets=(one,), folders=())


def _named(tree: Tree, *endings: str) -> list[str]:
    """Names below the root, in byte order, of files with these endings that are no metadata table."""
    return sorted(
        f"{folder.path}/{name}" if folder.path else name
        for folder in tree.below()
        for name in folder.others
        if name.lower().endswith(endings) and name not in TABLE_NAMES
    )


def _contain_images(root: Path, names: Sequence[str], kind: str, *, unread: bool = True) -> bool:
    """True if one of the first archives does; ``unread`` if none can be read, so that somebody says why."""
    if not names or (kind != TAR and find_spec("pyarrow") is None):
        return False
    read = False
    for name in names[:_LOOKED_AT]:
        try:
            if shows_images(root / name, kind):
                return True
            read = True
        except UnusableSampleError:
            continue
    return unread and not read


def _layout(tree: Tree, kind: str, splits: Sequence[tuple[str, Sequence[str]]], names: Sequence[str]) -> Layout:
    images = sum(folder.images for folder in tree.below())
    return Layout(
        word=WORDS[kind],
        why=_listing(names, "files", "hold images", "holds images"),
        root=tree.root,
        sets=tuple(
            ImageSet(folder="", name=split, split=split, archives=kind, files=frozenset(files))
            for split, files in splits
        ),
        doubt=f"{count_of(images, 'images')} beside the archives would be left out" if images else "",
    )


def _listing(names: Sequence[str], what: str, several: str, one: str) -> str:
    more = f" and {count_of(len(names) - 1, f'more {what}')} {several}"
    return names[0] + (more if len(names) > 1 else f" {one}")
