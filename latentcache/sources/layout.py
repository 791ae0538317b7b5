"""A layout says which images of DATA are samples, and where their captions are. No file is read here."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import SourceAmbiguousError, UsageError, option
from latentcache.fields.captions import BETWEEN
from latentcache.fields.table import Rejected
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.sources.causes import Notes, fault
from latentcache.sources.formats.files import listed
from latentcache.sources.inventory import CAPTION_EXTENSIONS
from latentcache.value import Value

#: Ending of the stem of a mask or a control image beside its image (OneTrainer) -> input.
ENDINGS = {"-masklabel": "mask", "-condlabel": "control"}
#: Inputs by the option that names their folders.
INPUTS = {"masks": ("mask",), "controls": ("control", "control_2", "control_3")}
FOLDER = "folder"
#: Folder of control images that ai-toolkit made of the images beside it (``ControlCachingMixin``).
_MADE_CONTROLS = "_controls"
#: Names of the column of file names, in any case.
FILE_COLUMNS = ("file_name", "image", "file", "filename", "path")
#: Names of the column of captions, in any case; of an object in a JSON file the first one counts.
CAPTION_COLUMNS = ("caption", "text", "prompt")


class Trigger(Value):
    """Captions as ai-toolkit 27a03a9 makes them of files: ``get_caption``, ``inject_trigger_into_prompt``."""

    word: str = ""
    """Takes the place of ``[trigger]`` and ``[name]``."""
    is_added: bool = True
    """True: it is put in front of captions without it, as of all but regularization images."""

    def caption(self, text: str) -> str:
        """The caption of a text; a comma is followed by a blank, where ai-toolkit puts a second one."""
        caption = ", ".join(text.replace(", ", ",").split(","))
        for name in ("[name]", "[trigger]"):
            caption = caption.replace(name, self.word)
        is_there = not self.word.strip() or self.word in caption
        return caption if is_there or not self.is_added else f"{self.word} {caption}"


class CaptionRule(Value):
    """Rule for the captions of a set. A table decides alone; else the first source that has a text wins."""

    extensions: tuple[str, ...] = CAPTION_EXTENSIONS
    """Extensions of files beside the image: ``a.txt`` for each, then ``a.jpg.txt`` for each."""
    table: str = ""
    """Metadata file, below the root: its rows are the samples."""
    image_column: str = ""
    """Column of images, or of their file names, that is asked for; see :func:`choose_column`."""
    caption_column: str = ""
    """Column of captions that is asked for."""
    from_name: Callable[[str], str] | None = None
    """Makes a caption of the stem of a file name."""
    text: str = ""
    """For images without any other caption."""
    text_source: str = ""
    """Kind of ``text``: ``class words``, ``prompt``; empty: there is none."""
    lines: str = ""
    """``first`` line, or ``all`` as a caption each; empty: the whole text is one caption."""
    prefix: str = ""
    suffix: str = ""
    trigger: Trigger | None = None
    bare: bool = False
    """True: prefix and suffix are the caption where there is none."""

    @property
    def reading(self) -> bytes:
        """Hash of the settings that change captions, beside the caption file; zeros if they change nothing."""
        parts = [
            self.lines,
            self.prefix,
            self.suffix,
            self.text,
            *(vars(self.trigger).items() if self.trigger else ()),
        ]
        return content_hash(json.dumps(parts).encode()) if any(parts) else bytes(HASH_BYTES)

    @property
    def is_empty_by_choice(self) -> bool:
        """True if images without any other caption have the empty one: ``--default-caption ""``."""
        return bool(self.text_source) and not self.formatted(self.text)

    def fallback(self, name: str) -> str:
        """The caption of an image that has none, by its file name."""
        stem = name.rpartition("/")[2].rpartition(".")[0]
        return self.formatted(self.text if self.from_name is None else self.from_name(stem))

    def formatted(self, text: str) -> str:
        """The caption of a text; several are joined by NUL."""
        several = text.split(BETWEEN)
        if self.lines == "all" and len(several) == 1:
            several = text.split("\n")
        if self.lines == "first":
            several = [several[0].partition("\n")[0]]
        if self.lines:
            several = [caption.strip() for caption in several]
        several = [caption for caption in several if caption] or [""] * self.bare
        captions = [self.prefix + caption + self.suffix for caption in several]
        return BETWEEN.join(map(self.trigger.caption, captions) if self.trigger else captions)


def kohya_rule(class_words: str, extensions: tuple[str, ...] = (".txt", ".caption")) -> CaptionRule:
    """Captions as sd-scripts reads them: the first line, else the class words."""
    source = "class words" if class_words else ""
    return CaptionRule(extensions=extensions, lines="first", text=class_words, text_source=source)


class ImageSet(Value):
    """One folder of images, or the rows of one table, and the settings they share."""

    folder: str
    """Below the root, without ``/`` at the end; empty: the root. Absolute until ``recognize.config.joined``."""
    name: str = ""
    """As the configuration calls it; by default the folder."""
    recursive: bool = True
    captions: CaptionRule = field(default_factory=CaptionRule)
    repeats: int = 1
    """Occurrences of an image in one epoch, from 1."""
    class_words: str = ""
    is_reg: bool = False
    balance: str = ""
    """kohya's data set of this set: in each one the repeats of regularization images follow the number of training
    images; empty: repeats are as given."""
    split: str = ""
    """``train``, ``validation`` or ``test``, if the layout says so."""
    archives: str = ""
    """``tar``, ``parquet`` or ``arrow`` if the images are in archives; empty: they are files."""
    files: frozenset[str] = frozenset()
    """Names of the archives below the root."""
    paired: tuple[tuple[str, str], ...] = ()
    """(Input, folder) of its masks and control images, which have the names of the images. The folder is named as
    ``folder`` is, and empty if the transparency of the image itself is the mask."""

    paired_by_path: bool = False
    """True: masks and control images are in the same subfolders as the images; False: their file name may decide."""

    @property
    def has_caption_files(self) -> bool:
        """True if captions are read from files beside the images."""
        return bool(self.captions.extensions) and not self.captions.table and not self.archives

    @property
    def has_columns(self) -> bool:
        """True if images and captions are in columns of a table or an archive, or members of a tar."""
        return bool(self.archives or self.captions.table)

    @property
    def prefix(self) -> str:
        """Prefix of the names in the folder."""
        return self.folder and self.folder + "/"

    @property
    def label(self) -> str:
        """Name of the set; by default its folder."""
        return self.name or self.folder or "."

    def as_json(self) -> dict[str, Any]:
        """JSON values for the manifest and for commands."""
        shown = {name: getattr(self, name) for name in ("folder", "repeats", "class_words", "is_reg", "split")}
        shown |= {"name": self.label, "paired": {name: folder or "alpha" for name, folder in self.paired}}
        return {name: value for name, value in shown.items() if value or name in ("name", "folder", "repeats")}


class Layout(Value):
    """Rules for reading a data set."""

    word: str
    """Word of ``--layout``: ``folder``, ``kohya``, ..."""
    why: str
    """One sentence: what was seen."""
    root: Path
    """Names are below it."""
    sets: tuple[ImageSet, ...]
    folders: tuple[str, ...] = ("",)
    """Folders below the root that are listed, in any order; none: archives are looked up by their names."""
    aside: Mapping[str, str] = field(default_factory=dict)
    """Folder -> ``mask`` or ``control``: its images are not samples, also if no set is paired with it."""
    split: str = ""
    """The split that is read; empty: DATA has none."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Folder of a split that is not read -> its split; a folder inside it that is read -> empty."""
    unpaired: frozenset[str] = frozenset()
    """Inputs that are not wanted."""
    used: frozenset[str] = frozenset()
    """Files that the layout itself was read from."""
    notes: tuple[Rejected, ...] = ()
    resolutions: tuple[int, ...] = ()
    """Sides of squares of equal area that a configuration asks for."""
    doubt: str = ""
    """Reason for a plain folder instead; empty: there is none."""

    def owners(self, prefix: str) -> tuple[int, ...]:
        """Sets that may have images of the folder with this prefix, the deepest set first."""
        return tuple(
            number
            for folder in above(prefix)
            for number in self._numbers.get(folder, ())
            if self.sets[number].recursive or self.sets[number].prefix == prefix
        )

    def role(self, prefix: str) -> str:
        """``mask`` or ``control`` if all images of a folder are; else empty."""
        for folder in above(prefix):
            if folder in self._roles:
                return self._roles[folder]
            if folder.rpartition("/")[2] == _MADE_CONTROLS:
                return "control"
        return ""

    def split_of(self, path: str) -> str:
        """The split of a folder that is not read; empty for the others."""
        return next((self.unread[folder] for folder in above(path) if folder in self.unread), "")

    @cached_property
    def _numbers(self) -> Mapping[str, Sequence[int]]:
        """Folder -> its sets, except archives."""
        numbers = defaultdict[str, list[int]](list)
        for number, image_set in enumerate(self.sets):
            if not image_set.archives:
                numbers[image_set.folder].append(number)
        return numbers

    @cached_property
    def _roles(self) -> Mapping[str, str]:
        pairs = [pair for image_set in self.sets for pair in image_set.paired]
        return {**self.aside, **{folder: name.partition("_")[0] for name, folder in pairs if folder}}


