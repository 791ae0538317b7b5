"""Paths of a cache, and the snapshot that readers open. Normative text: docs/format/cache.md."""

from __future__ import annotations

import errno
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from latentcache.errors import CacheDamagedError, CacheFormatError, CacheNotFoundError, StoreError
from latentcache.store.atomic_io import make_folder, read_file, sync_folder, unreadable

#: The only version that this release reads and writes.
FORMAT_VERSION = 2
OPEN_SUFFIX = ".open"
#: A URL after it was a path, which has one slash for several.
_URL = re.compile(r"([a-z][a-z0-9+.-]*):/+(.*)")
_CURRENT = re.compile(rb"[0-9]{6,}\n")


def url_of(path: Path) -> str:
    """The URL that a path was made of; empty: it was none."""
    match = _URL.fullmatch(str(path))
    return f"{match[1]}://{match[2]}" if match and not path.exists() else ""


class CachePaths:
    """The paths of one cache.

    ``current`` names the snapshot that readers open; ``building`` is there while a build has not ended; ``lock`` is
    never deleted; ``remote`` says which cache at a URL this is a copy of. ``scratch`` has data that is being made or
    removed, worth nothing once the builder lock is free.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.current, self.building = root, root / "CURRENT", root / "BUILDING"
        self.lock, self.shards, self.snapshots_folder = root / "builder.lock", root / "shards", root / "snapshots"
        self.scratch, self.remote = root / "scratch", root / "REMOTE"

    def snapshot(self, number: int) -> Path:
        """Folder of one snapshot."""
        return self.snapshots_folder / f"{number:06d}"

    def shard(self, name: str) -> Path:
        """Folder of one sealed shard."""
        return self.shards / name

    def data(self, name: str) -> Path:
        """The LMDB file of one sealed shard."""
        return self.shards / name / "data.mdb"

    def sealed_shards(self) -> list[Path]:
        """Sealed shards, in the order of their names."""
        return [path for path in _listed(self.shards, only_folders=True) if path.suffix != OPEN_SUFFIX]

    def open_shards(self) -> list[Path]:
        """Shards that are being written, or were when their builder died."""
        return [path for path in _listed(self.shards, only_folders=True) if path.suffix == OPEN_SUFFIX]

    def is_ours(self) -> bool:
        """Return True if a build was ever started here."""
        return any(path.exists() for path in (self.current, self.building, self.lock))

    def _instead(self) -> str:
        """Return the advice for a path without a cache: people often give DATA, whose cache is beside it."""
        path = shlex.quote(str(self.root))
        if url := url_of(self.root):
            return f"copy it first: latentcache pull {shlex.quote(url)} CACHE"
        if (beside := self.root.with_name(f"{self.root.name}.latentcache")).is_dir():
            return f"give the cache of this data: {shlex.quote(str(beside))}"
        if self.root.is_dir() and any(_listed(self.root)):
            return f"if this is DATA, make its cache with `latentcache build {path}`; else check the path"
        return f"make one with `latentcache build DATA --out {path}`, or check the path"

    def to_scratch(self, path: Path) -> Path:
        """Move what is to be removed out of the way in one step; a crash leaves it whole, here or there."""
        make_folder(self.scratch)
        moved = self.scratch / f"{path.name}-{os.urandom(4).hex()}"
        path.rename(moved)
        sync_folder(path.parent)
        return moved

    def current_snapshot(self) -> int:
        """Number of the snapshot readers open, 0 when no build has ended yet; raises StoreError."""
        try:
            text = read_file(self.current)
        except OSError as error:
            absent = isinstance(error, FileNotFoundError)
            if not absent and not isinstance(error, NotADirectoryError) and error.errno != errno.ENAMETOOLONG:
                raise unreadable(self.current, error) from error
            if absent and (self.building.exists() or self.shards.is_dir()):
                return 0
            why = "the folder has neither CURRENT nor shards/" if self.root.is_dir() else "no such folder"
            raise CacheNotFoundError(
                f"no cache at {str(self.root)[:200]}",
                where=str(self.root),
                why=why if absent else str(error.strerror),
                fix=self._instead() if absent else "check the path: a cache is a folder",
            ) from error
        if not _CURRENT.fullmatch(text) or not int(text):
            newest = max(self.snapshots(), default=0)
            raise CacheDamagedError(
                "CURRENT names no snapshot",
                where=str(self.current),
                why=f"expected six digits and a line end, found {text[:40]!r}",
                fix=f"echo {newest:06d} > {shlex.quote(str(self.current))}" if newest else "",
            )
        return int(text)

    def next_snapshot(self) -> int:
        """Number of the next snapshot: of a folder that a killed build left unfinished, else of a new one."""
        current = 0
        with suppress(StoreError):  # CURRENT is missing or damaged
            current = self.current_snapshot()
        return 1 + max([current, *self.snapshots()])

    def snapshots(self) -> list[int]:
        """Numbers of the snapshots that were written whole, current or not, upwards."""
        folders = [path for path in _listed(self.snapshots_folder) if path.name.isdecimal()]
        return sorted(int(path.name) for path in folders if (path / "manifest.json").exists())

    def leftovers(self) -> list[Path]:
        """Files of killed commands that were never put in place, and folders of snapshots never written whole."""
        files = [
            path for path in (*self.root.glob("*.tmp"), *self.snapshots_folder.glob("*/*.tmp")) if path.is_file()
        ]
        folders = [path for path in _listed(self.snapshots_folder, only_folders=True) if path.name.isdecimal()]
        return [*sorted(files), *(path for path in folders if not (path / "manifest.json").exists())]


def other_format(
    version: int, where: Path | str, cache: Path | str = "CACHE", data: str = "DATA"
) -> CacheFormatError:
    """The error for a cache that another release wrote; ``data`` is what it was built from."""
    problem = f"this cache has format {version}; this version of latentcache reads format {FORMAT_VERSION}"
    if version > FORMAT_VERSION:
        return CacheFormatError(
            problem,
            where=str(where),
            why="it was written by a newer version",
            fix="upgrade with `pip install -U latentcache`, or build into another folder with --out",
        )
    old, new = (shlex.quote(f"{cache}{ending}") for ending in (f".format-{version}", ""))
    return CacheFormatError(
        problem,
        where=str(where),
        why="it was written by an older version",
        fix=f"build it again, with the options of the first build: mv {new} {old} && latentcache build"
        f" {shlex.quote(data)} --out {new}",
    )


def _listed(folder: Path, *, only_folders: bool = False) -> list[Path]:
    """List a folder in the order of the names; ``glob`` would take a folder that may not be read for empty."""
    try:
        return sorted(path for path in folder.iterdir() if not only_folders or path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(folder, error) from error
