"""Conventions of folders: kohya's names, data sets as the Hugging Face hub has them, WebDataset tars, plain images.

kohya-ss/sd-scripts 48d368f, ``library/config_util.py``, ``library/train_util.py``: in a folder name ``10_name class``
the number before the first ``_`` is the repeats, the rest are the class words. Other folders are ignored. A caption
is the first line of the file; without one the class words. Folders of regularization images are in a folder of their
own (``reg_data_dir``); see ``layout.balanced``.

Metadata tables (huggingface/datasets b7cb10b, ``folder_based_builder.py``): file names are relative to the folder of
the table. If there is a table anywhere, images without a row are not used. A folder named ``train``, ``validation``
or ``test`` makes a split. Archives: ``data/train-00000-of-00001.parquet`` is of the split ``train``; ``save_to_disk``
of a dict of data sets makes a folder for each split. Whether a file holds images is seen in the head of the first
ones of each kind.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentcache.errors import TableError, count_of
from latentcache.sources.formats.archives import ARROW, PACKED, PARQUET, TAR, kind_of_archive
from latentcache.sources.inventory import TABLE_NAMES, Folder, Inventory
from latentcache.sources.layout import FOLDER, CaptionRule, ImageSet, Layout, above, unfit
from latentcache.sources.options import SourceOptions
from latentcache.sources.recognize.records import hold_images, saved_splits, saved_states
from latentcache.sources.splits import read_as_train, splits_of, unread_folders

TABLES_WORD = "imagefolder"
KOHYA = "kohya"
#: Names of the folders that hold training images and regularization images, as kohya_ss makes them.
IMAGE_FOLDERS, REG_FOLDERS = ("img", "image", "images"), ("reg", "regularization")
_NAME = re.compile(r"([0-9]+)_(.*)", re.DOTALL)
#: More repeats than that are rather a year or a number of a series.
_MOST = 1000
#: Kind of archive -> word of its layout.
WORDS = {TAR: "webdataset", PARQUET: "parquet", ARROW: "saved"}


def _tables(inventory: Inventory, options: SourceOptions) -> Layout | None:
    for level in inventory.below():
        for item in (level.rejected[name] for name in TABLE_NAMES if name in level.rejected):
            where, fix = str(inventory.root / item.name), f"rename it, or {item.hint}"
            raise TableError(f"{item.name}: the table cannot be used", where=where, why=item.detail, fix=fix)
    names = [name for name in inventory.files(*TABLE_NAMES) if name.rpartition("/")[2] in TABLE_NAMES]
    folders = [name.rpartition("/")[0] for name in names]
    for folder, count in Counter(folders).items():
        if count > 1:
            raise _two_tables(inventory.root / folder, [name for name in names if name.rpartition("/")[0] == folder])
    if not names:
        return None
    splits = splits_of(names, options.split)
    sets = tuple(
        ImageSet(folder=folder, captions=CaptionRule(table=name), split=split)
        for folder, name, split in zip(folders, names, splits, strict=True)
    )
    return Layout(
        word=TABLES_WORD,
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


# folders of images


def kohya_rule(class_words: str, extensions: tuple[str, ...] = (".txt", ".caption")) -> CaptionRule:
    """Captions as sd-scripts reads them: the first line, else the class words."""
    source = "class words" if class_words else ""
    return CaptionRule(extensions=extensions, lines="first", text=class_words, text_source=source)


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
    used, top = {folder.path for folder in named}, inventory.folder(base)
    if top.images:
        return count_of(top.images, "images are in no such folder")
    paths = [f"{base}/{name}" if base else name for name in top.folders]
    others = [inventory.folder(path) for path in paths if path not in used]
    left = next((folder for folder in others if folder.images), None)
    return f"{count_of(left.images, 'images')} in {left.path}/ would be left out" if left else ""


def plain_folder(inventory: Inventory, options: SourceOptions) -> Layout:
    """Images, with caption files beside them, nested as one likes: the last resort."""
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
ARCHIVES: dict[str, Recognizer] = {WORDS[TAR]: _tars, WORDS[PARQUET]: _rows, WORDS[ARROW]: _saved}
FOLDERS: dict[str, Recognizer] = {KOHYA: _kohya, TABLES_WORD: _tables, **ARCHIVES}


def is_of_images(path: Path) -> bool:
    """True if a file is an archive whose head shows images, or cannot be read."""
    kind = kind_of_archive(path.name)
    return bool(kind) and hold_images(path.parent, [path.name], unread=True)


def recognize_file(path: Path, word: str = "") -> Layout:
    """The layout of one archive; nothing beside it is listed. Raises UsageError if ``word`` is another layout."""
    kind = kind_of_archive(path.name)
    layout_word = WORDS[kind]
    if word not in ("", layout_word):
        raise unfit(path, word, f"it is a file of the layout {layout_word}")
    archive = ImageSet(folder="", archives=kind, files=frozenset((path.name,)))
    return Layout(word=layout_word, why=f"{path.name} holds images", root=path.parent, sets=(archive,), folders=())


def _layout(inventory: Inventory, kind: str, names: Sequence[str], splits: Sequence[str]) -> Layout:
    images = sum(folder.images for folder in inventory.below())
    return Layout(
        word=WORDS[kind],
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


def _two_tables(folder: Path, names: Sequence[str]) -> TableError:
    first, second, *_ = (name.rpartition("/")[2] for name in names)
    path = folder / second
    return TableError(
        f"a data folder has two tables: {first} and {second}",
        where=str(folder),
        why="expected one: both would say which images are used and their captions",
        fix=f"rename one, e.g. `mv {shlex.quote(str(path))} {shlex.quote(f'{path}.off')}`",
    )
