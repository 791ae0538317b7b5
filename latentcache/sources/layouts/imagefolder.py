"""Metadata tables as the Hugging Face ``imagefolder`` builder reads them: in DATA, and in any folder below it.

Rule (huggingface/datasets b7cb10b, ``packaged_modules/folder_based_builder/folder_based_builder.py``): file names are
relative to the folder of the table; if there is a table anywhere, images without a row are not used. A folder named
``train``, ``validation`` or ``test`` makes a split.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from latentcache.errors import TableError, count_of
from latentcache.sources.corpus import SPLITS
from latentcache.sources.layouts.sets import CaptionRule, ImageSet, Layout
from latentcache.sources.layouts.tree import Tree
from latentcache.sources.walk import TABLE_NAMES

WORD = "imagefolder"


def recognize(tree: Tree) -> Layout | None:
    """A metadata table in DATA or below it.

    Raises:
        TableError: There are two in one folder.
    """
    sets = []
    for folder in tree.below():
        names = [name for name in TABLE_NAMES if name in folder.others]
        if len(names) > 1:
            raise _two(tree.root / folder.path, names)
        sets += [_set(folder.path, name) for name in names]
    if not sets:
        return None
    tables = [one.captions.table for one in sets]
    more = f" and {count_of(len(tables) - 1, 'more tables')}" if len(tables) > 1 else ""
    return Layout(
        word=WORD,
        why=f"{tables[0]}{more} list the images" if more else f"{tables[0]} lists the images",
        root=tree.root,
        sets=tuple(sets),
    )


def _set(folder: str, name: str) -> ImageSet:
    parts = [SPLITS[part.lower()] for part in folder.split("/") if part.lower() in SPLITS]
    table = f"{folder}/{name}" if folder else name
    return ImageSet(folder=folder, captions=CaptionRule(table=table), split=parts[-1] if parts else "")


def _two(folder: Path, names: list[str]) -> TableError:
    second = folder / names[1]
    return TableError(
        f"a data folder has two tables: {' and '.join(names)}",
        where=str(folder),
        why="expected one: both would say which images are used and their captions",
        fix=f"remove or rename one, e.g. `mv {shlex.quote(str(second))} {shlex.quote(f'{second}.off')}`",
    )
