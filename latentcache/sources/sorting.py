"""What a name in a folder is: a picture, a caption, a folder to go into, a link to follow, or something to be said.

Guarantee: every name that could be a picture is taken, refused or noted; a link is followed only to a place inside
the root, never to a folder above itself, and never from within a linked folder. Files are never opened.
Cost: what the folder's listing says, and a stat where a name is a picture or a link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from dataclasses import dataclass, field

from latentcache.sources.causes import cause_of, refusal
from latentcache.sources.reading import kind_of
from latentcache.sources.sample import Refusal

#: Extensions of the formats that are read, in lower case.
READ_EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
)
#: Extensions that make a file a picture; those that are not read are refused later, by content.
PICTURE_EXTENSIONS = READ_EXTENSIONS | {".heic", ".heif", ".jxl", ".svg"}
#: Tables of captions, looked for in the data folder itself.
TABLE_NAMES = ("metadata.csv", "metadata.jsonl")
#: Extensions of caption files beside a picture; the first one wins.
CAPTION_EXTENSIONS = (".txt", ".caption")
#: Ending of the folders that `latentcache build` makes by default.
CACHE_SUFFIX = ".latentcache"
CACHE_MARKS = frozenset(("CURRENT", "generations"))


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that is walked."""

    path: str
    prefix: str
    """Of the names in it: empty for the root, else with ``/`` at the end."""
    hidden: bool = False
    linked: bool = False
    """Whether a link led to it, or to one above it."""


@dataclass(slots=True)
class Level:
    """What was found in one folder. All names are without that of the folder, but those of captions."""

    pictures: dict[str, os.stat_result] = field(default_factory=dict)
    folders: list[Folder] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """Caption files: path with the extension in lower case -> path as it is."""
    outside_texts: set[str] = field(default_factory=set)
    """Those that are links to a place outside the root."""


@dataclass(slots=True)
class Said:
    """What a walk has to say of all that is no picture."""

    root: str
    real_root: str
    others: Counter[str] = field(default_factory=Counter)
    refused: list[Refusal] = field(default_factory=list)
    notes: list[Refusal] = field(default_factory=list)
    loops: dict[tuple[int, int], tuple[bool, Refusal]] = field(default_factory=dict)
    """Links to a folder above themselves, by device and inode: under the own name of one rather than a linked one."""


