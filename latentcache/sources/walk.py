"""One pass over the folders of DATA: every file is listed, rejected or noted, and the walk always ends.

Links: a link to a place inside the root is followed under the link's name. A link out of the root, to nothing or to a
folder above itself is rejected. Links inside a linked folder to other folders are noted. Names that begin with a dot
are noted. Caches are noted and not entered. Files are never opened. Cost: one scandir per folder and one stat per
wanted file.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import struct
import sys
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, starmap
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import SourceError, count_of
from latentcache.fields.table import Rejected
from latentcache.identity.stat import StatMemo
from latentcache.sources.causes import cause_of, rejected
from latentcache.sources.reading import kind_of

#: Ending of the folders that `latentcache build` makes by default.
CACHE_SUFFIX = ".latentcache"
#: Metadata tables of the Hugging Face image folder.
TABLE_NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
#: Extensions of videos, which are samples beside images.
CLIP_EXTENSIONS = frozenset((".mp4", ".mkv", ".webm", ".mov"))
#: Extensions that make a file an image, in lower case; unsupported ones are rejected later, by content.
IMAGE_EXTENSIONS = CLIP_EXTENSIONS.union(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"),
    (".heic", ".heif", ".jxl", ".svg"),
)
#: Extensions of caption files beside an image, in order; ``.json`` is an object with a caption.
CAPTION_EXTENSIONS = (".txt", ".caption", ".json")
_PLAIN = frozenset((*IMAGE_EXTENSIONS, *map(str.upper, IMAGE_EXTENSIONS)))
_CACHE_MARKS = frozenset(("CURRENT", "BUILDING", "builder.lock"))
#: Notes of one reason that are given one by one; the rest is one note with a count.
_NOTES_EACH = 100
_STATE = attrgetter("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev", "st_mode")
_PACKED = struct.Struct("QqqQQQ")
_NO_STATS = np.empty((0, 5), dtype=np.uint64)


class Notes:
    """Notes by reason: the first ones one by one, the rest counted."""

    def __init__(self) -> None:
        self._first: dict[str, list[Rejected]] = defaultdict(list)
        self._more: dict[str, tuple[Rejected, int]] = {}

    def add(self, *items: Rejected) -> None:
        """Further notes."""
        for item in items:
            if len(kept := self._first[item.reason]) < _NOTES_EACH:
                kept.append(item)
            else:
                first, count = self._more.get(item.reason, (item, 0))
                self._more[item.reason] = first, count + item.count

    def all(self) -> tuple[Rejected, ...]:
        """In the byte order of names; those that were only counted at the end."""
        more = [
            rejected(first.name, reason, f"{count} more, such as {first.name}: {first.detail}", count=count)
            for reason, (first, count) in self._more.items()
        ]
        return (*in_order([item for kept in self._first.values() for item in kept]), *more)


@dataclass(slots=True)
class Level:
    """The wanted files of one folder."""

    prefix: str
    """Prefix of the names in it: empty for the root, else with ``/`` at the end."""
    names: list[str]
    """Without the prefix, in byte order."""
    stats: NDArray[np.uint64]
    """(n, 5) size, mtime_ns, ctime_ns, inode, device; times before 1970 wrap into 64 bits."""
    lost: dict[str, Rejected] = field(default_factory=dict)
    """Names in it that were rejected, without the prefix."""
    mark: Any = None
    """The consumer's own."""


class _Folder(NamedTuple):
    path: str
    prefix: str
    linked: bool = False


