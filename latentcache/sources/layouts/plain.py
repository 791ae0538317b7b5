"""Folders of images with caption files beside them, nested as one likes; also with one caption for all of a folder.

``default.txt``: ai-toolkit (ostris/ai-toolkit, ``toolkit/dataloader_mixins.py``, ``CaptionMixin``) gives its text to
images of the folder that have no caption file.
"""

from __future__ import annotations

from latentcache.sources.layouts.sets import FOLDER, CaptionRule, ImageSet, Layout
from latentcache.sources.layouts.tree import Tree

WORD, SHARED_WORD = FOLDER, "ai-toolkit"
SHARED = "default.txt"


def recognize(tree: Tree) -> Layout:
    """Every folder is one."""
    return Layout(
        word=WORD,
        why="images, with caption files beside them if there are any",
        root=tree.root,
        sets=(ImageSet(folder=""),),
    )


def recognize_shared(tree: Tree) -> Layout | None:
    """A folder of images with a ``default.txt``."""
    places = [folder.path for folder in tree.below(depth=1) if SHARED in folder.others and folder.images]
    if not places:
        return None
    where = f"{places[0]}/{SHARED}" if places[0] else SHARED
    rule = CaptionRule(extensions=(".txt", ".caption", ".json"), shared=(SHARED,))
    return Layout(
        word=SHARED_WORD,
        why=f"{where} is the caption of images of its folder without one",
        root=tree.root,
        sets=(ImageSet(folder="", captions=rule),),
    )
