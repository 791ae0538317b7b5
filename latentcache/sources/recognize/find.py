"""What DATA is: each convention is tried, and two that fit are an error.

The plain folder is the last resort: images with caption files beside them, nested as one likes.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from functools import partial
from pathlib import Path

from latentcache.errors import (
    LatentcacheError,
    SourceAmbiguousError,
    SourceError,
    SourceNotFoundError,
    UsageError,
    option,
)
from latentcache.sources.formats.archives import kind_of_archive
from latentcache.sources.inventory import TABLE_NAMES, Inventory, extension_of, not_a_folder
from latentcache.sources.layout import FOLDER, Layout, unfit
from latentcache.sources.options import SourceOptions
from latentcache.sources.recognize.config import MAX_BYTES, Config, Trainer, read_config
from latentcache.sources.recognize.folders import (
    ARCHIVES,
    FOLDERS,
    KOHYA,
    Recognizer,
    is_of_images,
    plain_folder,
    recognize_file,
)
from latentcache.sources.recognize.records import holds_records
from latentcache.sources.recognize.trainers import CONFIGS
from latentcache.sources.records import KINDS
from latentcache.sources.splits import choose_split

IMAGES, RECORDS = "images", "records"
#: Words of ``--layout``.
WORDS = (*FOLDERS, FOLDER, *CONFIGS)


def find_kind(inventory: Inventory, options: SourceOptions, inputs: Collection[str]) -> str:
    """``images`` or ``records``; a folder without both counts as images: that error lists its files.

    ``inputs``: what the fields that are asked for need. They decide if a folder holds both.

    Raises:
        SourceAmbiguousError: A folder holds both, and nothing decides.
    """
    if inventory.is_file:
        if is_config(inventory.data) or is_of_images(inventory.data):
            return IMAGES
        if extension_of(inventory.data.name) in KINDS:
            return RECORDS
        raise not_a_folder(inventory.data)
    has_images = _holds_images(inventory, options)
    if has_images and "image" in inputs:
        return IMAGES
    if not holds_records(inventory):
        texts = any(KINDS.get(extension) for folder in inventory.below() for extension in folder.counts)
        is_text = "record" in inputs or (texts and "image" not in inputs)
        return RECORDS if is_text and not has_images else IMAGES
    if not has_images or "record" in inputs:
        return RECORDS
    raise SourceAmbiguousError(
        f"DATA has images and records: {inventory.root}",
        where=str(inventory.root),
        why="a model is for images, a tokenizer for records",
        fix="give --model to encode the images, or --tokenizer to encode the records",
    )


def find_layout(inventory: Inventory, options: SourceOptions) -> Layout:
    """Find the layout of a folder of images, or of what a file names.

    Raises as ``scan.scan``; SourceAmbiguousError if DATA can be read in two ways.
    """
    word = options.layout
    if word and word not in WORDS:
        raise unfit(inventory.data, word, f"expected one of {', '.join(WORDS)}")
    if options.config and not word:
        layout = _of_config(inventory, options)
    else:
        layout = _of_file(inventory.data, word) if inventory.is_file else _of_folder(inventory, options)
    return layout if layout.word == FOLDER else choose_split(layout, options.split)


def is_config(data: Path) -> bool:
    """True if a file is a configuration of image data sets, or kohya's metadata."""
    if data.suffix in (".toml", ".yaml", ".yml"):
        return data.is_file()
    if data.suffix not in (".json", ".jsonl") or not data.is_file() or data.stat().st_size > MAX_BYTES:
        return False
    try:
        return _trainer(read_config(data).value) is not None
    except (SourceError, OSError):
        return False  # whoever reads it as something else says why


def _holds_images(inventory: Inventory, options: SourceOptions) -> bool:
    """True if a folder holds images: by an archive, a metadata table, a configuration, or the name of any file."""
    configs = {name for trainer in CONFIGS.values() for name in trainer.names}
    if configs.intersection(inventory.top.others):
        return True
    if any(folder.images or not _TABLES.isdisjoint(folder.others) for folder in inventory.below()):
        return True
    return any(recognize(inventory, options) is not None for recognize in ARCHIVES.values())


