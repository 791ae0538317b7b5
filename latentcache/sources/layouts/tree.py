"""The folders of DATA as far as layouts need them: names only, no file is opened and no state is read.

The first levels are listed, and a bounded number of folders, so that recognizing a data set costs little beside
walking it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from latentcache.sources.layouts.sets import CAPTION_EXTENSIONS
from latentcache.sources.walk import CACHE_SUFFIX, IMAGE_EXTENSIONS, common_endings, extension_of

#: Levels below DATA that are looked at, and folders in all.
MAX_DEPTH, MAX_FOLDERS = 3, 4096


class Folder(NamedTuple):
    """One folder, links followed."""

    path: str = ""
    """Below the root, without ``/`` at the end; empty: the root."""
    folders: tuple[str, ...] = ()
    """Names of the folders in it, in order."""
    images: int = 0
    """Files in it with the name of an image."""
    others: frozenset[str] = frozenset()
    """Names of its other files."""


class Tree:
    """The first levels of a folder, listed when they are asked for."""

    def __init__(self, root: Path) -> None:
        self.root, self._known = root, dict[str, Folder]()
        self.listed = dict[str, str]()
        """Path of each folder -> the names in it, joined by ``/``; the walk need not list it again."""

    @property
    def top(self) -> Folder:
        """The root."""
        return self.folder("")

    def folder(self, path: str) -> Folder:
        """One folder; empty if it cannot be listed."""
        if path not in self._known:
            self._known[path] = self._list(path)
        return self._known[path]

    def below(self, path: str = "", depth: int = MAX_DEPTH) -> Iterator[Folder]:
        """A folder and those below it, level by level, down to ``depth`` levels."""
        level = [path]
        for _ in range(depth + 1):
            found = []
            for one in level:
                if len(self._known) > MAX_FOLDERS:
                    return
                folder = self.folder(one)
                yield folder
                found += [f"{one}/{name}" if one else name for name in folder.folders]
            level = found

    def _list(self, below: str) -> Folder:
        path = f"{self.root}/{below}" if below else str(self.root)
        try:
            names = os.listdir(path)  # noqa: PTH208 - half the time of a scan, and most names tell what they are
        except OSError:
            return Folder(below)  # the walk says why
        self.listed[path] = "/".join(names)
        plain = common_endings(names, _PLAIN)
        rest = [] if plain else [name for name in names if name[name.rfind(".") :] not in _PLAIN or name[0] == "."]
        images, folders, others = len(names) - len(rest), list[str](), list[str]()
        for name in rest:
            if name[0] == ".":
                continue
            if not name.endswith(CAPTION_EXTENSIONS) and os.path.isdir(f"{path}/{name}"):  # noqa: PTH112
                folders += [] if name.endswith(CACHE_SUFFIX) else [name]
            elif extension_of(name) in IMAGE_EXTENSIONS:
                images += 1
            else:
                others.append(name)
        return Folder(below, tuple(sorted(folders)), images, frozenset(others))


_PLAIN = frozenset((*IMAGE_EXTENSIONS, *map(str.upper, IMAGE_EXTENSIONS)))
