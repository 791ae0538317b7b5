"""Which picture files a folder holds, found in one pass over its directories.

Guarantee: every picture file below the root is listed, refused or noted, none twice under one name; the walk
always ends, because a link is followed only to a place inside the root, never to a folder above itself, and
never from within a linked folder; results are in the byte order of names. Files are never opened.
Cost: one scandir per folder and one stat per picture.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import SourceError
from latentcache.identity.stat import StatMemo
from latentcache.sources.causes import cause_of, refusal
from latentcache.sources.reading import kind_of
from latentcache.sources.sample import Refusal, StatColumns, unpack_identity

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
_CACHE_MARKS = frozenset(("CURRENT", "generations"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What a folder holds. Names are relative to the root with ``/``, see ``sample``."""

    root: Path
    names: Sequence[str]
    """Of the pictures."""
    stats: NDArray[np.uint64]
    """(P, 5) the stat of each, see ``sample.SampleColumns``."""
    texts: Mapping[str, str]
    """Caption files: path with the extension in lower case -> path as it is."""
    outside_texts: frozenset[str]
    """Those that are links to a place outside the root."""
    others: Mapping[str, int]
    """Files that are no pictures: extension in lower case -> how many."""
    refused: tuple[Refusal, ...]
    notes: tuple[Refusal, ...]

    @property
    def pictures(self) -> Iterator[tuple[str, StatMemo]]:
        """Every picture with its stat."""
        return zip(self.names, map(unpack_identity, self.stats.tolist()), strict=True)


@dataclass(frozen=True, slots=True)
class _Folder:
    path: str
    prefix: str
    hidden: bool = False
    linked: bool = False


@dataclass(slots=True)
class _Found:
    """What the walk has met so far, and where it has still to go."""

    root: str
    real_root: str
    pictures: StatColumns = field(default_factory=StatColumns)
    texts: dict[str, str] = field(default_factory=dict)
    outside_texts: set[str] = field(default_factory=set)
    others: Counter[str] = field(default_factory=Counter)
    refused: list[Refusal] = field(default_factory=list)
    notes: list[Refusal] = field(default_factory=list)
    folders: list[_Folder] = field(default_factory=list)
    linked_folders: list[_Folder] = field(default_factory=list)
    loops: set[tuple[int, int]] = field(default_factory=set)


def walk_pictures(root: Path) -> Walk:
    """Find the picture files and caption files below a folder.

    Raises:
        SourceError: The folder itself cannot be listed; what is below it is refused under its name.
    """
    start = os.fspath(root)
    found = _Found(start, os.path.realpath(start), folders=[_Folder(start, "")])
    # Own folders come before linked ones, so that a loop is reported under its own name.
    while found.folders or found.linked_folders:
        _visit((found.folders or found.linked_folders).pop(), found)
    names, stats = found.pictures.ordered()
    return Walk(
        root=root,
        names=names,
        stats=stats,
        texts=found.texts,
        outside_texts=frozenset(found.outside_texts),
        others=found.others,
        refused=in_order(found.refused),
        notes=in_order(found.notes),
    )


def in_order(refusals: list[Refusal]) -> tuple[Refusal, ...]:
    """In the byte order of names."""
    return tuple(sorted(refusals, key=lambda item: os.fsencode(item.name)))


