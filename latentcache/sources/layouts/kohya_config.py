"""kohya's ``dataset.toml`` (or ``.json``): ``[general]``, ``[[datasets]]``, ``[[datasets.subsets]]``.

Rule (kohya-ss/sd-scripts 48d368f, ``library/config_util.py``, ``BlueprintGenerator``): a setting of a subset is
looked for in the subset, in its data set, in ``general``. A subset with ``metadata_file`` has the images and captions
of that file (``FineTuningDataset``), one with ``conditioning_data_dir`` has control images, others are folders
(``DreamBoothDataset``; extension of captions ``.caption`` by default, folders not recursive). Within one data set a
folder counts once, in several it is seen for each of them; fewer repeats than one leave a subset out. With
``enable_wildcard`` one line is drawn, so each is a caption, and one of ``{a|b}``, which stays as it is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from latentcache.errors import count_of
from latentcache.sources.layouts.config import Config, joined, of_folder, of_table, partners
from latentcache.sources.layouts.kohya import caption_rule
from latentcache.sources.layouts.partners import ALPHA
from latentcache.sources.layouts.sets import CaptionRule, ImageSet, Layout

WORD = "kohya-config"
NAMES = ("dataset.toml", "dataset_config.toml")
_USED = ("image_dir", "num_repeats", "caption_extension", "class_tokens", "is_reg", "metadata_file", "subsets",
         "conditioning_data_dir", "alpha_mask", "enable_wildcard",
         "caption_prefix", "caption_suffix", "caption_separator")  # fmt: skip


def fits(value: Any) -> bool:
    """True if a parsed file has this form."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("datasets"), list)
        and any(isinstance(one, dict) and "subsets" in one for one in value["datasets"])
    )


def read(config: Config, base: Path | None) -> Layout:
    """The layout that a file describes."""
    parts, general = list[Layout](), config.value.get("general", {})
    config.take(general, _USED)
    for number, dataset in enumerate(config.value["datasets"]):
        config.take(dataset, _USED)
        seen = set[str]()
        for subset in dataset.get("subsets", []):
            config.take(subset, {*_USED, *general, *dataset})
            said = {**general, **dataset, **subset}
            own = str(said.get("metadata_file") or said.get("image_dir"))
            repeats = int(said.get("num_repeats", 1))
            if own in seen or repeats < 1:
                why = "it is there twice in one data set" if own in seen else "num_repeats is less than 1"
                config.note(f"subset {own} is left out, as by the trainer: {why}")
                continue
            seen.add(own)
            named = [("conditioning_data_dir", path)] if (path := said.get("conditioning_data_dir")) else []
            masks = [("alpha_mask", ALPHA)] if said.get("alpha_mask") else []
            further, paired = partners(config, {"controls": named, "masks": masks})
            parts += further
            parts.append(_part(config, said, name=f"{number}:{own}", repeats=repeats, paired=paired,
                               balance=f"{number}:{config.path}"))  # fmt: skip
    subsets = sum(len(part.sets) for part in parts)
    return joined(config, WORD, f"{config.path.name} has {count_of(subsets, 'subsets')} of kohya", parts, base)


def _part(config: Config, said: Mapping[str, Any], **more: Any) -> Layout:
    """One subset."""
    words = "" if said.get("metadata_file") else str(said.get("class_tokens") or "")
    prefix = f"{said['caption_prefix']} " if said.get("caption_prefix") else ""
    suffix = f" {said['caption_suffix']}" if said.get("caption_suffix") else ""
    bare = bool(prefix or suffix) and not words  # ``process_caption`` adds them to an empty caption too
    rule = replace(
        caption_rule(words, extensions=(str(said.get("caption_extension") or ".caption"),)),
        prefix=prefix,
        suffix=suffix,
        bare=bare,
        text_source="class words" if words else "prefix and suffix" if bare else "",
        lines="all" if said.get("enable_wildcard") else "first",
        has_wildcards=bool(said.get("enable_wildcard")),
    )
    if said.get("metadata_file"):
        return _of_metadata(config, said, rule, **more)
    folder, is_reg = config.place(said.get("image_dir"), "image_dir"), bool(said.get("is_reg"))
    return of_folder(folder, rule, recursive=False, class_words=words, is_reg=is_reg, **more)


def _of_metadata(config: Config, said: Mapping[str, Any], rule: CaptionRule, **more: Any) -> Layout:
    """A subset whose images are those of a metadata file."""
    table = config.place(said["metadata_file"], "metadata_file")
    folder = config.place(said["image_dir"], "image_dir") if said.get("image_dir") else table.parent
    return of_table(
        folder,
        table,
        replace(rule, table_stems=True, tag_separator=str(said.get("caption_separator") or ",")),
        **more,
    )


# metadata for fine-tuning: an object of images with ``caption`` and ``tags``, as kohya's scripts merge them. Rule
# (``library/train_util.py``, ``FineTuningDataset``): names are paths, relative to the folder of images or absolute; a
# stem, as those scripts write it, is the first image with it. A caption is ``caption``, the separator (``,``) and
# ``tags``, the first line of it.

_OF_IMAGES = frozenset(("caption", "tags", "train_resolution", "image_size"))


def _fits_metadata(value: Any) -> bool:
    """True if a parsed file has this form."""
    first = next(iter(value.values()), None) if isinstance(value, dict) else None
    return isinstance(first, dict) and bool(_OF_IMAGES & set(first))


def _read_metadata(config: Config, base: Path | None) -> Layout:
    config.take({name: True for one in config.value.values() for name in one}, ("caption", "tags"))
    rule = CaptionRule(table=config.path.name, table_stems=True, tag_separator=",", lines="first")
    part = Layout(word="", why="", root=config.path.absolute().parent, sets=(ImageSet(folder="", captions=rule),))
    why = f"{config.path.name} lists {count_of(len(config.value), 'images')} of kohya"
    return joined(config, METADATA.WORD, why, [part], base)


#: Names of the files: those that kohya's scripts and their documentation use, the last step first.
METADATA = SimpleNamespace(
    WORD="kohya-metadata",
    NAMES=("meta_lat.json", "meta_clean.json", "meta_cap_dd.json", "meta_cap.json"),
    fits=_fits_metadata,
    read=_read_metadata,
)