class Walk:
    """The files below a folder whose names end in wanted extensions; to be gone through once.

    Iterating gives (level, start, stop): spans of ``level.names``. They are in the byte order of whole names
    (``a-b.png``, ``a.png``, ``a/...``), so a folder with subfolders has several spans. ``rejected`` and ``notes`` are
    whole at the end.

    Args:
        root: The folder.
        wanted: Extensions in lower case with their dot.
        used: Names of other files that are read, and so are not unused.
        folders: Folders below the root to list, none inside another one; by default all of the root.

    Raises:
        SourceError: The folder itself cannot be listed (when iterated).
    """

    def __init__(
        self,
        root: Path,
        wanted: AbstractSet[str],
        *,
        used: AbstractSet[str] = frozenset(),
        folders: Sequence[str] = ("",),
    ) -> None:
        self._folders = sorted(folders, key=lambda one: os.fsencode(one + "/"))
        self.root, self._wanted, self._used = root, wanted, used
        # In the one case in which they are written, mostly: saves a call per file.
        self._plain = frozenset((*wanted, *map(str.upper, wanted)))
        self._start, self._real = os.fspath(root), os.path.realpath(root)
        self.others: Counter[str] = Counter()
        """Files of other extensions: extension -> how many."""
        self.notes, self.rejected = Notes(), list[Rejected]()
        self._examples: dict[str, list[str]] = defaultdict(list)

    def __iter__(self) -> Iterator[tuple[Level, int, int]]:
        for folder in self._folders:
            path = f"{self._start}/{folder}" if folder else self._start
            try:
                yield from self._inside(_Folder(path, folder and folder + "/"))
            except RecursionError:
                why = f"about {sys.getrecursionlimit()} levels can be followed"
                fix = "move the images out of it, or the folder away"
                raise SourceError("folders lie too deep in each other", where=path, why=why, fix=fix) from None

    def named(self) -> set[str]:
        """Names that are rejected or noted so far."""
        return {item.name for item in (*self.rejected, *self.notes.all())}

    def note_unused(self) -> None:
        """Note the files of other extensions, one note for each extension."""
        for extension, count in self.others.items():
            names = self._examples[extension]
            words = count_of(count, f"files {f'ending in {extension}' if extension else 'without ending'}")
            detail = f"{words}: {', '.join(names)}{', ...' * (count > len(names))}"
            reason = "no-frame-count" if extension in CLIP_EXTENSIONS else "unused"
            self.notes.add(rejected(names[0], reason, detail, count=count))

    def _inside(self, folder: _Folder) -> Iterator[tuple[Level, int, int]]:
        """One folder, with the folders in it at the place of their names."""
        level, folders = self._listed(folder)
        names, done, cut = level.names, 0, len(folder.prefix)
        in_bytes = bool(folders) and not "".join((*names, *(below.prefix for below in folders))).isascii()
        order = os.fsencode if in_bytes else str
        for below in sorted(folders, key=lambda item: order(item.prefix)):
            end = bisect_left(names, order(below.prefix[cut:]), lo=done, key=order)
            if end > done or level.mark is None:
                yield level, done, end
            yield from self._inside(below)
            done = end
        if done < len(names) or not folders:
            yield level, done, len(names)

    def _listed(self, folder: _Folder) -> tuple[Level, list[_Folder]]:
        """The files of a folder in byte order with their stats, and the folders in it."""
        prefix, odd, folders = folder.prefix, dict[str, os.stat_result](), list[_Folder]()
        before = len(self.rejected)
        try:
            names, stats, rest = _plain_files(folder.path, self._plain)
            with os.scandir(folder.path) if rest else nullcontext(()) as entries:
                others = sorted((entry for entry in entries if entry.name in rest), key=attrgetter("name"))
        except OSError as error:
            if not prefix:
                raise SourceError(
                    f"the data folder cannot be listed: {folder.path}",
                    where=folder.path,
                    why=str(error.strerror),
                    fix=f"check it with `ls -la {shlex.quote(folder.path)}`",
                ) from error
            self._reject(prefix, cause_of(error), f"the folder cannot be listed: {error.strerror}")
            return Level(prefix, [], _NO_STATS), []
        if prefix and "shards" in rest and rest & _CACHE_MARKS:
            self.notes.add(rejected(prefix, "cache-folder", "it holds a cache"))
            return Level(prefix, [], _NO_STATS), []
        for entry in others:
            try:
                state = self._sort_out(entry, prefix + entry.name, folder, folders)
            except OSError as error:
                self._reject(prefix + entry.name, cause_of(error), f"its state cannot be read: {error.strerror}")
                continue
            if state is not None and stat.S_ISREG(state.st_mode):
                odd[entry.name] = state
            elif state is not None:
                detail = f"it is {kind_of(state.st_mode)}, not a regular file"
                self._reject(prefix + entry.name, "not-regular", detail)
        if odd:
            names = [*names, *odd]
            memos = np.array([StatMemo.of(state).identity for state in odd.values()], dtype=np.uint64)
            order = sorted(range(len(names)), key=[os.fsencode(name) for name in names].__getitem__)
            names, stats = [names[number] for number in order], np.concatenate([stats, memos])[order]
        lost = {item.name[len(prefix) :]: item for item in self.rejected[before:]}
        return Level(prefix, names, stats, lost), folders

    def _sort_out(
        self, entry: os.DirEntry[str], name: str, folder: _Folder, folders: list[_Folder]
    ) -> os.stat_result | None:
        """One name that is not plainly a wanted file: the state of a wanted one, whatever it is."""
        is_wanted, is_folder = extension_of(entry.name) in self._wanted, entry.is_dir(follow_symlinks=False)
        if entry.name.startswith(".") and is_folder:
            if count := sum(len(files) for _, _, files in os.walk(entry.path)):
                detail = f"its name begins with a dot; {count_of(count, 'files')} in it"
                self.notes.add(rejected(name + "/", "hidden", detail, count=count))
        elif entry.name.startswith(".") and is_wanted:
            self.notes.add(rejected(name, "hidden", "its name begins with a dot"))
        elif entry.is_symlink() and entry.name[0] != ".":
            return self._link(entry, name, folder, folders)
        elif is_folder and entry.name.endswith(CACHE_SUFFIX):
            self.notes.add(rejected(name + "/", "cache-folder", f"its name ends in {CACHE_SUFFIX}"))
        elif is_folder:
            folders.append(_Folder(entry.path, name + "/", folder.linked))
        elif is_wanted:
            return entry.stat(follow_symlinks=False)
        else:
            self._other(name)
        return None

    def _link(
        self, entry: os.DirEntry[str], name: str, folder: _Folder, folders: list[_Folder]
    ) -> os.stat_result | None:
        """A symbolic link: followed if it ends inside the root, to a folder once, unless that would never end."""
        is_wanted = extension_of(entry.name) in self._wanted
        try:
            target = entry.stat()
        except OSError as error:
            item = rejected(name, cause_of(error), f"the link cannot be followed: {error.strerror}")
            if is_wanted or error.errno != errno.ENOENT:
                self.rejected.append(item)
            else:  # it could be a folder
                self.notes.add(item)
            return None
        is_folder, leads_to = stat.S_ISDIR(target.st_mode), f"the link leads to {os.readlink(entry.path)}"  # noqa: PTH115
        if not is_folder and not is_wanted:
            self._other(name)
        elif not is_inside(entry.path, self._real):
            self._reject(name, "outside-root", leads_to)
        elif not is_folder:
            return target
        elif folder.linked:
            self.notes.add(rejected(name, "nested-link", leads_to))
        elif is_inside(folder.path, os.path.realpath(entry.path)):
            self._reject(name, "symlink-loop", f"{leads_to}, a folder above it")
        else:
            folders.append(_Folder(entry.path, name + "/", linked=True))
        return None

    def _reject(self, name: str, cause: str, detail: str) -> None:
        self.rejected.append(rejected(name, cause, detail))

    def _other(self, name: str) -> None:
        if name in self._used:
            return
        if name.rpartition("/")[2] in TABLE_NAMES:
            self.notes.add(rejected(name, "nested-table", "this layout has no metadata table here"))
        else:
            self.skip(name)

    def skip(self, name: str) -> None:
        """Count a file that no reader takes."""
        extension = extension_of(name)
        self.others[extension] += 1
        if len(self._examples[extension]) < 3:
            self._examples[extension].append(name)


