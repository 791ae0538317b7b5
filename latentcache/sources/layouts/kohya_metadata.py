"""kohya's metadata for fine-tuning: an object of images with ``caption`` and ``tags``, as its scripts merge them.

Rule (kohya-ss/sd-scripts 48d368f, ``library/train_util.py``, ``FineTuningDataset``): names are paths, relative to the
folder of images or absolute; a caption is ``caption``, the separator (``,``) and ``tags``, the first line of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latentcache.sources.layouts.config import Config, joined
from latentcache.sources.layouts.sets import CaptionRule, ImageSet, Layout

WORD = "kohya-metadata"
#: Names that kohya's scripts and their documentation use, the last step first.
NAMES = ("meta_lat.json", "meta_clean.json", "meta_cap_dd.json", "meta_cap.json")
_FIELDS = frozenset(("caption", "tags", "train_resolution", "image_size"))


def fits(value: Any) -> bool:
    """True if a parsed file has this form."""
    first = next(iter(value.values()), None) if isinstance(value, dict) else None
    return isinstance(first, dict) and bool(_FIELDS & set(first))


def read(config: Config, base: Path | None) -> Layout:
    """The layout that a file describes.

    Raises:
        SourceError: It names no image.
    """
    config.take({name: True for one in config.value.values() for name in one}, ("caption", "tags"))
    rule = CaptionRule(table=config.path.name, tag_separator=",", lines="first")
    part = Layout(word="", why="", root=config.path.parent, sets=(ImageSet(folder="", captions=rule),))
    return joined(config, WORD, f"{config.path.name} lists {len(config.value)} images of kohya", [part], base)
