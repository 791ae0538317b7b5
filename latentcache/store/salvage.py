"""Saves what is whole of damaged shards into new ones, entry by entry, checksum by checksum.

The copying is done by a child process: a crafted shard may kill it, and what it has committed is still saved. The new
shard comes from the store's own writer, is made in ``scratch/`` and appears among the shards in one step, so a crash
leaves nothing half. The damaged shard stays as it is; who calls this retires it (decision record 13).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, DiskFullError, StoreError
from latentcache.store.catalog import load_catalog
from latentcache.store.copying import PLACE_DTYPE
from latentcache.store.durable import make_folder, sync_folder
from latentcache.store.index import load_index
from latentcache.store.layout import OPEN_SUFFIX, CacheLayout
from latentcache.store.retire import retire
from latentcache.store.shard import recover_shard, seal_folder
from latentcache.store.token_generation import AnyGeneration

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from latentcache.store.copying import serve; serve()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """What became of one damaged shard."""

    source: str
    shard: str = ""
    """The new shard; empty where nothing could be saved, or nothing was wanted."""
    saved: int = 0
    lost: int = 0
    """Entries that were found and are not whole. What nothing names any more is not counted."""
    died: bool = False
    """Whether the copying process died; what it had committed is saved."""


def salvage(
    layout: CacheLayout,
    source: Path,
    *,
    skip: Collection[bytes] = (),
    hints: NDArray[Any] | None = None,
    only: bool = False,
) -> Salvaged:
    """Copy every whole entry of a shard into a new sealed one. The caller holds the builder lock.

    Args:
        layout: The cache.
        source: Folder of the shard, sealed or not.
        skip: Keys that are not wanted, because they are elsewhere or must go.
        hints: PLACE_DTYPE rows: where entries should lie, for a shard whose own index is lost too.
        only: Copy what ``hints`` names, and nothing else.

    Raises:
        DiskFullError: No space. Nothing has changed.
        StoreError: The new shard cannot be written. Nothing has changed.
    """
    name = secrets.token_hex(8)
    target = layout.scratch / f"{name}{OPEN_SUFFIX}"
    make_folder(layout.scratch)
    try:
        answer = _ask_child(source, target, skip, hints, only)
        sealed = _settled(target)
        if sealed is None:
            return Salvaged(source=source.name, lost=answer.get("lost", 0), died=not answer)
        sealed.rename(layout.shards / name)
        sync_folder(layout.shards)
    finally:
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):
            layout.scratch.rmdir()
    saved = len(load_index(layout.shards / name).rows)
    return Salvaged(source=source.name, shard=name, saved=saved, lost=answer.get("lost", 0), died=not answer)


def mend_shards(layout: CacheLayout, generation: AnyGeneration | None) -> list[Salvaged]:
    """Before a build: seal what dead builds left open, and salvage what is damaged. Returns what was damaged.

    The caller holds the builder lock. A damaged shard is retired; an open one, which no reader can hold, goes to
    ``quarantine/``.

    Args:
        layout: The cache.
        generation: The current generation, where it can be read: it knows places too.

    Raises:
        DiskFullError: No space.
        StoreError: A shard cannot be written.
    """
    made: list[Salvaged] = []
    known = load_catalog(layout)

    def save(folder: Path) -> None:
        made.append(salvage(layout, folder, skip=known.keys()))

    for folder in layout.open_shards():
        recover_shard(folder, layout.quarantine, save)
    for folder in layout.sealed_shards():
        if _is_damaged(folder):
            made.append(salvage(layout, folder, skip=known.keys(), hints=places_in(generation, folder.name)))
            retire(layout, folder.name, "damaged")
    return made


def places_in(generation: AnyGeneration | None, shard: str, rows: NDArray[Any] | None = None) -> NDArray[Any]:
    """Where a generation says that entries of a shard lie, as PLACE_DTYPE rows.

    Args:
        generation: Any generation, or None for no places.
        shard: Name of a shard.
        rows: Positions of the rows to name; by default all of the shard.
    """
    if generation is None or shard not in generation.shards:
        return np.empty(0, dtype=PLACE_DTYPE)
    columns = generation.rows
    chosen = np.flatnonzero(columns.shard == generation.shards.index(shard)) if rows is None else rows
    _, first = np.unique(columns.offset[chosen], return_index=True)
    chosen = chosen[first]
    places = np.empty(len(chosen), dtype=PLACE_DTYPE)
    places["key"], places["offset"] = columns.key[chosen], columns.offset[chosen]
    facts = (columns.resize[chosen].astype("<u4"), columns.crop[chosen].astype("<u4"))
    places["facts"][:, :16] = columns.pixel_hash[chosen]
    places["facts"][:, 16:24], places["facts"][:, 24:] = (part.view(np.uint8).reshape(-1, 8) for part in facts)
    return places


def _is_damaged(folder: Path) -> bool:
    """Whether a sealed shard is damaged, not just out of reach for this user or in this moment."""
    try:
        load_index(folder)
    except CacheDamagedError as error:
        cause = error.__cause__
        return not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError)
    return False


def _settled(target: Path) -> Path | None:
    """The sealed shard that the child left, also where it died before it could seal; None where it is empty."""
    sealed = target.with_name(target.name.removesuffix(OPEN_SUFFIX))
    data = target / "data.mdb"
    if not sealed.exists() and data.exists() and data.stat().st_size:
        with contextlib.suppress(CacheDamagedError, CorruptEntryError):
            seal_folder(target)
    return sealed if sealed.exists() else None


def _ask_child(
    source: Path, target: Path, skip: Collection[bytes], hints: NDArray[Any] | None, only: bool
) -> dict[str, Any]:
    """What the copying process answers; nothing where it died."""
    keys = b"".join(skip)
    places = b"" if hints is None else hints.astype(PLACE_DTYPE).tobytes()
    request = {"source": str(source), "target": str(target), "only": only}
    line = json.dumps(request | {"skip_bytes": len(keys), "hint_bytes": len(places)}).encode("ascii") + b"\n"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path)]
    # In a session of its own: Ctrl-C is for the parent, which decides.
    with subprocess.Popen(command, start_new_session=True, **pipes) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(line + keys + places)
                child.stdin.flush()
            text = child.stdout.read()
            child.wait()
        finally:
            child.kill()
    answer: dict[str, Any] = json.loads(text) if text and not child.returncode else {}
    if "error" in answer:
        raise (DiskFullError if answer["full"] else StoreError)(**answer["error"])
    return answer
