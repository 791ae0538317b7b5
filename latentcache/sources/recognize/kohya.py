"""kohya's sd-scripts: folders named ``10_name class``, ``dataset.toml``, and metadata for fine-tuning.

Rules (kohya-ss/sd-scripts 48d368f, ``library/config_util.py``, ``library/train_util.py``):
- Folders: the number before the first ``_`` is the repeats, the rest are the class words. Other folders are ignored.
  A caption is the first line of the file; without one the class words. Folders of regularization images are in a
  folder of their own (``reg_data_dir``); see ``layout.balanced``.
- ``dataset.toml``: a setting is looked for in the subset, in its data set, in ``general``. A subset with
  ``metadata_file`` has the images and captions of that file. Others are folders, not recursive, with captions in
  ``.caption`` files by default. ``conditioning_data_dir`` has control images. Within one data set a folder counts
  once, in several data sets once for each, or once for all if a build makes their resolutions. Fewer repeats than
  one leave a subset out. With ``enable_wildcard`` one line is drawn, so each is a caption; ``{a|b}`` stays as it is.
- Metadata: an object of images, each with ``caption`` and ``tags``; the first line of both joined is the caption.
  Names are paths, relative to the folder of images or absolute, or stems: the first image with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentcache.errors import count_of
from latentcache.sources.inventory import Folder, Inventory
from latentcache.sources.layout import CaptionRule, ImageSet, Layout
from latentcache.sources.options import SourceOptions
from latentcache.sources.partners import ALPHA
from latentcache.sources.recognize.config import Config, Trainer, joined, of_set, partners, pixels_in

WORD = "kohya"
#: Names of the folders that hold training images and regularization images, as kohya_ss makes them.
IMAGE_FOLDERS, REG_FOLDERS = ("img", "image", "images"), ("reg", "regularization")
_NAME = re.compile(r"([0-9]+)_(.*)", re.DOTALL)
#: More repeats than that are rather a year or a number of a series.
_MOST = 1000
_USED = ("image_dir", "num_repeats", "caption_extension", "class_tokens", "is_reg", "metadata_file", "subsets",
         "conditioning_data_dir", "alpha_mask", "enable_wildcard",
         "caption_prefix", "caption_suffix")  # fmt: skip
#: Settings of a type; the trainer takes no other.
_TYPES = {"num_repeats": int, "is_reg": bool, "alpha_mask": bool, "enable_wildcard": bool} | dict.fromkeys(
    ("caption_extension", "class_tokens", "caption_prefix", "caption_suffix", "caption_separator"), str
)
_OF_IMAGES = frozenset(("caption", "tags", "train_resolution", "image_size"))


def _rule(class_words: str, extensions: tuple[str, ...] = (".txt", ".caption")) -> CaptionRule:
    source = "class words" if class_words else ""
    return CaptionRule(extensions=extensions, lines="first", text=class_words, text_source=source)


# folders


def recognize(inventory: Inventory, options: SourceOptions) -> Layout | None:
    """Folders named ``N_class words`` that hold images, in DATA or in its folder ``img``."""
    base = next((name for name in ("", *IMAGE_FOLDERS) if _named(inventory, name)), None)
    if base is None:
        return None
    train = _named(inventory, base)
    reg = [folder for name in REG_FOLDERS if name in inventory.top.folders for folder in _named(inventory, name)]
    sets = list[ImageSet]()
    for number, folder in enumerate([*train, *reg]):
        repeats, _, words = folder.path.rpartition("/")[2].partition("_")
        more: dict[str, Any] = {"repeats": int(repeats), "class_words": words, "is_reg": number >= len(train)}
        rule = _rule(words)
        sets.append(ImageSet(folder=folder.path, recursive=False, balance=str(inventory.root), captions=rule, **more))
    first = sets[0]
    why = f"{first.folder}/ reads as {first.repeats} repeats of {first.class_words or 'no class words'!r}"
    return Layout(
        word=WORD, why=why, root=inventory.root, sets=tuple(sets), doubt=_doubt(inventory, base, [*train, *reg])
    )


def _named(inventory: Inventory, base: str) -> list[Folder]:
    if base and base not in inventory.top.folders:
        return []
    names = [
        name for name in inventory.folder(base).folders if (match := _NAME.fullmatch(name)) and int(match[1]) >= 1
    ]
    folders = [inventory.folder(f"{base}/{name}" if base else name) for name in names]
    return [folder for folder in folders if folder.images]


def _doubt(inventory: Inventory, base: str, named: list[Folder]) -> str:
    """Return a doubt: images that kohya would leave out, or numbers that are hardly repeats."""
    numbers = [folder.path.rpartition("/")[2].partition("_")[0] for folder in named]
    odd = [number for number in numbers if number.startswith("0") or int(number) > _MOST]
    if odd:
        return f"{odd[0]} is hardly a number of repeats"
    used, top = {folder.path for folder in named}, inventory.folder(base)
    if top.images:
        return count_of(top.images, "images are in no such folder")
    paths = [f"{base}/{name}" if base else name for name in top.folders]
    others = [inventory.folder(path) for path in paths if path not in used]
    left = next((folder for folder in others if folder.images), None)
    return f"{count_of(left.images, 'images')} in {left.path}/ would be left out" if left else ""


# configurations


def _read_config(config: Config, base: Path | None, _: Any) -> Layout:
    parts, general = list[Layout](), config.value.get("general", {})
    config.take(general, _USED)
    seen = dict[str, Any]()
    for number, dataset in enumerate(config.value["datasets"]):
        config.take(dataset, _USED)
        seen = seen if config.is_followed else {}
        for subset in dataset.get("subsets", []):
            config.take(subset, {*_USED, *general, *dataset})
            entries = {**general, **dataset, **subset}
            for name in _TYPES.keys() & entries:
                if type(entries[name]) is not _TYPES[name]:
                    raise TypeError(f"{name}: expected {_TYPES[name].__name__}, found {entries[name]!r}")
            path = str(entries.get("metadata_file") or entries.get("image_dir"))
            repeats, resolution = entries.get("num_repeats", 1), entries.get("resolution")
            if seen.get(path, resolution) != resolution:
                continue  # the build makes all resolutions of a folder
            if path in seen or repeats < 1:
                why = "it is there twice in one data set" if path in seen else "num_repeats is less than 1"
                config.note(f"subset {path} is left out, as by the trainer: {why}")
                continue
            seen[path] = resolution
            config.resolutions.update(pixels_in(entries))
            controls = entries.get("conditioning_data_dir")
            named = [("conditioning_data_dir", controls)] if controls else []
            masks = [("alpha_mask", ALPHA)] if entries.get("alpha_mask") else []
            paired, balance = partners(config, {"controls": named, "masks": masks}), f"{number}:{config.path}"
            more: dict[str, Any] = {"name": f"{number}:{path}", "paired": paired, "balance": balance}
            parts.append(_subset(config, entries, repeats=repeats, **more))
    subsets = count_of(sum(len(part.sets) for part in parts), "subsets")
    return joined(config, CONFIG.word, f"{config.path.name} has {subsets} of kohya", parts, base)


def _subset(config: Config, entries: Mapping[str, Any], **more: Any) -> Layout:
    words = "" if entries.get("metadata_file") else str(entries.get("class_tokens") or "")
    prefix = f"{entries['caption_prefix']} " if entries.get("caption_prefix") else ""
    suffix = f" {entries['caption_suffix']}" if entries.get("caption_suffix") else ""
    bare = bool(prefix or suffix) and not words  # ``process_caption`` adds them to an empty caption too
    rule = replace(
        _rule(words, (str(entries.get("caption_extension") or ".caption"),)),
        prefix=prefix,
        suffix=suffix,
        bare=bare,
        text_source="class words" if words else "prefix and suffix" if bare else "",
        lines="all" if entries.get("enable_wildcard") else "first",
    )
    if not entries.get("metadata_file"):
        folder, is_reg = config.place(entries.get("image_dir"), "image_dir"), bool(entries.get("is_reg"))
        return of_set(folder, rule, recursive=False, class_words=words, is_reg=is_reg, **more)
    table = config.place(entries["metadata_file"], "metadata_file")
    folder = config.place(entries["image_dir"], "image_dir") if entries.get("image_dir") else table.parent
    rule = replace(rule, table_stems=True, tag_separator=str(entries.get("caption_separator") or ","))
    return of_set(folder, rule, table, **more)


def _read_metadata(config: Config, base: Path | None, _: Any) -> Layout:
    images = [entry for entry in config.value.values() if isinstance(entry, dict)]
    config.take({name: True for entry in images for name in entry}, ("caption", "tags"))
    table = config.path.absolute()
    part = of_set(table.parent, CaptionRule(table_stems=True, tag_separator=",", lines="first"), table)
    why = f"{config.path.name} lists {count_of(len(config.value), 'images')} of kohya"
    return joined(config, METADATA.word, why, [part], base)


def _is_config(value: Any) -> bool:
    datasets = value.get("datasets") if isinstance(value, dict) else None
    return isinstance(datasets, list) and any(
        isinstance(dataset, dict) and "subsets" in dataset for dataset in datasets
    )


def _is_metadata(value: Any) -> bool:
    first = next(iter(value.values()), None) if isinstance(value, dict) else None
    return isinstance(first, dict) and bool(_OF_IMAGES & set(first))


CONFIG = Trainer("kohya-config", ("dataset.toml", "dataset_config.toml"), _is_config, _read_config)
#: Names of the files: those that kohya's scripts and their documentation use, the last step first.
METADATA = Trainer(
    "kohya-metadata",
    ("meta_lat.json", "meta_clean.json", "meta_cap_dd.json", "meta_cap.json"),
    _is_metadata,
    _read_metadata,
)
