"""Where things lie inside a cache folder.

CACHE/generations/000007/   manifest.json and the columns
CACHE/CURRENT               the generation that readers open
CACHE/shards/<id>.open/     LMDB environment being written; readers ignore it
CACHE/shards/<id>/          sealed: data.mdb, index.npy, shard.json, never written again
CACHE/shards/<id>.retired   a mark: no build takes entries from this shard any more, readers go on
CACHE/scratch/              shards being copied and things being removed: of no worth to anybody
CACHE/quarantine/           shards too damaged to be used, kept for a look
CACHE/plans/                rows of tokens that were planned once: of no worth, made again where they are gone
CACHE/reports/              what the last run of each command said; nothing reads it back
CACHE/coming/               what a build under way will hold, for readers that follow it
CACHE/BUILDING              present from the start of a build to its end: what it set out to do
CACHE/builder.lock          our own lock, held by the process that builds
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from latentcache.errors import CacheDamagedError, CacheNotFoundError
from latentcache.store.durable import folder_in_place, read_file, refuse_unreadable, unreadable

OPEN_SUFFIX = ".open"
RETIRED_SUFFIX = ".retired"
_CURRENT = re.compile(rb"[0-9]{6,}\n")


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The paths of one cache."""

    root: Path

    @property
    def current(self) -> Path:
        """The file that names the generation readers open."""
        return self.root / "CURRENT"

    @property
    def building(self) -> Path:
        """The marker of a build that has not ended."""
        return self.root / "BUILDING"

    @property
    def coming(self) -> Path:
        """Folder of the announcement of a build that readers may follow."""
        return self.root / "coming"

    @property
    def lock(self) -> Path:
        """The builder's lock file; never deleted."""
        return self.root / "builder.lock"

    @property
    def shards(self) -> Path:
        """Folder of the shards."""
        return self.root / "shards"

    @property
    def quarantine(self) -> Path:
        """Folder of shards that cannot be used."""
        return self.root / "quarantine"

    @property
    def scratch(self) -> Path:
        """Folder of what is being made or removed; worth nothing once the builder lock is free."""
        return self.root / "scratch"

    @property
    def reports(self) -> Path:
        """Folder of the reports."""
        return self.root / "reports"

    def generation(self, number: int) -> Path:
        """Folder of one generation."""
        return self.root / "generations" / f"{number:06d}"

    def retired_mark(self, shard: str) -> Path:
        """The file that takes a shard out of use. Generations that name the shard go on reading it."""
        return self.shards / f"{shard}{RETIRED_SUFFIX}"

    def sealed_shards(self) -> list[Path]:
        """Sealed shards that are in use, in the order of their names; retired ones are not.

        Raises:
            StoreError: The system refuses to list them.
        """
        retired = self.retired()
        return [path for path in self.all_sealed() if path.name not in retired]

    def all_sealed(self) -> list[Path]:
        """All sealed shards, the retired ones too."""
        return [path for path in self._shard_folders() if path.suffix != OPEN_SUFFIX]

    def retired(self) -> set[str]:
        """Names of the shards that were taken out of use.

        Raises:
            StoreError: The system refuses to list them.
        """
        return {path.stem for path in _listed(self.shards) if path.suffix == RETIRED_SUFFIX}

    def check_current(self) -> None:
        """See that a generation can be switched to: a build says so before its work, not after.

        Raises:
            CacheDamagedError: There is a folder in the place of ``CURRENT``.
        """
        if self.current.is_dir():
            raise folder_in_place(self.current)

    def check_shards(self) -> None:
        """See that the shards can be listed: what cannot be looked at must not pass for nothing.

        Raises:
            CacheDamagedError: There is something else in the place of the folder.
            StoreError: The system refuses to read it.
        """
        try:
            os.listdir(self.shards)  # noqa: PTH208 - nothing but the error is wanted
        except FileNotFoundError:
            return
        except OSError as error:
            refuse_unreadable(error, self.shards)
            raise unreadable(self.shards, error) from error

    def open_shards(self) -> list[Path]:
        """Shards that are being written, or were when their builder died.

        Raises:
            StoreError: The system refuses to list them.
        """
        return [path for path in self._shard_folders() if path.suffix == OPEN_SUFFIX]

    def is_ours(self) -> bool:
        """Whether a build was ever started here.

        Raises:
            OSError: The folder may not be looked at.
        """
        return any(path.exists() for path in (self.current, self.building, self.lock))

    def current_generation(self) -> int:
        """Number of the generation readers open, 0 when no build has ended yet.

        Raises:
            CacheNotFoundError: This folder is no cache.
            CacheDamagedError: ``CURRENT`` does not name a generation.
        """
        try:
            text = read_file(self.current)
        except FileNotFoundError:
            if self.building.exists() or self.shards.is_dir():
                return 0
            raise CacheNotFoundError(
                f"no cache at {self.root}",
                where=str(self.root),
                why="the folder has neither CURRENT nor shards/" if self.root.is_dir() else "no such folder",
                fix="make one with `latentcache build DATA`, or check the path",
            ) from None
        except NotADirectoryError as error:
            raise CacheNotFoundError(
                f"no cache at {self.root}", where=str(self.root), why=str(error), fix="check the path"
            ) from error
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                what, why = "no cache at this path: it is too long", str(error.strerror)
                raise CacheNotFoundError(what, where=str(self.root), why=why, fix="check the path") from error
            self.check_current()
            raise unreadable(self.current, error) from error
        if not _CURRENT.fullmatch(text) or not int(text):
            newest = max(self.generations(), default=0)
            raise CacheDamagedError(
                "CURRENT names no generation",
                where=str(self.current),
                why=f"expected six digits and a line end, found {text[:40]!r}",
                fix=f"echo {newest:06d} > {self.current}" if newest else f"rm {self.current}, then build again",
            )
        return int(text)

    def generations(self) -> list[int]:
        """Numbers of the generations that were written whole, current or not, upwards.

        Raises:
            StoreError: The system refuses to list them.
        """
        folders = [path for path in _listed(self.root / "generations") if path.name.isdecimal()]
        return sorted(int(path.name) for path in folders if (path / "manifest.json").exists())

    def _shard_folders(self) -> list[Path]:
        return [path for path in _listed(self.shards) if _is_folder(path)]


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        refuse_unreadable(error, path)
        return False


def _listed(folder: Path) -> list[Path]:
    """What is in a folder, in the order of the names; ``glob`` would take a folder that may not be read for empty."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        refuse_unreadable(error, folder)
        return []
