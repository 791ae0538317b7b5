"""Takes shards out of use without touching them, and publishes generations that no longer need them.

A sealed shard is never changed and readers may hold it, so what is wrong with it, or mostly unneeded, is left behind:
a mark beside the folder keeps builds from taking entries from it, and a new generation names other shards. Readers
of older generations go on; the collector removes the shard when nobody needs it any more (decision record 13).
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from latentcache.errors import StoreError
from latentcache.store.catalog import Located
from latentcache.store.durable import make_folder, sync_folder, write_json, writing
from latentcache.store.generation import Generation, Rows, publish
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import AnyGeneration

#: What ``publish`` itself says in a manifest; the rest are facts that its caller gave.
OWN_FACTS = frozenset(
    {"format", "generation", "complete", "created", "recipe", "recipe_id", "buckets", "shards", "counts", "columns"}
    | {"lists", "checksum", "kind"}
)


def retire(layout: CacheLayout, shard: str, reason: str) -> None:
    """Take a shard out of use, for ever. Durable when this returns; the caller holds the builder lock.

    Args:
        layout: The cache.
        shard: Name of a sealed shard.
        reason: ``damaged`` or ``compacted``; for people and for the collector.

    Raises:
        DiskFullError: No space.
        CacheReadOnlyError: The cache cannot be written.
    """
    mark = layout.retired_mark(shard)
    if not mark.exists():
        since = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(mark, {"schema": 1, "reason": reason, "since": since})


def republish(layout: CacheLayout, old: Generation, *, rows: Rows, shards: Sequence[str], complete: bool) -> int:
    """Publish a generation with its entries in other places, or without some; it says which one it replaces.

    Arguments and errors as :func:`publish`.
    """
    kept = sorted(old.manifest.keys() - OWN_FACTS)
    return publish(
        layout,
        recipe=old.recipe,
        rows=rows,
        samples=old.samples,
        buckets=old.buckets,
        shards=shards,
        refused=old.refused,
        notes=old.notes,
        facts={name: old.manifest[name] for name in kept} | {"replaces": old.number},
        complete=complete,
    )


def moved(
    generation: AnyGeneration, dropped: Set[int], placed: Mapping[int, Located]
) -> tuple[Rows, tuple[str, ...]]:
    """Rows without some and with others in new places, and the names of the shards they point into.

    Args:
        generation: Whose rows they are.
        dropped: Positions of rows to leave out.
        placed: Row position -> where its entry lies now.
    """
    names = list(dict.fromkeys([*generation.shards, *(found.shard for found in placed.values())]))
    number = {name: position for position, name in enumerate(names)}
    shard, offset = generation.rows.shard.copy(), generation.rows.offset.copy()
    for row, found in placed.items():
        shard[row], offset[row] = number[found.shard], found.offset
    kept = np.ones(len(shard), dtype=bool)
    kept[list(dropped)] = False
    order = sorted(np.unique(shard[kept]).tolist(), key=lambda position: names[position])
    positions = np.zeros(len(names), dtype=np.int32)
    positions[order] = np.arange(len(order), dtype=np.int32)
    there = replace(generation.rows, shard=positions[shard], offset=offset)
    columns = {name: getattr(there, name)[kept] for name in Rows.__dataclass_fields__}
    return Rows(**columns), tuple(names[position] for position in order)


def check_one_disk(layout: CacheLayout) -> None:
    """See that shards and generations can be moved within the cache in one step, before anything is moved.

    Raises:
        StoreError: A part of the cache lies on another file system.
        CacheReadOnlyError: The cache cannot be written.
        DiskFullError: No space.
    """
    make_folder(layout.scratch)
    probe = layout.scratch / f"probe-{secrets.token_hex(4)}.tmp"
    parts = [folder for folder in (layout.shards, layout.root / "generations") if folder.is_dir()]
    with writing(layout.scratch), contextlib.ExitStack() as left:
        left.callback(_remove_empty, layout.scratch)
        left.callback(probe.unlink, missing_ok=True)
        probe.touch()
        for folder in parts:
            left.callback((folder / probe.name).unlink, missing_ok=True)
            _try_move(probe, folder / probe.name, layout)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _try_move(probe: Path, there: Path, layout: CacheLayout) -> None:
    """There and back; numbers of devices would not show a folder that is mounted twice."""
    try:
        probe.rename(there)
        there.rename(probe)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        root, part = shlex.quote(str(layout.root)), there.parent.name
        raise StoreError(
            f"{part}/ of this cache lies on another file system than the rest",
            where=str(there.parent),
            why="shards and generations are put in place and taken away by one rename, which works on one only",
            fix=f"cp -a {root} {shlex.quote(f'{layout.root}-copy')} on one file system, then run this on the copy",
        ) from error


def to_scratch(layout: CacheLayout, path: Path) -> Path:
    """Move something that is to be removed out of sight in one step; a crash leaves it whole, here or there.

    Raises:
        OSError: It cannot be moved.
    """
    make_folder(layout.scratch)
    place = layout.scratch / f"{path.name}-{secrets.token_hex(4)}"
    path.rename(place)
    sync_folder(path.parent)
    return place
