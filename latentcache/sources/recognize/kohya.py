"""kohya's sd-scripts: folders named ``10_name class``, and ``dataset.toml``. Metadata for fine-tuning is refused.

Rules (kohya-ss/sd-scripts 48d368f, ``library/config_util.py``, ``library/train_util.py``):
- Folders: the number before the first ``_`` is the repeats, the rest are the class words. Other folders are ignored.
  A caption is the first line of the file; without one the class words. Folders of regularization images are in a
  folder of their own (``reg_data_dir``); see ``layout.balanced``.
- ``dataset.toml``: a setting is looked for in the subset, in its data set, in ``general``. Subsets are folders, not
  recursive, with captions in ``.caption`` files by default. ``conditioning_data_dir`` has control images. Within one
  data set a folder counts once, in several data sets once for each, or once for all if a build makes their
  resolutions. Fewer repeats than one leave a subset out. With ``enable_wildcard`` one line is drawn, so each is a
  caption; ``{a|b}`` stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentcache.errors import SourceError, count_of
from latentcache.sources.inventory import Folder, Inventory
from latentcache.sources.layout import CaptionRule, ImageSet, Layout
from latentcache.sources.options import SourceOptions
from latentcache.sources.recognize.config import Config, Trainer, joined, pixels_in

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


def _read_config(config: Config, base: Path | None) -> Layout:
    sets, general = list[ImageSet](), config.value.get("general", {})
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
            if entries.get("metadata_file"):
                raise _no_metadata(config)
            path, resolution = str(entries.get("image_dir")), entries.get("resolution")
            if seen.get(path, resolution) != resolution:
                continue  # the build makes all resolutions of a folder
            if path in seen or entries.get("num_repeats", 1) < 1:
                why = "it is there twice in one data set" if path in seen else "num_repeats is less than 1"
                config.note(f"subset {path} is left out, as by the trainer: {why}")
                continue
            seen[path] = resolution
            config.resolutions.update(pixels_in(entries))
            sets.append(_subset(config, entries, number))
    why = f"{config.path.name} has {count_of(len(sets), 'subsets')} of kohya"
    return joined(config, CONFIG.word, why, sets, base)


def _subset(config: Config, entries: Mapping[str, Any], dataset: int) -> ImageSet:
    words = str(entries.get("class_tokens") or "")
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
    controls = entries.get("conditioning_data_dir")
    paired = [("control", str(config.place(controls, "conditioning_data_dir")))] if controls else []
    paired += [("mask", "")] if entries.get("alpha_mask") else []
    return ImageSet(
        folder=str(config.place(entries.get("image_dir"), "image_dir")),
        name=f"{dataset}:{entries['image_dir']}",
        recursive=False,
        captions=rule,
        repeats=entries.get("num_repeats", 1),
        class_words=words,
        is_reg=bool(entries.get("is_reg")),
        balance=f"{dataset}:{config.path}",
        paired=tuple(paired),
    )


def _no_metadata(config: Config) -> SourceError:
    """The error for kohya's metadata, whose captions and tags would be lost if its images were read alone."""
    return config.error(
        "captions in metadata files of kohya are not read",
        "write each caption as a text file beside its image, or all as metadata.jsonl: one object per line, "
        "with file_name and text",
    )


def _refuse(config: Config, _: Path | None) -> Layout:
    raise _no_metadata(config)


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
    "kohya-metadata", ("meta_lat.json", "meta_clean.json", "meta_cap_dd.json", "meta_cap.json"), _is_metadata, _refuse
)