_TABLES = frozenset(TABLE_NAMES)


def _of_folder(inventory: Inventory, options: SourceOptions) -> Layout:
    finders: dict[str, Recognizer] = {name: partial(_in_folder, trainer) for name, trainer in CONFIGS.items()}
    finders |= FOLDERS
    if word := options.layout:
        layout = {**finders, FOLDER: plain_folder}[word](inventory, options)
        if layout is None:
            raise unfit(inventory.root, word, "nothing in the folder has this form")
        return layout
    fitting = [layout for finder in finders.values() if (layout := finder(inventory, options)) is not None]
    if any(layout.word in CONFIGS for layout in fitting):  # it names folders, whatever these are called
        fitting = [layout for layout in fitting if layout.word != KOHYA]
    if not fitting:
        return plain_folder(inventory, options)
    readings = [(layout.word, layout.why) for layout in fitting]
    if len(fitting) == 1 and fitting[0].doubt:
        readings.append((FOLDER, fitting[0].doubt))
    if len(readings) > 1:
        words = [name for name, _ in readings]
        raise SourceAmbiguousError(
            f"DATA can be read as {' or '.join(words)}: {inventory.root}",
            where=str(inventory.root),
            why="; ".join(f"{name}: {why}" for name, why in readings),
            fix=f"add {' or '.join(option('layout', name) for name in words)}",
        )
    return fitting[0]


def _of_file(data: Path, word: str) -> Layout:
    if kind_of_archive(data.name):
        return recognize_file(data, word)
    config = read_config(data)
    trainer = CONFIGS.get(word) if word else _trainer(config.value)
    if trainer is not None and trainer.fits(config.value):
        return _read(trainer, config, None)
    why = f"expected a file as one of {', '.join(CONFIGS)} has it"
    if word:
        raise unfit(data, word, why)
    problem, fix = f"{data.name} is not a data set configuration", "give the folder that holds the images"
    raise UsageError(problem, where=str(data), why=why, fix=fix)


def _of_config(inventory: Inventory, options: SourceOptions) -> Layout:
    """The sets that the configuration of a trainer names: in the folder DATA, or wherever if DATA is this file."""
    data = inventory.data
    if not os.path.isfile(options.config):  # noqa: PTH113
        raise SourceNotFoundError(
            f"the configuration of the trainer is gone: {options.config}",
            where=options.config,
            why="it says how the cache reads DATA",
            fix=f"latentcache build {shlex.quote(str(data))} --trainer-config FILE says where it is now",
        )
    config = read_config(Path(options.config))
    config.is_followed, config.folder = True, options.config_folder
    trainer = _trainer(config.value)
    if trainer is None or (inventory.is_file and data.resolve() != config.path.resolve()):
        problem = "names no sets of images" if trainer is None else f"names other images than DATA={data}"
        raise config.error(problem, "give the folder of images that it names as DATA")
    layout = _read(trainer, config, None if inventory.is_file else data)
    if not inventory.is_file and layout.root != Path(os.path.abspath(data)):  # noqa: PTH100 - links stay
        fix = f"give the folder of all of them as DATA: {shlex.quote(str(layout.root))}"
        raise config.error(f"names folders outside DATA={data}", fix, f"its folders are in {layout.root}")
    return layout


def _trainer(value: object) -> Trainer | None:
    return next((trainer for trainer in CONFIGS.values() if trainer.fits(value)), None)


def _in_folder(trainer: Trainer, inventory: Inventory, _: SourceOptions) -> Layout | None:
    name = next((name for name in trainer.names if name in inventory.top.others), "")
    config = read_config(inventory.root / name) if name else None
    if config is None or not trainer.fits(config.value):
        return None
    return _read(trainer, config, inventory.root)


def _read(trainer: Trainer, config: Config, base: Path | None) -> Layout:
    try:
        return trainer.read(config, base)
    except LatentcacheError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem, fix = "a setting has a value of another kind", f"correct {shlex.quote(str(config.path))}"
        raise config.error(problem, fix, str(error)) from error