def extension_of(name: str) -> str:
    """The extension in lower case with its dot; empty when there is none."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot >= 0 else ""


def is_inside(path: str, real_root: str) -> bool:
    """True if a path, its links resolved, is in a folder whose own path has no links."""
    real = os.path.realpath(path)
    return real == real_root or real.startswith(real_root.rstrip("/") + "/")


def in_order(items: Sequence[Rejected]) -> tuple[Rejected, ...]:
    """In the byte order of names."""
    return tuple(sorted(items, key=lambda item: os.fsencode(item.name)))


def _plain_files(path: str, endings: AbstractSet[str]) -> tuple[list[str], NDArray[np.uint64], set[str]]:
    """The regular files of a folder with one of these endings, in byte order, their stats, and all other names.

    All in C: one listing, and one stat per name without a path. If one of the files is gone, all are other names,
    which are looked at one by one.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        every = os.listdir(handle)  # noqa: PTH208 - there is no path
        names = _with_endings(every, endings)
        names.sort(key=None if "".join(names).isascii() else os.fsencode)
        states = map(partial(os.stat, dir_fd=handle, follow_symlinks=False), names)
        try:
            packed = b"".join(starmap(_PACKED.pack, map(_STATE, states)))  # half the time of an array from numbers
        except OSError:
            return [], _NO_STATS, set(every)
    finally:
        os.close(handle)
    numbers = np.frombuffer(packed, dtype=np.uint64).reshape(-1, 6)
    regular = numbers[:, 5] & 0o170000 == stat.S_IFREG
    if not regular.all():
        names, numbers = list(compress(names, regular)), numbers[regular]
    return names, numbers[:, :5], set(every).difference(names) if len(names) < len(every) else set()