def extension_of(name: str) -> str:
    """The extension in lower case with its dot; empty when there is none."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot >= 0 else ""


def is_inside(path: str, real_root: str) -> bool:
    """Whether a path, its links resolved, lies in a folder whose own path has no links."""
    real = os.path.realpath(path)
    return real == real_root or real.startswith(real_root.rstrip("/") + "/")


def _visit(folder: _Folder, found: _Found) -> None:
    """List one folder and sort out what is in it."""
    try:
        with os.scandir(folder.path) as listing:
            entries = sorted(listing, key=attrgetter("name"))
    except OSError as error:
        if not folder.prefix:
            raise _unlistable(folder.path, error) from error
        detail = f"the folder cannot be listed: {error.strerror}"
        item = refusal(folder.prefix, cause_of(error), detail)
        (found.notes if folder.hidden else found.refused).append(item)
        return
    if folder.prefix and _CACHE_MARKS.issubset(entry.name for entry in entries):
        found.notes.append(refusal(folder.prefix, "cache-folder", "it holds CURRENT and generations/"))
        return
    for entry in entries if folder.hidden else _beside_plain_pictures(entries, folder.prefix, found):
        _sort_out(entry, folder, found)


def _beside_plain_pictures(
    entries: Sequence[os.DirEntry[str]], prefix: str, found: _Found
) -> Iterator[os.DirEntry[str]]:
    """Takes the pictures that are plain files, nearly everything in most folders; gives back all the rest."""
    for entry in entries:
        name = entry.name
        if name[name.rfind(".") :] not in READ_EXTENSIONS or name[0] == ".":
            yield entry
            continue
        try:
            result = entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
        except OSError:
            result = None  # it will fail once more, and be refused in words
        if result is None:
            yield entry
        else:
            found.pictures.add(prefix + name, result)


def _sort_out(entry: os.DirEntry[str], folder: _Folder, found: _Found) -> None:
    """One name: a link, a folder or a file."""
    name = folder.prefix + entry.name
    try:
        if entry.is_symlink():
            _link(entry, name, folder, found)
        elif entry.is_dir(follow_symlinks=False):
            _own_folder(entry, name, folder, found)
        else:
            _file(entry, name, folder, found)
    except FileNotFoundError:
        found.refused.append(refusal(name, "vanished", "it was removed while the folder was listed"))
    except OSError as error:
        found.refused.append(refusal(name, cause_of(error), f"its state cannot be read: {error.strerror}"))


def _own_folder(entry: os.DirEntry[str], name: str, folder: _Folder, found: _Found) -> None:
    if entry.name.endswith(CACHE_SUFFIX):
        found.notes.append(refusal(name + "/", "cache-folder", f"its name ends in {CACHE_SUFFIX}"))
        return
    hidden = folder.hidden or entry.name.startswith(".")
    found.folders.append(_Folder(entry.path, name + "/", hidden, folder.linked))


def _file(entry: os.DirEntry[str], name: str, folder: _Folder, found: _Found) -> None:
    """A regular file, or a pipe, socket or device: only the name says that somebody meant a picture."""
    extension = extension_of(entry.name)
    if extension not in PICTURE_EXTENSIONS:
        _other(name, extension, found)
    elif folder.hidden or entry.name.startswith("."):
        _hidden(name, found)
    elif entry.is_file(follow_symlinks=False):
        found.pictures.add(name, entry.stat(follow_symlinks=False))
    else:
        _not_regular(name, entry.stat(follow_symlinks=False).st_mode, found)


def _link(entry: os.DirEntry[str], name: str, folder: _Folder, found: _Found) -> None:
    """A symbolic link: followed when it ends inside the root."""
    extension = extension_of(entry.name)
    is_picture = extension in PICTURE_EXTENSIONS
    if folder.hidden or entry.name.startswith("."):
        if is_picture:
            _hidden(name, found)
        return
    try:
        target = entry.stat()
    except OSError as error:
        _broken(name, extension, error, found)
        return
    inside = is_inside(entry.path, found.real_root)
    if stat.S_ISDIR(target.st_mode):
        _linked_folder(entry, name, inside, folder, found)
    elif not is_picture:
        _other(name, extension, found, outside=not inside)
    elif not inside:
        found.refused.append(refusal(name, "outside-root", _leads_to(entry)))
    elif stat.S_ISREG(target.st_mode):
        found.pictures.add(name, target)
    else:
        _not_regular(name, target.st_mode, found)


def _broken(name: str, extension: str, error: OSError, found: _Found) -> None:
    """A link that leads nowhere: worth a refusal for a picture, a note for anything that could be a folder."""
    if extension in CAPTION_EXTENSIONS:
        _other(name, extension, found)
        return
    item = refusal(name, cause_of(error), f"the link cannot be followed: {error.strerror}")
    weighty = extension in PICTURE_EXTENSIONS or error.errno != errno.ENOENT
    (found.refused if weighty else found.notes).append(item)


def _linked_folder(entry: os.DirEntry[str], name: str, inside: bool, folder: _Folder, found: _Found) -> None:
    """Follow a link to a folder once, unless that would never end."""
    target, link = entry.stat(), entry.stat(follow_symlinks=False)
    if not inside:
        found.refused.append(refusal(name, "outside-root", _leads_to(entry)))
    elif (target.st_dev, target.st_ino) in _folders_above(folder, found.root):
        if (link.st_dev, link.st_ino) not in found.loops:
            found.loops.add((link.st_dev, link.st_ino))
            found.refused.append(refusal(name, "symlink-loop", f"{_leads_to(entry)}, a folder above it"))
    elif folder.linked:
        found.notes.append(refusal(name, "nested-link", _leads_to(entry)))
    else:
        found.linked_folders.append(_Folder(entry.path, name + "/", linked=True))


def _folders_above(folder: _Folder, root: str) -> set[tuple[int, int]]:
    """Device and inode of a folder and of all above it, up to the root."""
    parts = folder.prefix.split("/")[:-1]
    paths = [root, *("/".join([root, *parts[:depth]]) for depth in range(1, len(parts) + 1))]
    results = [os.stat(path) for path in paths]  # noqa: PTH116 - the names are strings here
    return {(result.st_dev, result.st_ino) for result in results}


def _other(name: str, extension: str, found: _Found, *, outside: bool = False) -> None:
    """A file that is no picture: perhaps a caption, or a table where none is looked for."""
    found.others[extension] += 1
    folder, _, file = name.rpartition("/")
    if folder and file in TABLE_NAMES:
        found.notes.append(refusal(name, "nested-table", f"only a table in {found.root} itself is read"))
    if extension in CAPTION_EXTENSIONS:
        # Of a.TXT and a.txt the second is met later and stays.
        found.texts[name[: -len(extension)] + extension] = name
        if outside:
            found.outside_texts.add(name)


def _hidden(name: str, found: _Found) -> None:
    found.notes.append(refusal(name, "hidden", "its name, or that of a folder above it, begins with a dot"))


def _not_regular(name: str, mode: int, found: _Found) -> None:
    found.refused.append(refusal(name, "not-regular", f"it is {kind_of(mode)}, not a regular file"))


def _leads_to(entry: os.DirEntry[str]) -> str:
    return f"the link leads to {os.readlink(entry.path)}"  # noqa: PTH115 - the names are strings here


def _unlistable(path: str, error: OSError) -> SourceError:
    return SourceError(
        f"the data folder cannot be listed: {path}",
        where=path,
        why=str(error.strerror),
        fix=f"check it with `ls -la {shlex.quote(path)}`",
    )
