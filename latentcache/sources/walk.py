"""Which picture files a folder holds, found in one pass over its directories.

Guarantee: every picture file below the root is listed, refused or noted, none twice under one name; the walk
always ends, see ``sorting``; results are in the byte order of names. Files are never opened.
Cost: one scandir per folder and one stat per picture. Memory, where pictures are taken as they come: the names of the
pictures in one folder and in those above it.
"""

from __future__ import annotations

import os
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import SourceError
from latentcache.identity.stat import StatMemo
from latentcache.sources.causes import cause_of, refusal
from latentcache.sources.sample import Refusal, StatColumns, unpack_identity
from latentcache.sources.sorting import CACHE_MARKS, READ_EXTENSIONS, Folder, Level, Said, sort_out, stateless

#: Pictures that are given at once.
_TOGETHER = 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Some pictures of one folder, in the byte order of their names, and the caption files beside them."""

    root: Path
    names: Sequence[str]
    stats: NDArray[np.uint64]
    """(P, 5), see ``sample.SampleColumns``."""
    texts: Mapping[str, str]
    outside_texts: Set[str]


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


class PictureWalk:
    """The pictures below a folder in the byte order of their names, some at a time; to be gone through once.

    What there is to say of the rest is known in the end.

    Args:
        root: The folder.
    """

    def __init__(self, root: Path) -> None:
        start = os.fspath(root)
        self.root = root
        self._said = Said(start, os.path.realpath(start))

    @property
    def others(self) -> Mapping[str, int]:
        """Files that are no pictures: extension in lower case -> how many."""
        return self._said.others

    @property
    def refused(self) -> list[Refusal]:
        """In no order."""
        return [*self._said.refused, *(item for _, item in self._said.loops.values())]

    @property
    def notes(self) -> list[Refusal]:
        """In no order."""
        return self._said.notes

    def __iter__(self) -> Iterator[Pictures]:
        """Goes through them.

        Raises:
            SourceError: The folder itself cannot be listed; what is below it is refused under its name.
        """
        open_folders = [self._inside(Folder(self._said.root, ""))]
        while open_folders:
            item = next(open_folders[-1], None)
            if item is None:
                open_folders.pop()
            elif isinstance(item, Folder):
                open_folders.append(self._inside(item))
            else:
                yield item

    def _inside(self, folder: Folder) -> Iterator[Pictures | Folder]:
        """What is in one folder, with the folders in it where their names come: ``a-b.png``, ``a.png``, ``a/``."""
        level = Level()
        names = _listed(folder, level, self._said)
        in_bytes = not all(map(str.isascii, names)) or any(not f.prefix.isascii() for f in level.folders)
        order = os.fsencode if in_bytes else str
        names.sort(key=order if in_bytes else None)
        done, cut = 0, len(folder.prefix)
        for below in sorted(level.folders, key=lambda item: order(item.prefix)):
            end = bisect_left(names, order(below.prefix[cut:]), lo=done, key=order)
            yield from self._stated(names[done:end], folder, level)
            yield below
            done = end
        yield from self._stated(names[done:] if done else names, folder, level)

    def _stated(self, names: Sequence[str], folder: Folder, level: Level) -> Iterator[Pictures]:
        """Pictures of one folder with their stats."""
        odd, path, prefix, lstat = level.pictures, folder.path + "/", folder.prefix, os.lstat
        at_least = 1 if level.texts else 0  # captions without pictures are given, too
        for start in range(0, max(len(names), at_least), _TOGETHER):
            columns = StatColumns()
            for name in names[start : start + _TOGETHER]:
                try:
                    columns.add(prefix + name, odd.get(name) or lstat(path + name))
                except OSError as error:
                    self._said.refused.append(stateless(prefix + name, error))
            yield Pictures(
                root=self.root,
                names=columns.names,
                stats=columns.stats,
                texts=level.texts,
                outside_texts=level.outside_texts,
            )


def walk_pictures(root: Path) -> Walk:
    """Find the picture files and caption files below a folder.

    Raises:
        SourceError: The folder itself cannot be listed; what is below it is refused under its name.
    """
    walk, names, stats = PictureWalk(root), list[str](), [np.empty((0, 5), dtype=np.uint64)]
    texts, outside = dict[str, str](), set[str]()
    for some in walk:
        names += some.names
        stats.append(some.stats)
        texts |= some.texts
        outside |= some.outside_texts
    return Walk(
        root=root,
        names=names,
        stats=np.concatenate(stats),
        texts=texts,
        outside_texts=frozenset(outside),
        others=walk.others,
        refused=in_order(walk.refused),
        notes=in_order(walk.notes),
    )


def in_order(refusals: list[Refusal]) -> tuple[Refusal, ...]:
    """In the byte order of names."""
    return tuple(sorted(refusals, key=lambda item: os.fsencode(item.name)))


def check_listable(root: Path) -> None:
    """Refuse a folder that cannot be listed.

    Raises:
        SourceError: It cannot.
    """
    try:
        os.scandir(root).close()
    except OSError as error:
        raise _unlistable(os.fspath(root), error) from error


def _listed(folder: Folder, level: Level, said: Said) -> list[str]:
    """List one folder and sort out what is in it; gives the names of its pictures in no order."""
    plain, rest = list[str](), list[os.DirEntry[str]]()
    try:
        with os.scandir(folder.path) as listing:
            for entry in listing:
                name = entry.name
                if (
                    folder.hidden
                    or name[name.rfind(".") :] not in READ_EXTENSIONS
                    or name[0] == "."
                    or not _is_file(entry)
                ):
                    rest.append(entry)
                else:
                    plain.append(name)
    except OSError as error:
        if not folder.prefix:
            raise _unlistable(folder.path, error) from error
        detail = f"the folder cannot be listed: {error.strerror}"
        item = refusal(folder.prefix, cause_of(error), detail)
        (said.notes if folder.hidden else said.refused).append(item)
        return []
    if folder.prefix and CACHE_MARKS.issubset(entry.name for entry in rest):
        said.notes.append(refusal(folder.prefix, "cache-folder", "it holds CURRENT and generations/"))
        return []
    for entry in sorted(rest, key=attrgetter("name")):
        sort_out(entry, folder, level, said)
    return plain + list(level.pictures) if level.pictures else plain


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether a name is surely a plain file; what the system does not say of it is said later, in words."""
    try:
        return entry.is_file(follow_symlinks=False)
    except OSError:
        return False


def _unlistable(path: str, error: OSError) -> SourceError:
    return SourceError(
        f"the data folder cannot be listed: {path}",
        where=path,
        why=str(error.strerror),
        fix=f"check it with `ls -la {shlex.quote(path)}`",
    )