def extension_of(name: str) -> str:
    """The extension in lower case with its dot; empty when there is none."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot >= 0 else ""


def is_inside(path: str, real_root: str) -> bool:
    """Whether a path, its links resolved, lies in a folder whose own path has no links."""
    real = os.path.realpath(path)
    return real == real_root or real.startswith(real_root.rstrip("/") + "/")


def sort_out(entry: os.DirEntry[str], folder: Folder, level: Level, said: Said) -> None:
    """One name: a link, a folder or a file."""
    name = folder.prefix + entry.name
    try:
        if entry.is_symlink():
            _link(entry, name, folder, level, said)
        elif entry.is_dir(follow_symlinks=False):
            _own_folder(entry, name, folder, level, said)
        else:
            _file(entry, name, folder, level, said)
    except OSError as error:
        said.refused.append(stateless(name, error))


def stateless(name: str, error: OSError) -> Refusal:
    """A name of which the system does not say what it is."""
    if isinstance(error, FileNotFoundError):
        return refusal(name, "vanished", "it was removed while the folder was listed")
    return refusal(name, cause_of(error), f"its state cannot be read: {error.strerror}")


def _own_folder(entry: os.DirEntry[str], name: str, folder: Folder, level: Level, said: Said) -> None:
    if entry.name.endswith(CACHE_SUFFIX):
        said.notes.append(refusal(name + "/", "cache-folder", f"its name ends in {CACHE_SUFFIX}"))
        return
    hidden = folder.hidden or entry.name.startswith(".")
    level.folders.append(Folder(entry.path, name + "/", hidden, folder.linked))


def _file(entry: os.DirEntry[str], name: str, folder: Folder, level: Level, said: Said) -> None:
    """A regular file, or a pipe, socket or device: only the name says that somebody meant a picture."""
    extension = extension_of(entry.name)
    if extension not in PICTURE_EXTENSIONS:
        _other(name, extension, level, said)
    elif folder.hidden or entry.name.startswith("."):
        _hidden(name, said)
    elif entry.is_file(follow_symlinks=False):
        level.pictures[entry.name] = entry.stat(follow_symlinks=False)
    else:
        _not_regular(name, entry.stat(follow_symlinks=False).st_mode, said)


def _link(entry: os.DirEntry[str], name: str, folder: Folder, level: Level, said: Said) -> None:
    """A symbolic link: followed when it ends inside the root."""
    extension = extension_of(entry.name)
    is_picture = extension in PICTURE_EXTENSIONS
    if folder.hidden or entry.name.startswith("."):
        if is_picture:
            _hidden(name, said)
        return
    try:
        target = entry.stat()
    except OSError as error:
        _broken(name, extension, error, level, said)
        return
    inside = is_inside(entry.path, said.real_root)
    if stat.S_ISDIR(target.st_mode):
        _linked_folder(entry, name, inside, folder, level, said)
    elif not is_picture:
        _other(name, extension, level, said, outside=not inside)
    elif not inside:
        said.refused.append(refusal(name, "outside-root", _leads_to(entry)))
    elif stat.S_ISREG(target.st_mode):
        level.pictures[entry.name] = target
    else:
        _not_regular(name, target.st_mode, said)


def _broken(name: str, extension: str, error: OSError, level: Level, said: Said) -> None:
    """A link that leads nowhere: worth a refusal for a picture, a note for anything that could be a folder."""
    if extension in CAPTION_EXTENSIONS:
        _other(name, extension, level, said)
        return
    item = refusal(name, cause_of(error), f"the link cannot be followed: {error.strerror}")
    weighty = extension in PICTURE_EXTENSIONS or error.errno != errno.ENOENT
    (said.refused if weighty else said.notes).append(item)


def _linked_folder(
    entry: os.DirEntry[str], name: str, inside: bool, folder: Folder, level: Level, said: Said
) -> None:
    """Follow a link to a folder once, unless that would never end."""
    target, link = entry.stat(), entry.stat(follow_symlinks=False)
    if not inside:
        said.refused.append(refusal(name, "outside-root", _leads_to(entry)))
    elif (target.st_dev, target.st_ino) in _folders_above(folder, said.root):
        known, item = said.loops.get((link.st_dev, link.st_ino)), f"{_leads_to(entry)}, a folder above it"
        if known is None or (known[0] and not folder.linked):
            said.loops[link.st_dev, link.st_ino] = folder.linked, refusal(name, "symlink-loop", item)
    elif folder.linked:
        said.notes.append(refusal(name, "nested-link", _leads_to(entry)))
    else:
        level.folders.append(Folder(entry.path, name + "/", linked=True))


def _folders_above(folder: Folder, root: str) -> set[tuple[int, int]]:
    """Device and inode of a folder and of all above it, up to the root."""
    parts = folder.prefix.split("/")[:-1]
    paths = [root, *("/".join([root, *parts[:depth]]) for depth in range(1, len(parts) + 1))]
    results = [os.stat(path) for path in paths]  # noqa: PTH116 - the names are strings here
    return {(result.st_dev, result.st_ino) for result in results}


def _other(name: str, extension: str, level: Level, said: Said, *, outside: bool = False) -> None:
    """A file that is no picture: perhaps a caption, or a table where none is looked for."""
    said.others[extension] += 1
    folder, _, file = name.rpartition("/")
    if folder and file in TABLE_NAMES:
        said.notes.append(refusal(name, "nested-table", f"only a table in {said.root} itself is read"))
    if extension in CAPTION_EXTENSIONS:
        # Of a.TXT and a.txt the second is met later and stays.
        level.texts[name[: -len(extension)] + extension] = name
        if outside:
            level.outside_texts.add(name)


def _hidden(name: str, said: Said) -> None:
    said.notes.append(refusal(name, "hidden", "its name, or that of a folder above it, begins with a dot"))


def _not_regular(name: str, mode: int, said: Said) -> None:
    said.refused.append(refusal(name, "not-regular", f"it is {kind_of(mode)}, not a regular file"))


def _leads_to(entry: os.DirEntry[str]) -> str:
    return f"the link leads to {os.readlink(entry.path)}"  # noqa: PTH115 - the names are strings here
