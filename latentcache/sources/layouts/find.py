"""Which layout DATA has: every convention is asked, and two that fit are an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from latentcache.sources.layouts import imagefolder, kohya, plain
from latentcache.sources.layouts.sets import Layout, ambiguous, unfit
from latentcache.sources.layouts.tree import Tree
from latentcache.sources.walk import TABLE_NAMES

#: Conventions of folders by their word; the plain folder is the last resort.
FOLDERS: dict[str, Callable[[Tree], Layout | None]] = {
    kohya.WORD: kohya.recognize,
    imagefolder.WORD: imagefolder.recognize,
    plain.SHARED_WORD: plain.recognize_shared,
    plain.WORD: plain.recognize,
}
#: Words of ``--layout``.
WORDS = tuple(FOLDERS)


def find_layout(data: Path, word: str = "") -> Layout:
    """How a folder is read.

    Args:
        data: The folder.
        word: One of ``WORDS``; empty: DATA decides.

    Raises:
        UsageError: There is no such layout, or DATA does not have it.
        SourceAmbiguousError: DATA can be read in two ways.
        TableError: A folder has two metadata tables.
    """
    tree = Tree(data)
    if word:
        if word not in FOLDERS:
            raise unfit(data, word, f"expected one of {', '.join(WORDS)}")
        found = FOLDERS[word](tree)
        if found is None:
            raise unfit(data, word, "nothing in the folder has this form")
        return found
    fitting = [one for name, ask in FOLDERS.items() if name != plain.WORD and (one := ask(tree)) is not None]
    if not fitting:
        return plain.recognize(tree)
    readings = [(one.word, one.why) for one in fitting]
    doubts = [one.doubt for one in fitting if one.doubt]
    if len(fitting) == 1 and doubts:
        readings.append((plain.WORD, doubts[0]))
    if len(readings) > 1:
        raise ambiguous(data, readings)
    return fitting[0]


def has_images(data: Path) -> bool:
    """True if any folder of the first levels holds an image or a metadata table."""
    return any(folder.images or folder.others.intersection(TABLE_NAMES) for folder in Tree(data).below())
