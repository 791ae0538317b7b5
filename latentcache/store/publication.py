"""How a generation of any kind is put in place, and how it is found again.

Guarantee: a generation is written whole before ``CURRENT`` is switched to it, so a reader opens the old one or the
new one. What contradicts itself in it comes as one error, whatever Python made of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CacheNotFoundError, RecipeError
from latentcache.identity.content import checksum
from latentcache.store.columns import save_columns
from latentcache.store.durable import json_bytes, make_folder, sync_folder, write_atomically, write_json, writing
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_in_words
from latentcache.store.manifest import load_manifest, own_checksum


def put_generation(
    layout: CacheLayout,
    *,
    version: int,
    about: Mapping[str, Any],
    columns: Mapping[str, NDArray[Any]],
    lists: Mapping[str, Any],
    facts: Mapping[str, Any],
    complete: bool,
) -> int:
    """Write a generation of any kind whole, then switch ``CURRENT`` to it. Returns its number.

    Args:
        layout: The cache, whose builder lock the caller holds.
        version: Of the format.
        about: What the manifest says first: recipe, shards, counts.
        columns: The arrays.
        lists: What goes to ``refused.json``.
        facts: What the manifest says last.
        complete: Whether every usable sample has its entries.

    Raises:
        DiskFullError: No space; the old generation stays.
        CacheReadOnlyError: The cache cannot be written.
    """
    number = max(layout.generations(), default=0) + 1
    folder = layout.generation(number)
    make_folder(folder)
    saved = save_columns(folder, columns)
    packed = json_bytes(lists)
    write_atomically(folder / "refused.json", packed)
    manifest = {
        "format": {"name": "latentcache", "version": version},
        "generation": number,
        "complete": complete,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
        "columns": saved,
        "lists": {"file": "refused.json", "bytes": len(packed), "checksum": f"{checksum(packed):016x}"},
        **facts,
    }
    write_json(folder / "manifest.json", manifest | {"checksum": own_checksum(manifest)})
    with writing(folder):
        sync_folder(folder.parent)
    write_atomically(layout.current, f"{number:06d}\n".encode("ascii"))
    return number


def find_manifest(cache: Path, number: int | None = None) -> tuple[int, dict[str, Any], Path]:
    """Number, manifest and folder of a generation of any kind, the current one unless a number is given.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it yet.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: The manifest is not what was written.
    """
    layout = CacheLayout(cache)
    number = layout.current_generation() if number is None else number
    if not number:
        holder = builder_in_words(layout.lock)
        again = "run the same `latentcache build` again: it goes on where it stopped"
        raise CacheNotFoundError(
            f"no finished build in {cache}",
            where=str(cache),
            why=f"a build was started here and has not ended{holder and f': {holder}'}",
            fix=f"wait until it ends; if it was killed, {again}" if holder else again,
            slug="cache-unfinished",
        )
    folder = layout.generation(number)
    return number, load_manifest(folder), folder


@contextmanager
def contradictions(folder: Path) -> Iterator[None]:
    """Whatever is wrong with what a manifest says comes as one error of ours.

    Raises:
        CacheDamagedError: As said.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecipeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CacheDamagedError("a generation contradicts itself", where=str(folder), why=why) from error


def checked_shards(number: int, manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The shards that a manifest names.

    Raises:
        ValueError: It is that of another generation, or a name leads out of the folder of the shards.
    """
    shards = manifest["shards"]
    if manifest["generation"] != number or not all(re.fullmatch(r"[\w-]+", name) for name in shards):
        raise ValueError(f"generation {manifest['generation']} with shards {shards}")
    return tuple(shards)
