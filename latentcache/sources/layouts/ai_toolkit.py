"""ostris/ai-toolkit: the ``datasets`` of a job file (YAML or JSON), and folders with a ``default.txt``.

Rule (ostris/ai-toolkit 27a03a9, ``toolkit/config_modules.py``, ``DatasetConfig``; ``toolkit/data_loader.py``,
``AiToolkitDataset``; ``toolkit/dataloader_mixins.py``, ``CaptionProcessingDTOMixin``): folders are recursive, but for
``_controls``; an image without a text in its file of ``caption_ext`` has ``default_caption``; ``[trigger]`` and
``[name]`` become the trigger word, which is put in front of captions without it, but for regularization images.
``dataset_path`` may be a JSON object of paths with ``caption``. A folder's ``default.txt`` is the caption of its
other images (``CaptionMixin``, which its older data set uses).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentcache.sources.layouts.config import Config, aside, joined, of_folder, of_table, partners
from latentcache.sources.layouts.partners import ALPHA
from latentcache.sources.layouts.sets import CaptionRule, ImageSet, Layout
from latentcache.sources.layouts.tree import Tree

WORD, FOLDER_WORD = "ai-toolkit-job", "ai-toolkit"
NAMES = ()
_SHARED = "default.txt"
_CONTROLS = ("control_path", "control_path_1", "control_path_2", "control_path_3")
_USED = ("folder_path", "dataset_path", "caption_ext", "default_caption", "trigger_word", "num_repeats", "is_reg",
         "alpha_mask", "mask_path", *_CONTROLS)  # fmt: skip
_DEFAULTS = {"type": "image", "num_frames": 1, "buckets": True}


def recognize(tree: Tree) -> Layout | None:
    """A folder of images with a ``default.txt``."""
    places = [folder.path for folder in tree.below(depth=1) if _SHARED in folder.others and folder.images]
    if not places:
        return None
    where = f"{places[0]}/{_SHARED}" if places[0] else _SHARED
    why = f"{where} is the caption of images of its folder without one"
    one = ImageSet(folder="", captions=CaptionRule(shared=(_SHARED,)))
    return Layout(word=FOLDER_WORD, why=why, root=tree.root, sets=(one,))


def fits(value: Any) -> bool:
    """True if a parsed file has this form."""
    return any(True for _ in _sets(value))


def _sets(value: Any) -> list[Mapping[str, Any]]:
    """The data sets of a job, each with the trigger word of its process."""
    config = value.get("config") if isinstance(value, dict) else None
    found = [
        one for one in (config.get("process") if isinstance(config, dict) else None) or () if isinstance(one, dict)
    ]
    sets = [
        {
            "trigger_word": process.get("trigger_word"),
            **{name: said for name, said in one.items() if said is not None},
        }
        for process in found
        for one in process.get("datasets") or ()
        if isinstance(one, dict)
    ]
    return [one for one in sets if one.get("folder_path") or one.get("dataset_path")]


def read(config: Config, base: Path | None) -> Layout:
    """The layout that a file describes.

    Raises:
        SourceError: A folder is missing, or there are too many of control images.
    """
    config.has_pairs = False
    sets = _sets(config.value)
    parts = [part for one in sets for part in _parts(config, one)]
    return joined(config, WORD, f"{config.path.name} has {len(sets)} data sets of ai-toolkit", parts, base)


def _parts(config: Config, one: Mapping[str, Any]) -> list[Layout]:
    """A data set and the folders of its masks and control images."""
    config.take({name: said for name, said in one.items() if _DEFAULTS.get(name) != said}, _USED)
    name = "dataset_path" if one.get("dataset_path") else "folder_path"
    place = config.place(one[name], name)
    own = place if place.is_dir() else place.parent
    masks = [("mask_path", path) for path in _listed(one.get("mask_path"))]
    masks = [("alpha_mask", ALPHA)] if one.get("alpha_mask") else masks
    controls = [(key, path) for key in _CONTROLS for path in _listed(one.get(key))]
    further, paired = partners(config, {"masks": masks, "controls": controls})
    if (own / "_controls").is_dir():
        further.append(aside(own / "_controls", "control"))
    more: dict[str, Any] = {
        "repeats": max(int(one.get("num_repeats", 1)), 1),
        "is_reg": bool(one.get("is_reg")),
        "paired": paired,
    }
    rule = _rule(one)
    if place.is_dir():
        return [of_folder(place, rule, **more), *further]
    return [of_table(own, place, replace(rule, tag_separator=", "), **more), *further]


def _listed(said: Any) -> list[Any]:
    return said if isinstance(said, list) else [said] if said else []


def _rule(one: Mapping[str, Any]) -> CaptionRule:
    trigger, default = str(one.get("trigger_word") or ""), str(one.get("default_caption") or "")
    added = "" if one.get("is_reg") else trigger
    return CaptionRule(
        extensions=("." + str(one.get("caption_ext") or "txt").removeprefix("."),),
        text=default or added,
        text_source="default_caption" if default else "trigger word" if added else "",
        trigger=trigger,
        has_trigger=not one.get("is_reg"),
    )
