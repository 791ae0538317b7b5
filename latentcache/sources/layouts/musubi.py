"""musubi-tuner's ``dataset.toml``: ``[general]`` and ``[[datasets]]``, each a folder or a list of images.

Rule (kohya-ss/musubi-tuner 30c658c, ``dataset/config_utils.py``, ``datasources.py``, ``media_utils.py``): a setting
of a data set is looked for there, then in ``general``. ``image_directory`` is not recursive, and only images with a
caption file of ``caption_extension`` are used. Lines of ``image_jsonl_file`` have ``image_path`` and ``caption``;
``video`` in place of ``image`` in these names has clips. ``control_directory`` has control images.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latentcache.sources.layouts.config import Config, joined, of_folder, of_table, partners
from latentcache.sources.layouts.sets import CaptionRule, Layout

WORD = "musubi"
NAMES = ("dataset.toml", "dataset_config.toml")
_FOLDERS, _LISTS = ("image_directory", "video_directory"), ("image_jsonl_file", "video_jsonl_file")
_USED = (*_FOLDERS, *_LISTS, "caption_extension", "num_repeats", "control_directory", "cache_directory", "batch_size",
         "enable_bucket")  # fmt: skip


def fits(value: Any) -> bool:
    """True if a parsed file has this form."""
    found = value.get("datasets") if isinstance(value, dict) else None
    return isinstance(found, list) and any(isinstance(one, dict) and {*_FOLDERS, *_LISTS} & set(one) for one in found)


def read(config: Config, base: Path | None) -> Layout:
    """The layout that a file describes.

    Raises:
        SourceError: A folder or list is missing, or nothing is left.
    """
    parts, general = list[Layout](), config.value.get("general", {})
    for one in config.value["datasets"]:
        said = {**general, **one}
        config.take(said, _USED)
        named = [("control_directory", path)] if (path := said.get("control_directory")) else []
        further, paired = partners(config, {"controls": named})
        parts += [*further, _part(config, said, paired)]
    sets = sum(len(part.sets) for part in parts)
    return joined(config, WORD, f"{config.path.name} has {sets} data sets of musubi-tuner", parts, base)


def _part(config: Config, said: Mapping[str, Any], paired: tuple[tuple[str, str], ...]) -> Layout:
    """One data set of images or clips."""
    repeats, extension = int(said.get("num_repeats", 1)), said.get("caption_extension")
    name = next((name for name in (*_FOLDERS, *_LISTS) if name in said), _FOLDERS[0])
    folder = config.place(said.get(name), name)
    if name in _LISTS:
        rule = CaptionRule(table_columns=(f"{name[:5]}_path", "caption"))
        return of_table(folder.parent, folder, rule, repeats=repeats)
    rule = CaptionRule(extensions=(str(extension or ".txt"),), required=True)
    return of_folder(folder, rule, recursive=False, repeats=repeats, paired=paired)