def above(path: str) -> Iterator[str]:
    """A name, or the prefix of a folder, and the folders or archives that it is in; the root is last."""
    path = path.removesuffix("/")
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


class Partners:
    """Masks and control images of a data set, by their positions among the files.

    Beside the sample, the stem of a partner has one of ``ENDINGS``. In a folder for partners it has the path of its
    image below the folder of the set (SimpleTuner). Else the file name alone decides: sd-scripts
    ``conditioning_data_dir``, ai-toolkit ``control_path`` and ``mask_path``. Extensions may differ.
    """

    def __init__(self) -> None:
        self._beside, self._apart = dict[tuple[str, str], int](), dict[str, int]()
        """(Input, name of the sample without extension), and name of a file apart without extension -> file."""
        self._roles = dict[int, tuple[str, str]]()
        """File -> ``mask`` or ``control``, and its name."""

    def add(self, role: str, name: str, file: int, ending: str = "") -> None:
        """Note one file; ``ending``: it is beside its image."""
        stem, self._roles[file] = name.rpartition(".")[0], (role, name)
        if not ending:
            self._apart[stem] = file
        elif name.endswith(".png"):  # its trainer looks for no other format
            self._beside[role, stem.removesuffix(ending)] = file

    def inputs(self, layout: Layout) -> list[str]:
        """Inputs that the samples of a layout have."""
        roles = {name for image_set in layout.sets for name, _ in image_set.paired}
        roles |= {role for role, _ in self._beside}
        return [name for names in INPUTS.values() for name in names if name in roles - layout.unpaired]

    def of(self, name: str, image: int, image_set: ImageSet, role: str) -> int:
        """The file of a sample: ``image``, its own, for its transparency; -1: there is none."""
        stem = name.rpartition(".")[0]
        folder = dict(image_set.paired).get(role)
        if folder == "":
            return image
        if folder is not None:
            names = [stem.removeprefix(image_set.prefix)]
            if not image_set.paired_by_path:
                names.append(stem.rpartition("/")[2])
            for inner in names:
                if (file := self._apart.get(f"{folder}/{inner}")) is not None:
                    return file
        return self._beside.get((role, stem), -1)

    def note_unused(self, used: Collection[int], layout: Layout, notes: Notes) -> None:
        """Count masks and control images that belong to no sample, or are not wanted."""
        for file, (role, name) in self._roles.items():
            if file not in used:
                why = "are not wanted" if role in layout.unpaired else "belong to no image"
                notes.count(role, f"{'masks' if role == 'mask' else 'control images'} {why}", (name,))


