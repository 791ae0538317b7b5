"""Folders of ostris/ai-toolkit: a folder's ``default.txt`` is the caption of its images without one.

Rule (ostris/ai-toolkit 27a03a9, ``toolkit/dataloader_mixins.py``, ``CaptionMixin``, which its older data set uses).
"""

from __future__ import annotations

from latentcache.sources.layouts.sets import CaptionRule, ImageSet, Layout
from latentcache.sources.layouts.tree import Tree

WORD = "ai-toolkit"
_SHARED = "default.txt"


def recognize(tree: Tree) -> Layout | None:
    """A folder of images with a ``default.txt``."""
    places = [folder.path for folder in tree.below(depth=1) if _SHARED in folder.others and folder.images]
    if not places:
        return None
    where = f"{places[0]}/{_SHARED}" if places[0] else _SHARED
    why = f"{where} is the caption of images of its folder without one"
    one = ImageSet(folder="", captions=CaptionRule(shared=(_SHARED,)))
    return Layout(word=WORD, why=why, root=tree.root, sets=(one,))
