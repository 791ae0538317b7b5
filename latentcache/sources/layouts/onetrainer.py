"""OneTrainer's ``concepts.json``: a list of folders with their prompts.

Rule (Nerogar/OneTrainer 23df383, ``modules/util/config/ConceptConfig.py`` and ``DataLoaderText2ImageMixin.py``;
Nerogar/mgds 3a6994a, ``CollectPaths``, ``LoadMultipleTexts``, ``VariationSorting``): ``text.prompt_source`` is
``sample`` (``a.txt``), ``concept`` (the file ``prompt_path``) or ``filename`` (the stem); of several lines one is
drawn, so each is a caption. Images with ``-masklabel`` or ``-condlabel`` are no samples; concepts of the type
``VALIDATION`` are a split. ``balancing`` 2.0 is twice per
epoch with the strategy ``REPEATS``, and a number of samples with ``SAMPLES``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latentcache.errors import UnusableSampleError, count_of
from latentcache.sources.captions import read_caption
from latentcache.sources.layouts.config import Config, joined, of_folder
from latentcache.sources.layouts.sets import CaptionRule, Layout

WORD = "onetrainer"
NAMES = ("concepts.json",)
_USED = ("name", "path", "enabled", "include_subdirectories", "balancing", "balancing_strategy", "repeats", "type",
         "text", "image", "seed", "concept_stats", "__version", "validation_concept")  # fmt: skip
_DEFAULTS = {"tag_delimiter": ",", "keep_tags_count": 1, "tag_dropout_mode": "FULL"}


def fits(value: Any) -> bool:
    """True if a parsed file has this form."""
    names = {"text", "image", "include_subdirectories", "balancing", "enabled"}
    found = isinstance(value, list) and len(value) > 0 and all(isinstance(one, dict) for one in value)
    return found and all("path" in one and names & set(one) for one in value)


def read(config: Config, base: Path | None) -> Layout:
    """The layout that a file describes."""
    parts = []
    for one in config.value:
        off = "disabled" if not one.get("enabled", True) else "" if _balancing(one) else "balancing 0"
        if off:
            config.ignored[f"{one.get('name') or one['path']} ({off})"] += 1
        else:
            parts.append(_part(config, one))
    return joined(
        config, WORD, f"{config.path.name} has {count_of(len(parts), 'concepts')} of OneTrainer", parts, base
    )


def _part(config: Config, one: Mapping[str, Any]) -> Layout:
    text = one.get("text") or {}
    config.take(one, _USED)
    image = {name: value for name, value in (one.get("image") or {}).items() if name.startswith("enable_")}
    config.take({f"image.{name}": value for name, value in image.items()}, ())
    config.take({k: v for k, v in text.items() if v != _DEFAULTS.get(k)}, ("prompt_source", "prompt_path"))
    kind = str(one.get("type", "STANDARD"))
    return of_folder(
        config.place(one["path"], "path"),
        _rule(config, one, text),
        name=str(one.get("name") or ""),
        recursive=bool(one.get("include_subdirectories")),
        repeats=_repeats(config, one),
        is_reg=kind == "PRIOR_PREDICTION",
        split="validation" if kind == "VALIDATION" or one.get("validation_concept") else "",
    )


def _balancing(one: Mapping[str, Any]) -> float:
    return float(one.get("balancing", one.get("repeats", 1.0)))


def _repeats(config: Config, one: Mapping[str, Any]) -> int:
    said, strategy = _balancing(one), one.get("balancing_strategy", "REPEATS")
    name = one.get("name") or one["path"]
    if strategy != "REPEATS":
        config.note(f"concept {name} asks for {count_of(int(said), 'samples')} per epoch; each image is seen once")
        return 1
    if said != math.floor(said) or said < 1:
        config.note(f"concept {name} asks for {said:g} repeats; whole numbers from 1 are used")
    return max(1, math.floor(said))


def _rule(config: Config, one: Mapping[str, Any], text: Mapping[str, Any]) -> CaptionRule:
    source = text.get("prompt_source", "sample")
    if source == "filename":
        return CaptionRule(extensions=(), from_name=str)
    if source == "concept":
        path = config.place(text.get("prompt_path"), "text.prompt_path")
        try:
            said = read_caption(str(path.parent), path.name)[0]
        except UnusableSampleError as error:
            raise config.error(f"text.prompt_path: {error.what}", error.fix) from error
        return CaptionRule(extensions=(), text=said, lines="all", text_source="concept prompt")
    return CaptionRule(extensions=(".txt",), lines="all")
