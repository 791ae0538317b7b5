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

from latentcache.sources.layouts.config import Config, aside, joined
from latentcache.sources.layouts.partners import ALPHA, INPUTS
from latentcache.sources.layouts.sets import CAPTION_OPTIONS, Layout

WORD = "latentcache"
NAMES = ("latentcache.toml",)
_TEXTS = ("masks", "layout", "split", *CAPTION_OPTIONS, "name")


def fits(value: Any) -> bool:
    """True if a parsed file has this form."""
    return isinstance(value, dict) and isinstance(value.get("sets"), list)


def read(config: Config, base: Path | None, find: Callable[[Path, str, str], Layout]) -> Layout:
    """The layout that a file describes; ``find`` gives the layout of each of its folders.

    Raises:
        SourceError: A folder is missing, or a setting is unknown or of another type.
    """
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
        paired = list[tuple[str, str]]()
        for option, values in (("masks", [said.get("masks")]), ("controls", said.get("controls", []))):
            if len(values) > len(INPUTS[option]):
                raise config.error(f"{option} names {len(values)} folders", f"name {len(INPUTS[option])} at most")
            for role, value in zip(INPUTS[option], filter(None, values), strict=False):
                folder = None if (option, value) == ("masks", ALPHA) else config.place(value, option)
                parts += [aside(folder, INPUTS[option][0])] if folder else []
                paired.append((role, str(folder or "")))
        sets = [
            replace(one, captions=one.captions.with_options(**rule), repeats=one.repeats * said.get("repeats", 1),
                    name=said.get("name", one.name), paired=tuple(paired) or one.paired)
            for one in layout.sets
        ]  # fmt: skip
        parts.append(replace(layout, sets=tuple(sets)))
    return joined(config, WORD, f"{config.path.name} has {len(config.value['sets'])} sets", parts, base)
