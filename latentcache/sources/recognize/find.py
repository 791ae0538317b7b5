"""What DATA is: each convention is tried, and two that fit are an error.

kohya-ss/sd-scripts 48d368f, ``library/config_util.py``, ``library/train_util.py``: in a folder name ``10_name class``
the number before the first ``_`` is the repeats, the rest are the class words. Other folders are ignored. A caption
is the first line of the file; without one the class words. Folders of regularization images are in a folder of their
own (``reg_data_dir``); see ``layout.balanced``.

Metadata tables (huggingface/datasets b7cb10b, ``folder_based_builder.py``): file names are relative to the folder of
the table. If there is a table anywhere, images without a row are not used. A folder named ``train``, ``validation``
or ``test`` makes a split. Archives: ``data/train-00000-of-00001.parquet`` is of the split ``train``; ``save_to_disk``
of a dict of data sets makes a folder for each split. Whether a file holds images is seen in the head of the first
ones of each kind.

The plain folder is the last resort: images with caption files beside them, in any subfolders.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from latentcache.errors import (
    LatentcacheError,
    SourceAmbiguousError,
    SourceError,
    SourceNotFoundError,
    TableError,
    UsageError,
    count_of,
    option,
)
from latentcache.sources.formats.archives import ARROW, PACKED, PARQUET, TAR, kind_of_archive
from latentcache.sources.inventory import TABLE_NAMES, Folder, Inventory, extension_of, not_a_folder
from latentcache.sources.layout import FOLDER, CaptionRule, ImageSet, Layout, above, kohya_rule, unfit
from latentcache.sources.options import SourceOptions
from latentcache.sources.readers.archive import hold_images
from latentcache.sources.readers.records import holds_records, saved_splits, saved_states
from latentcache.sources.recognize.config import MAX_BYTES, Config, Trainer, joined, read_config
from latentcache.sources.recognize.trainers import CONFIGS
from latentcache.sources.records import KINDS
from latentcache.sources.splits import choose_split, read_as_train, splits_of, unread_folders

IMAGES, RECORDS = "images", "records"
_TABLES = frozenset(TABLE_NAMES)
KOHYA = "kohya"
#: Names of the folders that hold training images and regularization images, as kohya_ss makes them.
IMAGE_FOLDERS, REG_FOLDERS = ("img", "image", "images"), ("reg", "regularization")
_NAME = re.compile(r"([0-9]+)_(.*)", re.DOTALL)
#: More repeats than that are rather a year or a number of a series.
_MOST = 1000
#: Kind of archive -> word of its layout.
_WORD_OF = {TAR: "webdataset", PARQUET: "parquet", ARROW: "saved"}


# conventions of folders


def _tables(inventory: Inventory, options: SourceOptions) -> Layout | None:
    for level in inventory.below():
        for item in (level.rejected[name] for name in TABLE_NAMES if name in level.rejected):
            where = str(inventory.root / item.name)
            fix = f"rename it, or {item.hint}"
            raise TableError(f"{item.name}: the table cannot be used", where=where, why=item.detail, fix=fix)
    names = [name for name in inventory.files(*TABLE_NAMES) if name.rpartition("/")[2] in TABLE_NAMES]
    folders = [name.rpartition("/")[0] for name in names]
    for folder, count in Counter(folders).items():
        if count > 1:
            first, second, *_ = (name.rpartition("/")[2] for name in names if name.rpartition("/")[0] == folder)
            path = str(inventory.root / folder / second)
            raise TableError(
                f"a data folder has two tables: {first} and {second}",
                where=str(inventory.root / folder),
                why="expected one: both would say which images are used and their captions",
                fix=f"rename one, e.g. `mv {shlex.quote(path)} {shlex.quote(f'{path}.off')}`",
            )
    if not names:
        return None
    splits = splits_of(names, options.split)
    sets = tuple(
        ImageSet(folder=folder, captions=CaptionRule(table=name), split=split)
        for folder, name, split in zip(folders, names, splits, strict=True)
    )
    return Layout(
        word="imagefolder",
        why=f"{names[0]} lists images",
        root=inventory.root,
        sets=sets,
        notes=tuple(read_as_train(dict.fromkeys(names, 1), splits)),
    )


def _tars(inventory: Inventory, options: SourceOptions) -> Layout | None:
    names, packed = inventory.files(".tar"), inventory.files(*PACKED)
    count = sum(len(folder.stats) for folder in inventory.below())
    if not (hold_images(inventory.root, names, unread=True) or (packed and not names and count == len(packed))):
        return None
    names += packed
    return _layout(inventory, TAR, names, splits_of(names, options.split))


def _rows(inventory: Inventory, options: SourceOptions) -> Layout | None:
    names = [name for name in inventory.files(".parquet") if name.rpartition("/")[2] not in TABLE_NAMES]
    if not hold_images(inventory.root, names, unread=not inventory.files(".jsonl", ".ndjson")):
        return None
    return _layout(inventory, PARQUET, names, splits_of(names, options.split))


def _saved(inventory: Inventory, _: SourceOptions) -> Layout | None:
    """A data set that ``datasets`` saved, with a column of images."""
    splits = saved_splits(inventory)
    names = [name for files in splits.values() for name in files]
    # Who reads it as records says why a split has no files.
    if not all(splits.values()) or not hold_images(inventory.root, names, unread=True):
        return None
    layout = _layout(inventory, ARROW, names, [split for split, files in splits.items() for _ in files])
    return replace(layout, used=saved_states(splits), doubt="")


def _layout(inventory: Inventory, kind: str, names: Sequence[str], splits: Sequence[str]) -> Layout:
    images = sum(folder.images for folder in inventory.below())
    return Layout(
        word=_WORD_OF[kind],
        why=f"{names[0]} holds images",
        root=inventory.root,
        sets=tuple(
            ImageSet(
                folder=split if kind == ARROW else "",
                name=split,
                split=split,
                archives=kind,
                files=frozenset(name for name, its in zip(names, splits, strict=True) if its == split),
            )
            for split in sorted({*splits})
        ),
        notes=tuple(read_as_train(dict.fromkeys(names, 1), splits)),
        doubt=f"{count_of(images, 'images')} beside the archives would be left out" if images else "",
    )


def _kohya(inventory: Inventory, options: SourceOptions) -> Layout | None:
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
        rule = kohya_rule(words)
        sets.append(ImageSet(folder=folder.path, recursive=False, balance=str(inventory.root), captions=rule, **more))
    first = sets[0]
    why = f"{first.folder}/ reads as {first.repeats} repeats of {first.class_words or 'no class words'!r}"
    return Layout(
        word=KOHYA, why=why, root=inventory.root, sets=tuple(sets), doubt=_doubt(inventory, base, [*train, *reg])
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
    used = {folder.path for folder in named}
    top = inventory.folder(base)
    if top.images:
        return count_of(top.images, "images are in no such folder")
    paths = [f"{base}/{name}" if base else name for name in top.folders]
    others = [inventory.folder(path) for path in paths if path not in used]
    left = next((folder for folder in others if folder.images), None)
    return f"{count_of(left.images, 'images')} in {left.path}/ would be left out" if left else ""


def _plain(inventory: Inventory, options: SourceOptions) -> Layout:
    """Images with caption files beside them, in any subfolders: the last resort."""
    why = "images, with caption files beside them if there are any"
    layout = Layout(word=FOLDER, why=why, root=inventory.root, sets=(ImageSet(folder=""),))
    aside = {folder.strip("/") for folder in options.folders} - {""}
    folders = {
        folder.prefix: folder.images
        for folder in inventory.below()
        if folder.images and not layout.role(folder.prefix) and aside.isdisjoint(above(folder.path))
    }
    split, unread, notes = unread_folders(inventory.root, folders, options.split)
    return replace(layout, split=split, unread=unread, notes=notes)


Recognizer = Callable[[Inventory, SourceOptions], Layout | None]
#: Word -> how it is recognized.
ARCHIVES: dict[str, Recognizer] = {_WORD_OF[TAR]: _tars, _WORD_OF[PARQUET]: _rows, _WORD_OF[ARROW]: _saved}
FOLDERS: dict[str, Recognizer] = {KOHYA: _kohya, "imagefolder": _tables, **ARCHIVES}
#: Words of ``--layout``.
WORDS = (*FOLDERS, FOLDER, *CONFIGS)


# the one that fits


def find_kind(inventory: Inventory, options: SourceOptions, inputs: Collection[str]) -> str:
    """``images`` or ``records``; a folder without both counts as images: that error lists its files.

    ``inputs``: what the fields that are asked for need. They decide if a folder holds both.

    Raises:
        SourceAmbiguousError: A folder holds both, and nothing decides.
    """
    if inventory.is_file:
        name = inventory.data.name
        if is_config(inventory.data) or (kind_of_archive(name) and hold_images(inventory.root, [name], unread=True)):
            return IMAGES
        if extension_of(name) in KINDS:
            return RECORDS
        raise not_a_folder(inventory.data)
    configs = {name for trainer in CONFIGS.values() for name in trainer.names}
    has_images = (
        not configs.isdisjoint(inventory.top.others)
        or any(folder.images or not _TABLES.isdisjoint(folder.others) for folder in inventory.below())
        or any(recognize(inventory, options) is not None for recognize in ARCHIVES.values())
    )
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


def _of_folder(inventory: Inventory, options: SourceOptions) -> Layout:
    finders: dict[str, Recognizer] = {name: partial(_in_folder, trainer) for name, trainer in CONFIGS.items()}
    finders |= FOLDERS
    if word := options.layout:
        layout = {**finders, FOLDER: _plain}[word](inventory, options)
        if layout is None:
            raise unfit(inventory.root, word, "nothing in the folder has this form")
        return layout
    fitting = [layout for finder in finders.values() if (layout := finder(inventory, options)) is not None]
    if any(layout.word in CONFIGS for layout in fitting):  # it names folders, whatever these are called
        fitting = [layout for layout in fitting if layout.word != KOHYA]
    if not fitting:
        return _plain(inventory, options)
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
    if kind := kind_of_archive(data.name):
        if word not in ("", _WORD_OF[kind]):
            raise unfit(data, word, f"it is a file of the layout {_WORD_OF[kind]}")
        archive = ImageSet(folder="", archives=kind, files=frozenset((data.name,)))
        why = f"{data.name} holds images"
        return Layout(word=_WORD_OF[kind], why=why, root=data.parent, sets=(archive,), folders=())
    config = read_config(data)
    trainer = CONFIGS.get(word) if word else _trainer(config.value)
    if trainer is not None and trainer.fits(config.value):
        return _read(trainer, config, None)
    why = f"expected a file as one of {', '.join(CONFIGS)} has it"
    if word:
        raise unfit(data, word, why)
    problem = f"{data.name} is not a data set configuration"
    fix = "give the folder that holds the images"
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
    config.is_followed = True
    config.folder = options.config_folder
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
        return joined(config, trainer.word, trainer.read(config), base)
    except LatentcacheError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = "a setting has a value of another kind"
        fix = f"correct {shlex.quote(str(config.path))}"
        raise config.error(problem, fix, str(error)) from error