def _with_endings(names: Sequence[str], endings: AbstractSet[str]) -> list[str]:
    """The names with one of these endings and no dot in front; in one pass in C if all are, as in most folders."""
    found, text = {name[name.rfind(".") :] for name in names[:8]}, "/".join(("", *names, ""))
    if found <= endings and "/." not in text and sum(text.count(ending + "/") for ending in found) == len(names):
        return list(names)
    return [name for name in names if name[name.rfind(".") :] in endings and name[0] != "."]


# the first levels, as far as layouts need them: names only, no file is opened and no state is read

#: Levels below DATA that are looked at, and folders in all.
MAX_DEPTH, MAX_FOLDERS = 3, 4096


class Folder(NamedTuple):
    """One folder, links followed."""

    path: str = ""
    """Below the root, without ``/`` at the end; empty: the root."""
    folders: tuple[str, ...] = ()
    images: int = 0
    """Files in it with the name of an image."""
    others: frozenset[str] = frozenset()
    """Names of its other files."""


class Tree:
    """The first levels of a folder, listed when they are asked for."""

    def __init__(self, root: Path) -> None:
        self.root, self._known = root, dict[str, Folder]()

    @property
    def top(self) -> Folder:
        """The root."""
        return self.folder("")

    def folder(self, path: str) -> Folder:
        """One folder; empty if it cannot be listed."""
        if path not in self._known:
            self._known[path] = self._list(path)
        return self._known[path]

    def below(self) -> Iterator[Folder]:
        """The root and the folders below it, level by level."""
        paths = deque([""])
        while paths and len(self._known) <= MAX_FOLDERS:
            folder = self.folder(path := paths.popleft())
            yield folder
            if path.count("/") < MAX_DEPTH - 1:
                paths += [f"{path}/{name}" if path else name for name in folder.folders]

    def _list(self, below: str) -> Folder:
        path = f"{self.root}/{below}" if below else str(self.root)
        try:
            names = os.listdir(path)  # noqa: PTH208 - half the time of a scan, and most names show what they are
        except OSError:
            return Folder(below)  # the walk says why
        plain, folders, others = _with_endings(names, _PLAIN), list[str](), list[str]()
        images = len(plain)
        for name in set(names).difference(plain) if images < len(names) else ():
            if name[0] == ".":
                continue
            if name.endswith(CAPTION_EXTENSIONS):
                others.append(name)
            elif os.path.isdir(f"{path}/{name}"):  # noqa: PTH112
                folders += [] if name.endswith(CACHE_SUFFIX) else [name]
            elif extension_of(name) in IMAGE_EXTENSIONS:
                images += 1
            else:
                others.append(name)
        return Folder(below, tuple(sorted(folders)), images, frozenset(others))
