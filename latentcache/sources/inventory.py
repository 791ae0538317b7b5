"""Everything below DATA, listed once: names, states, and what cannot be used as it is.

A folder is listed when somebody asks for it, and then kept: recognizers and readers look at the same listing. Files
are never opened. Each file is in ``Folder.names``, in ``Folder.rejected``, in a note, or in ``Folder.loose``.

Links: a link to a target inside the root is followed under the link's name. So is one into ``blobs/`` of the same
``models--*`` or ``datasets--*`` folder, as ``huggingface_hub.snapshot_download`` makes them. Other links out of the
root need ``follow_links``. A link to nothing, or to a folder above itself, is rejected. Links inside a linked folder
to other folders are noted. Cost: one listing per folder, and one stat per name.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
import struct
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from latentcache.errors import SourceError, SourceNotFoundError, UsageError, count_of
from latentcache.fields.table import Rejected
from latentcache.identity.content import StatMemo
from latentcache.sources.causes import Notes, cause_of, hint_for, rejected
from latentcache.sources.formats.files import kind_of

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
#: Extensions of archives, tables and records, read or not.
ARCHIVE_EXTENSIONS = frozenset((".tar", ".parquet", ".arrow", ".csv", ".tsv", ".jsonl", ".ndjson", ".text", ".toml"))
PACKED_EXTENSIONS = frozenset((".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4", ".tgz", ".tbz2", ".txz"))
#: A file with one of these that cannot be used is rejected; any other one is only noted.
DATA_EXTENSIONS = IMAGE_EXTENSIONS.union(CAPTION_EXTENSIONS, ARCHIVE_EXTENSIONS, PACKED_EXTENSIONS)
#: So many files have these extensions that they are counted, not listed, in :attr:`Folder.others`.
_COMMON = IMAGE_EXTENSIONS.union((".txt", ".caption"))
_CACHE_MARKS = frozenset(("CURRENT", "BUILDING", "builder.lock"))
_HUB = re.compile(r".*?/(?:models|datasets|spaces)--[^/]+(?=/|$)")
_STATE = attrgetter("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev", "st_mode")
_PACKED = struct.Struct("QqqQQQ")


@dataclass(slots=True, kw_only=True)
class Folder:
    """One folder below the root."""

    path: str
    """Below the root, without ``/`` at the end; empty: the root."""
    stats: NDArray[np.uint64] = field(default_factory=lambda: np.empty((0, 5), dtype=np.uint64))
    """(n, 5) size, mtime_ns, ctime_ns, inode, device of the names; times before 1970 wrap into 64 bits."""
    folders: dict[str, bool] = field(default_factory=dict)
    """Names of the folders in it -> True for a link to a folder."""
    counts: Counter[str] = field(default_factory=Counter)
    """Extension in lower case -> how many of the names have it."""
    others: tuple[str, ...] = ()
    """The names of files other than images and plain texts."""
    loose: list[str] = field(default_factory=list)
    """Names in it that are never data and cannot be used: sockets, hidden files."""
    rejected: dict[str, Rejected] = field(default_factory=dict)
    """Names in it that cannot be used."""
    notes: list[Rejected] = field(default_factory=list)
    digest: bytes = b""
    """Of names and sizes of the files that may be data."""
    _text: str = ""

    @property
    def names(self) -> list[str]:
        """(n,) names of its files, in byte order."""
        return self._text.split("\0") if self._text else []

    @property
    def prefix(self) -> str:
        """Prefix of the names in it."""
        return self.path and self.path + "/"

    @property
    def images(self) -> int:
        """Files with the name of an image or a video."""
        return sum(count for extension, count in self.counts.items() if extension in IMAGE_EXTENSIONS)

    def reject(self, name: str, cause: str, detail: str) -> None:
        """Reject one of its names."""
        self.rejected[name] = rejected(self.prefix + name, cause, detail)

    def release(self) -> None:
        """Free names and states: a reader has taken them."""
        self._text = ""
        self.stats = self.stats[:0]


class Inventory:
    """The files and folders of DATA.

    Args:
        data: A folder, or one file, whose neighbors are not listed. The first listing raises SourceNotFoundError,
            SourceError or UsageError if it is neither.
        follow_links: Follow links that lead out of the root, too.
    """

    def __init__(self, data: Path, *, follow_links: bool = False) -> None:
        self.is_file = os.path.isfile(data)  # noqa: PTH113 - ``Path.is_file`` raises in a folder closed to this user
        self.data, self.root = data, data.parent if self.is_file else data
        """As given, and the folder that names are below."""
        self.follow_links = follow_links
        self._start, self._real = os.fspath(self.root), os.path.realpath(self.root)
        hub = _HUB.match(self._real)
        self._blobs = f"{hub[0]}/blobs/" if hub else ""
        self._folders: dict[str, Folder] = {}

    @property
    def top(self) -> Folder:
        """The root."""
        return self.folder("")

    def folder(self, path: str) -> Folder:
        """One folder; an empty one if it is not there or cannot be listed."""
        if path not in self._folders:
            above, _, name = path.rpartition("/")
            is_linked = above in self._folders and self._folders[above].folders.get(name, False)
            self._folders[path] = self._listed(path, is_linked)
        return self._folders[path]

    def below(self, path: str = "") -> Iterator[Folder]:
        """A folder and those below it, level by level."""
        todo = deque([path])
        while todo:
            folder = self.folder(todo.popleft())
            yield folder
            todo += [folder.prefix + name for name in folder.folders]

    def files(self, *endings: str) -> list[str]:
        """Names below the root of files with these endings in any case, in byte order; not of images and texts."""
        names = [folder.prefix + name for folder in self.below() for name in folder.others]
        return sorted((name for name in names if name.lower().endswith(endings)), key=os.fsencode)

    @property
    def contents(self) -> str:
        """The most common extensions with their counts, for a message."""
        there = Counter[str]()
        for folder in self.below():
            there.update(folder.counts)
        common = sorted(there.items(), key=lambda pair: (-pair[1], pair[0]))[:5]
        return ", ".join(f"{count} {extension or 'without ending'}" for extension, count in common) or "no files"

    def digest(self, paths: Iterable[str] = ("",)) -> str:
        """Digest of the names and sizes of files in some folders that may be data; moving DATA does not change it."""
        total = xxhash.xxh3_128()
        for folder in sorted((inner for path in paths for inner in self.below(path)), key=attrgetter("path")):
            total.update(os.fsencode(folder.prefix) + b"\0" + folder.digest)
        return total.hexdigest()

    def _listed(self, path: str, linked: bool) -> Folder:
        folder = Folder(path=path)
        full = f"{self._start}/{path}" if path else self._start
        if self.is_file and not path:
            self._fill(folder, [], folder.stats, {self.data.name: self.data.stat()})
            return folder
        try:
            names, numbers, odd = _states(full)
        except OSError as error:
            if not path:
                raise _not_listed(self.data, error) from error
            problem = f"the folder cannot be listed: {error.strerror}"
            folder.rejected[""] = rejected(folder.prefix, cause_of(error), problem)
            return folder
        mode = numbers[:, 5] & 0o170000
        is_file, is_folder = mode == stat.S_IFREG, mode == stat.S_IFDIR
        inner = list(compress(names, is_folder))
        if path and "shards" in inner and _CACHE_MARKS.intersection(names):
            folder.notes.append(rejected(folder.prefix, "cache-folder", "it holds a cache"))
            return folder
        for name in inner:
            if name.endswith(CACHE_SUFFIX):
                note = rejected(f"{folder.prefix}{name}/", "cache-folder", f"its name ends in {CACHE_SUFFIX}")
                folder.notes.append(note)
            else:
                folder.folders[name] = linked
        files = dict[str, os.stat_result]()
        for name in sorted([*odd, *compress(names, ~(is_file | is_folder))]):
            try:
                if state := self._file_behind(folder, name, f"{full}/{name}", linked):
                    files[name] = state
            except OSError as error:
                folder.reject(name, cause_of(error), f"its state cannot be read: {error.strerror}")
        if not is_file.all():
            names = list(compress(names, is_file))
            numbers = numbers[is_file]
        self._fill(folder, names, numbers[:, :5], files)
        return folder

    def _fill(
        self, folder: Folder, names: list[str], stats: NDArray[np.uint64], files: Mapping[str, os.stat_result]
    ) -> None:
        """Add plain files in byte order, and further ones."""
        if files:
            names = [*names, *files]
            memos = np.array([StatMemo.of(state).identity for state in files.values()], dtype=np.uint64)
            order = sorted(range(len(names)), key=[os.fsencode(name) for name in names].__getitem__)
            names = [names[number] for number in order]
            stats = np.concatenate([stats, memos])[order]
        folder.counts = Counter(map(extension_of, names))
        if not folder.counts.keys() <= _COMMON:
            folder.others = tuple(name for name in names if extension_of(name) not in _COMMON)
        folder.stats = stats
        folder._text = "\0".join(names)
        sizes = stats[:, 0]
        text = folder._text
        if not folder.counts.keys() <= DATA_EXTENSIONS:
            is_data = [extension_of(name) in DATA_EXTENSIONS for name in names]
            sizes = sizes[is_data]
            text = "\0".join(compress(names, is_data))
        folder.digest = xxhash.xxh3_64_digest(os.fsencode(text) + sizes.tobytes())

    def _file_behind(self, folder: Folder, name: str, path: str, linked: bool) -> os.stat_result | None:
        """The state of a file behind a link, or of one that is new; other names are noted, rejected or loose."""
        state = os.lstat(path)
        is_data = extension_of(name) in DATA_EXTENSIONS
        if name[0] != ".":
            if stat.S_ISLNK(state.st_mode):
                return self._followed(folder, name, path, linked)
            if stat.S_ISREG(state.st_mode):
                return state
            _set_aside(folder, name, state.st_mode)
        elif is_data and not stat.S_ISDIR(state.st_mode):
            folder.notes.append(rejected(folder.prefix + name, "hidden", "its name begins with a dot"))
        elif not stat.S_ISDIR(state.st_mode):
            folder.loose.append(name)
        elif count := sum(len(files) for _, _, files in os.walk(path)):
            detail = f"its name begins with a dot; {count_of(count, 'files')} in it"
            folder.notes.append(rejected(f"{folder.prefix}{name}/", "hidden", detail, count=count))
        return None

    def _followed(self, folder: Folder, name: str, path: str, linked: bool) -> os.stat_result | None:
        """The state of the file that a link leads to; a folder is followed once, unless that would never end."""
        leads_to = f"the link leads to {os.readlink(path)}"  # noqa: PTH115
        full = folder.prefix + name
        is_data = extension_of(name) in DATA_EXTENSIONS
        try:
            target = os.stat(path)  # noqa: PTH116
        except OSError as error:
            detail = f"the link cannot be followed: {error.strerror}"
            if is_data or error.errno != errno.ENOENT:
                folder.reject(name, cause_of(error), detail)
            else:  # it could be a folder
                folder.notes.append(rejected(full, cause_of(error), detail))
            return None
        is_folder = stat.S_ISDIR(target.st_mode)
        real = os.path.realpath(path)
        in_blobs = bool(self._blobs) and real.startswith(self._blobs)
        may_follow = self.follow_links or in_blobs or is_inside(real, self._real)
        if not may_follow and (is_folder or is_data):
            folder.reject(name, "outside-root", leads_to)
        elif not is_folder and not stat.S_ISREG(target.st_mode):
            _set_aside(folder, name, target.st_mode)
        elif not may_follow:
            folder.loose.append(name)
        elif not is_folder:
            return target
        elif linked:
            folder.notes.append(rejected(full, "nested-link", leads_to))
        elif is_inside(os.path.dirname(path), real):  # noqa: PTH120
            folder.reject(name, "symlink-loop", f"{leads_to}, a folder above it")
        else:
            folder.folders[name] = True
        return None


def _set_aside(folder: Folder, name: str, mode: int) -> None:
    """Reject a pipe or a device with the name of data; others are never data."""
    if extension_of(name) in DATA_EXTENSIONS:
        folder.reject(name, "not-regular", f"it is {kind_of(mode)}, not a regular file")
    else:
        folder.loose.append(name)


def count_unused(notes: Notes, names: Iterable[str]) -> None:
    """Count files that no reader takes in one note for each extension."""
    for name in names:
        extension = extension_of(name)
        cause = "no-frame-count" if extension in CLIP_EXTENSIONS else "unused"
        notes.count(cause, f"files {f'ending in {extension}' if extension else 'without ending'}", (name,))


def not_a_folder(data: Path) -> UsageError:
    """The error for DATA that is something else, such as a file that no reader takes."""
    if extension_of(data.name) in PACKED_EXTENSIONS:
        return UsageError(f"DATA is packed: {data}", where=str(data), fix=hint_for("compressed"))
    mode = data.stat().st_mode
    why = f"expected a folder of images, found {'a file' if stat.S_ISREG(mode) else kind_of(mode)}"
    fix = f"give the folder that holds the images: `latentcache build {shlex.quote(str(data.parent))}`"
    return UsageError(f"DATA is not a folder: {data}", where=str(data), why=why, fix=fix)


def _not_listed(data: Path, error: OSError) -> SourceError | UsageError:
    if isinstance(error, NotADirectoryError) and data.exists():
        return not_a_folder(data)
    is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
    kind = SourceNotFoundError if is_absent else SourceError
    problem = "no such folder" if is_absent else "the data folder cannot be listed"
    fix = f"check it with `ls -ld {shlex.quote(str(data))}`"
    return kind(f"{problem}: {data}", where=str(data), why=str(error.strerror), fix=fix)


def extension_of(name: str) -> str:
    """The extension in lower case with its dot; empty when there is none."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot >= 0 else ""


def is_inside(path: str, real_root: str) -> bool:
    """True if a path, its links resolved, is in a folder whose own path has no links."""
    real = os.path.realpath(path)
    return real == real_root or real.startswith(real_root.rstrip("/") + "/")


def _states(path: str) -> tuple[list[str], NDArray[np.uint64], list[str]]:
    """The names in a folder in byte order, (n, 6) their states and modes, links not followed; and other names.

    One listing, and one stat per name without a path. Other names begin with a dot, or have no state.
    """
    names, others, packed = list[str](), list[str](), bytearray()
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in sorted(os.listdir(handle), key=os.fsencode):  # noqa: PTH208 - there is no path
            try:
                state = None if name[0] == "." else os.stat(name, dir_fd=handle, follow_symlinks=False)
            except OSError:  # it is gone, or may not be looked at
                state = None
            if state is None:
                others.append(name)
            else:
                names.append(name)
                packed += _PACKED.pack(*_STATE(state))  # half the time of an array from numbers
    finally:
        os.close(handle)
    return names, np.frombuffer(packed, dtype=np.uint64).reshape(-1, 6), others