def unfit(data: Path, word: str, why: str) -> UsageError:
    """The error for a layout that was asked for and is not there."""
    return UsageError(
        f"{data} does not have this layout",
        argument="layout",
        value=word,
        where=str(data),
        why=why,
        fix="leave it out, or give the folder that has this layout",
    )


def balanced(sets: Sequence[ImageSet], sizes: Sequence[int]) -> dict[int, NDArray[np.int64]]:
    """Set of regularization images -> repeats of each of its images, in order; 0: left out by the trainer.

    Rule (``DreamBoothDataset``): images are taken in order, each with its repeats, until their number is that of
    the training images with repeats. If all are fewer, each in turn is repeated once more.
    """
    of_set = dict[int, NDArray[np.int64]]()
    for name in {image_set.balance for image_set in sets} - {""}:
        numbers = [number for number, image_set in enumerate(sets) if image_set.balance == name]
        wanted = sum(sizes[number] * sets[number].repeats for number in numbers if not sets[number].is_reg)
        reg = [number for number in numbers if sets[number].is_reg and sizes[number]]
        if not wanted or not reg:
            continue
        counts = [sizes[number] for number in reg]
        repeats = np.repeat([sets[number].repeats for number in reg], counts)
        missing = wanted - int(repeats.sum())
        if missing < 0:
            repeats = np.where(np.cumsum(repeats) - repeats < wanted, repeats, 0)
        else:
            repeats += missing // len(repeats) + (np.arange(len(repeats)) < missing % len(repeats))
        of_set |= zip(reg, np.split(repeats, np.cumsum(counts)[:-1]), strict=True)
    return of_set


def named(columns: Iterable[str], names: Collection[str]) -> list[str]:
    """The columns that have one of these names, in any case and without blanks around them."""
    return [column for column in columns if column.strip().lower() in names]


def choose_column(path: Path, role: str, columns: Sequence[str], meant: Sequence[str], asked: str = "") -> str:
    """The column of images or captions: the one that the user names, else the only one with a usual name.

    Args:
        path: The table.
        role: ``image`` or ``caption``.
        columns: Names of the columns that could be asked for.
        meant: Those of them with a usual name, or with images.
        asked: Name that the user or a configuration gives.

    Returns:
        The name; empty if no column is of captions.

    Raises:
        UnusableSampleError: ``no-image-column`` or ``no-caption-column``.
        SourceAmbiguousError: Several columns fit.
    """
    several = meant
    if asked:
        several = [asked] * columns.count(asked) or named(columns, (asked.strip().lower(),))
    if len(several) > 1:
        is_named = len({*several}) > 1
        raise SourceAmbiguousError(
            f"{len(several)} columns of {path.name} may hold the {role}s: {listed(several)}",
            where=str(path),
            why="one of them is used" if is_named else "they have one name",
            fix=f"name it: {option(f'{role}_column', several[0])}" if is_named else "rename one of them",
        )
    if not several and (asked or role == "image"):
        wanted = f"a column called {asked}" if asked else "a column of images"
        error = fault(f"no-{role}-column", f"expected {wanted}; found columns: {listed(columns) or 'none'}", path)
        if columns:
            error.fix = f"name one of these columns with {option(f'{role}_column')}"
        raise error
    return next(iter(several), "")
