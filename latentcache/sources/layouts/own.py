"""``latentcache.toml``: several data sets as one, each a folder, an archive or a configuration of any layout.

[[sets]]
path = "portraits"          # beside this file; required
layout = "kohya"            # as --layout; split = "train" as --split
repeats = 2                 # times those of the layout itself
caption_ext = ".txt"        # as --caption-ext; also default_caption, caption_prefix, caption_suffix, caption_lines
masks = "masks"             # folder of masks, or "alpha"
controls = ["edges"]        # folders of control images
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentcache.errors import count_of
from latentcache.sources.layouts.config import Config, joined, partners
from latentcache.sources.layouts.sets import CAPTION_OPTIONS, Layout

WORD = "latentcache"
NAMES = ("latentcache.toml",)
_TEXTS = ("masks", "layout", "split", *CAPTION_OPTIONS, "name")


def fits(value: Any) -> bool:
    """True if a parsed file has this form."""
    return isinstance(value, dict) and isinstance(value.get("sets"), list)


def read(config: Config, base: Path | None, find: Callable[[Path, str, str], Layout]) -> Layout:
    """The layout that a file describes; ``find`` gives the layout of each of its folders."""
    parts = []
    for name in set(config.value) - {"sets"}:
        raise config.error(f"unknown table {name!r}", "keep [[sets]] only")
    for said in config.value["sets"]:
        for name, value in said.items():
            wanted = {"repeats": int, "controls": list}.get(name, str)
            if name not in (*_TEXTS, "path", "repeats", "controls") or type(value) is not wanted or value == 0:
                names = ", ".join(("path", "repeats", "controls", *_TEXTS))
                raise config.error(f"{name} = {value!r} is no setting of a set", f"expected {names}")
        layout = find(config.place(said.get("path"), "path"), said.get("layout", ""), said.get("split", ""))
        rule = {name: said[name] for name in CAPTION_OPTIONS if name in said}
        masks = [("masks", said["masks"])] if said.get("masks") else []
        controls = [("controls", one) for one in said.get("controls", []) if one]
        further, paired = partners(config, {"masks": masks, "controls": controls})
        sets = [
            replace(one, captions=one.captions.with_options(**rule), repeats=one.repeats * said.get("repeats", 1),
                    name=said.get("name", one.name), paired=paired or one.paired)
            for one in layout.sets
        ]  # fmt: skip
        parts += [*further, replace(layout, sets=tuple(sets))]
    return joined(config, WORD, f"{config.path.name} has {count_of(len(config.value['sets']), 'sets')}", parts, base)
