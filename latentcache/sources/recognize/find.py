"""Layout of DATA: each convention is tried, and two that fit are an error.

The plain folder is the last resort: images with caption files beside them, nested as one likes.
"""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

from latentcache.errors import LatentcacheError, SourceAmbiguousError, SourceError, UsageError
from latentcache.sources.archives.tars import kind_of_archive
from latentcache.sources.layout import FOLDER, ImageSet, Layout, unfit
from latentcache.sources.reading import open_source
from latentcache.sources.recognize import hub, kohya
from latentcache.sources.recognize.config import MAX_BYTES, Config, Trainer, read_config
from latentcache.sources.recognize.records import is_records
from latentcache.sources.recognize.trainers import ONETRAINER, OWN, SIMPLETUNER
from latentcache.sources.splits import choose_split
from latentcache.sources.walk import IMAGE_EXTENSIONS, TABLE_NAMES, Tree, Walk


def _plain(tree: Tree) -> Layout:
    why = "images, with caption files beside them if there are any"
    return Layout(word=FOLDER, why=why, root=tree.root, sets=(ImageSet(folder=""),))


#: Conventions of folders by their word.
FOLDERS: dict[str, hub.Recognizer] = {kohya.WORD: kohya.recognize, **hub.FORMS, FOLDER: _plain}
#: Conventions of configuration files by their word. Our own one decides alone.
CONFIGS = {one.word: one for one in (OWN, kohya.CONFIG, SIMPLETUNER, ONETRAINER, kohya.METADATA)}
#: Words of ``--layout``.
WORDS = (*FOLDERS, *CONFIGS)
#: Any of these is in the first bytes of a JSON file that is a configuration.
_MARKS = (b'"instance_data_dir"', b'"dataset_type"', b'"include_subdirectories"', b'"balancing"', b'"subsets"',
          b'"prompt_source"', b'"tags"', b'"train_resolution"', b'"caption"')  # fmt: skip
_HEAD = 1 << 16


def find_layout(data: Path, word: str = "", split: str = "", *, tree: Tree | None = None) -> Layout:
    """Find the layout of a folder, or of what a configuration file names; ``tree``: the folder, listed in part.

    Raises as ``scan.scan``; SourceAmbiguousError if DATA can be read in two ways.
    """
    if word and word not in WORDS:
        raise unfit(data, word, f"expected one of {', '.join(WORDS)}")
    found = _of_file(data, word) if data.is_file() else _of_folder(tree or Tree(data), word)
    return found if found.word == OWN.word and not split else choose_split(found, split)


def is_config(data: Path) -> bool:
    """True if a file is a configuration of image data sets, or kohya's metadata."""
    if data.suffix == ".toml":
        return data.is_file()
    if data.suffix not in (".json", ".jsonl") or not data.is_file() or data.stat().st_size > MAX_BYTES:
        return False
    try:
        with open_source(data) as file:
            head = file.read(_HEAD)
        return any(mark in head for mark in _MARKS) and _trainer(read_config(data).value) is not None
    except (SourceError, OSError):
        return False  # whoever reads it as something else says why


def holds_images(data: Path, tree: Tree) -> bool:
    """True if DATA is images: by a configuration, an archive, a metadata table, or the name of any file."""
    if data.is_file():
        return is_config(data) or hub.is_of_images(data)
    if any(recognize(tree) is not None for recognize in hub.ARCHIVES.values()):
        return True
    if is_records(data):
        return False
    if any(folder.images or folder.others.intersection(TABLE_NAMES) for folder in tree.below()):
        return True
    configs = {name for one in CONFIGS.values() for name in one.names}
    return bool(tree.top.others & configs) or any(stop > start for _, start, stop in Walk(data, IMAGE_EXTENSIONS))


def _of_folder(tree: Tree, word: str) -> Layout:
    finders = {name: partial(_in_folder, one) for name, one in CONFIGS.items()} | FOLDERS
    if word:
        found = finders[word](tree)
        if found is None:
            raise unfit(tree.root, word, "nothing in the folder has this form")
        return found
    if mine := finders.pop(OWN.word)(tree):
        return mine
    del finders[FOLDER]
    fitting = [one for finder in finders.values() if (one := finder(tree)) is not None]
    if any(one.word in CONFIGS for one in fitting):  # it names folders, whatever these are called
        fitting = [one for one in fitting if one.word != kohya.WORD]
    if not fitting:
        return _plain(tree)
    readings = [(one.word, one.why) for one in fitting]
    if len(fitting) == 1 and fitting[0].doubt:
        readings.append((FOLDER, fitting[0].doubt))
    if len(readings) > 1:
        words, path = [name for name, _ in readings], shlex.quote(str(tree.root))
        raise SourceAmbiguousError(
            f"DATA can be read as {' or '.join(words)}: {tree.root}",
            where=str(tree.root),
            why="; ".join(f"{name}: {why}" for name, why in readings),
            fix=" or ".join(f"`latentcache build {path} --layout {name}`" for name in words),
        )
    return fitting[0]


def _of_file(data: Path, word: str) -> Layout:
    if kind_of_archive(data.name):
        return hub.recognize_file(data, word)
    config = read_config(data)
    trainer = CONFIGS.get(word) if word else _trainer(config.value)
    if trainer is not None and trainer.fits(config.value):
        return _read(trainer, config, None)
    why = f"expected a file as one of {', '.join(CONFIGS)} has it"
    if word:
        raise unfit(data, word, why)
    what, fix = f"{data.name} is no configuration that is known", "give the folder that holds the images"
    raise UsageError(what, where=str(data), why=why, fix=fix)


def _trainer(value: object) -> Trainer | None:
    return next((one for one in CONFIGS.values() if one.fits(value)), None)


def _in_folder(trainer: Trainer, tree: Tree) -> Layout | None:
    name = next((name for name in trainer.names if name in tree.top.others), "")
    config = read_config(tree.root / name) if name else None
    if config is None or not trainer.fits(config.value):
        return None
    return _read(trainer, config, tree.root)


def _read(trainer: Trainer, config: Config, base: Path | None) -> Layout:
    try:
        return trainer.read(config, base, find_layout)
    except LatentcacheError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what, fix = "a setting has a value of another kind", f"correct {shlex.quote(str(config.path))}"
        raise config.error(what, fix, str(error)) from error
