"""Checks before a build: places and free space. All of them run before anything is encoded or written.

Guarantee: a command that is rejected leaves the cache as it was; a folder that it made is removed again.
"""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from latentcache.errors import (
    DiskFullError,
    LatentcacheError,
    SourceNotFoundError,
    StoreError,
    StrictError,
    UsageError,
    keyword,
    option,
)
from latentcache.fields.table import Files, Rejected
from latentcache.pipeline.report import BuildPlan
from latentcache.pipeline.settings import beside
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import Listing
from latentcache.store.atomic_io import make_folder, remove_durably, write_atomically, writing
from latentcache.store.lock import builder_lock
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_snapshot

#: Bytes left free on the disk beside what the plan needs.
RESERVE_BYTES = 64 << 20
#: Settings of a source that one kind of data has no use for.
_OF_RECORDS = ("datasets", "text_lines")
_OF_IMAGES = ("layout", "caption_ext", "default_caption", "caption_prefix", "caption_suffix", "caption_lines",
              "image_column", "caption_column")  # fmt: skip


def check_paths(data: Path, cache: Path) -> None:
    """Reject a cache inside the data, or in a folder that holds something else."""
    if not data.exists():
        raise SourceNotFoundError(f"no such file or folder: {data}", where=str(data), fix="check the path")
    if data.is_dir() and CachePaths(data).is_ours():
        raise UsageError(
            f"{data} is a cache, not data",
            where=str(data),
            fix=f"give the data it was made from: `latentcache info {shlex.quote(str(data))}` names it",
        )
    with writing(cache):
        if cache.resolve().is_relative_to(data.resolve()):
            raise UsageError(
                "the cache would be inside the data folder",
                argument="out",
                value=cache,
                where=str(cache),
                why="data folders are only read; a cache inside one would be taken for data",
                fix=f"use {option('out', beside(data))}",
                fix_python=f"use {keyword('out', str(beside(data)))}",
            )
        check_out(cache)


def check_out(cache: Path) -> None:
    """Reject a folder with files that are not of a cache."""
    if cache.exists() and not cache.is_dir():
        raise UsageError("a file is there", argument="out", value=cache, where=str(cache), fix="give a folder")
    if cache.is_dir() and not CachePaths(cache).is_ours() and any(cache.iterdir()):
        raise UsageError(
            "the folder is not empty and holds no cache",
            argument="out",
            value=cache,
            where=str(cache),
            why="a cache is never mixed with other files",
            fix="give an empty or a new folder",
        )


@contextmanager
def locked(paths: CachePaths) -> Iterator[int]:
    """Hold the cache for building; gives the descriptor for workers.

    If the build fails before anything was committed, folders and the build state are as they were before.
    """
    made = make_folder(paths.root)
    with builder_lock(paths.lock) as descriptor:
        with writing(paths.root):
            shards = _names(paths.shards)
            state = paths.building.read_bytes() if paths.building.is_file() else None
        try:
            yield descriptor
        except LatentcacheError:
            if _names(paths.shards) == shards:
                for folder in (paths.shards, paths.scratch, paths.quarantine):
                    with suppress(OSError):  # it is not there, or holds something
                        folder.rmdir()
                if state is not None:  # a build that was not finished goes on with its own settings
                    write_atomically(paths.building, state)
                elif paths.building.is_file():
                    remove_durably(paths.building)
            raise
        finally:
            with suppress(OSError):
                if made and _names(paths.root) == {paths.lock.name}:
                    paths.lock.unlink()
                    for folder in made:
                        folder.rmdir()


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def free_bytes(cache: Path) -> int:
    """Free bytes on the disk of the cache, which need not exist yet."""
    existing = next(path for path in (cache, *cache.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free


def check_space(plan: BuildPlan) -> None:
    """Reject a build that does not fit on the disk."""
    if plan.to_make and plan.bytes_to_write * 11 // 10 + RESERVE_BYTES > plan.free_bytes:
        raise DiskFullError(
            "the disk is too full for this build",
            where=str(plan.cache),
            why=f"the plan needs {plan.bytes_to_write:,} bytes, a tenth more and {RESERVE_BYTES:,} in reserve;"
            f" {plan.free_bytes:,} are free",
            fix="free some space, or build on another disk",
        )


def cache_beside(paths: CachePaths, files: Files) -> Path | None:
    """Another cache in the same folder whose source files have the same names and sizes: its data were renamed."""
    for folder in sorted(paths.root.absolute().parent.glob("*.latentcache")):
        with suppress(StoreError):
            others = open_snapshot(folder).samples.files
            same = np.array_equal(np.asarray(others.stat)[:, 0], np.asarray(files.stat)[:, 0])
            if same and list(others.names) == list(files.names):
                return folder
    return None


def check_source(options: SourceOptions | None, listing: Listing, data: Path) -> None:
    """Reject settings that DATA would ignore."""
    kind, sets = listing.data_kind, listing.layout.sets if listing.layout is not None else ()
    unused = dict.fromkeys(_OF_RECORDS, "records") if kind == "images" else dict.fromkeys(_OF_IMAGES, "images")
    if sets and not any(one.has_columns for one in sets):
        unused |= dict.fromkeys(("image_column", "caption_column"), "tables and archives")
    if sets and not any(one.has_caption_files for one in sets):
        unused["caption_ext"] = "caption files beside images"
    for name, other in unused.items():
        if getattr(options, name, None) not in (None, "", (), False):
            found = listing.layout.why if listing.layout is not None and other != "records" else f"it holds {kind}"
            raise UsageError(
                f"for {other} only, and DATA has none",
                argument=name,
                where=str(data),
                why=found,
                fix=f"leave {option(name)} out",
                fix_python=f"leave {name} out of source",
            )


def check_notes(notes: Sequence[Rejected], data: Path) -> None:
    """Reject data with unused files; options decide about settings of a configuration."""
    notes = [note for note in notes if note.reason != "config-asks"]
    if not notes:
        return
    counts = Counter[str]()
    for note in notes:
        counts[note.reason] += note.count
    raise StrictError(
        f"{counts.total()} input{'s' * (counts.total() > 1)} of DATA not used as given",
        where=str(data),
        why=", ".join(f"{reason} {count}" for reason, count in counts.most_common()),
        notes=notes,
    )
