"""A generation: the ordered samples of one finished build, where each entry lies, and the recipe behind them.

Decides what a reader sees. A generation is written whole, then ``CURRENT`` is switched to it, so a reader opens
the old one or the new one and keeps it. Everything ``info``, ``plan`` and the fast ``verify`` need is in its
columns: no payload is read. Shards are shared between generations; entries are never rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheFormatError
from latentcache.geometry.sizes import Size
from latentcache.identity.stat import StatMemo
from latentcache.recipe import Recipe
from latentcache.store.column_files import FileStrings, open_columns
from latentcache.store.columns import (
    StringColumn,
    check_columns,
    check_pairs,
    checked_bytes,
    load_columns,
)
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import Told, format_version
from latentcache.store.publication import checked_shards, contradictions, find_manifest, put_generation

_Load = Callable[[Path, Mapping[str, Mapping[str, Any]]], dict[str, NDArray[Any]]]
_STAT_FIELDS = ("size", "mtime_ns", "ctime_ns", "inode", "device", "seen_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The entries of a generation, one row for each sample and resolution. N rows.

    Where pictures are stored mirrored as well, those rows follow in the same order: row i and row i + N / 2 are one
    picture. ``variants.folded`` makes one row of the two.
    """

    key: NDArray[np.uint8]
    """(N, 32) entry keys."""
    shard: NDArray[np.int32]
    """(N,) position in the manifest's list of shards."""
    offset: NDArray[np.uint64]
    """(N,) byte offset of the entry's header in the shard's ``data.mdb``."""
    bucket: NDArray[np.int32]
    """(N,) position in the manifest's list of buckets."""
    sample: NDArray[np.int32]
    """(N,) position in the samples."""
    crop: NDArray[np.uint32]
    """(N, 2) top and left of the crop in the resized picture, pixels."""
    resize: NDArray[np.uint32]
    """(N, 2) height and width the picture was resized to, pixels."""
    pixel_hash: NDArray[np.uint8]
    """(N, 16) xxh3-128 of the cropped pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The usable samples of a generation. S samples, in the byte order of their names."""

    names: StringColumn
    captions: StringColumn
    content: NDArray[np.uint8]
    """(S, 16) content hashes."""
    original_size: NDArray[np.uint32]
    """(S, 2) height and width in pixels, after EXIF orientation."""
    stat: NDArray[np.uint64]
    """(S, 6) the stat memo of each source file."""

    def memo(self, index: int) -> StatMemo:
        """The stat memo of one sample."""
        return unpack_memo(self.stat[index].tolist())


class Waiting(Protocol):
    """What fills in the places of rows that are still to come."""

    def wait(self, rows: Sequence[int] | NDArray[np.integer]) -> None:
        """Return when the entries of these rows are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(Told):
    """One finished build, or one that is under way and followed."""

    number: int
    recipe: Recipe
    rows: Rows
    samples: Samples
    buckets: tuple[Size, ...]
    shards: Sequence[str]
    refused: tuple[Mapping[str, Any], ...]
    """Quarantined samples: name, cause, detail, hint, content (hex), stat."""
    notes: tuple[Mapping[str, Any], ...]
    manifest: Mapping[str, Any]
    pins: tuple[object, ...] = field(default=(), compare=False, repr=False)
    """What keeps its files from being collected while this object is in use."""
    arrivals: Waiting | None = field(default=None, compare=False, repr=False)
    """What waits for entries, where the build is still under way; None for a finished one."""

    @property
    def demo(self) -> bool:
        """True where the entries are for trying the tool, not for training."""
        return bool(self.manifest.get("demo", False))


def pack_memo(memo: StatMemo) -> list[int]:
    """A stat memo as six unsigned 64-bit numbers."""
    return [getattr(memo, name) & 0xFFFF_FFFF_FFFF_FFFF for name in _STAT_FIELDS]


def unpack_memo(values: Sequence[int]) -> StatMemo:
    """Inverse of :func:`pack_memo`; times before 1970 come back negative."""
    fields = dict(zip(_STAT_FIELDS, values, strict=True))
    for name in ("mtime_ns", "ctime_ns", "seen_ns"):
        fields[name] -= (fields[name] >> 63) << 64
    return StatMemo(**fields)


def publish(
    layout: CacheLayout,
    *,
    recipe: Recipe,
    rows: Rows,
    samples: Samples,
    buckets: Sequence[Size],
    shards: Sequence[str],
    refused: Sequence[Mapping[str, Any]],
    notes: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    complete: bool = True,
) -> int:
    """Write the next generation and switch ``CURRENT`` to it. Returns its number.

    Args:
        layout: The cache, whose builder lock the caller holds.
        recipe: What the entries were made by.
        rows: One row per entry.
        samples: One row per usable sample.
        buckets: The sizes that ``rows.bucket`` points into.
        shards: The shard names that ``rows.shard`` points into.
        refused: Quarantined samples.
        notes: Files neither used nor refused.
        facts: More for the manifest: ``source``, ``provenance``, ``demo``.
        complete: Whether every usable sample has its entries.

    Raises:
        DiskFullError: No space; the old generation stays.
        CacheReadOnlyError: The cache cannot be written.
    """
    return put_generation(
        layout,
        version=format_version(recipe),
        about={
            "recipe": recipe.as_json(),
            "recipe_id": recipe.recipe_id.hex(),
            "buckets": [[size.height, size.width] for size in buckets],
            "shards": list(shards),
            "counts": {"samples": len(samples.names), "rows": len(rows.shard), "quarantined": len(refused)},
        },
        columns=_arrays(rows, samples),
        lists={"refused": list(refused), "notes": list(notes)},
        facts=facts,
        complete=complete,
    )


def load_generation(cache: Path, number: int | None = None) -> Generation:
    """Open a generation of a cache of pictures, the current one unless a number is given.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it yet.
        CacheFormatError: Written by a newer version, or a cache of tokens.
        CacheDamagedError: A manifest or a column is not what was written.
    """
    return _opened(cache, number, load_columns, StringColumn)


def open_generation(cache: Path, number: int | None = None) -> Generation:
    """The same, for whoever needs all of it and never at once: its columns stay on disk, and give what is asked for.

    They are indexed as arrays are, by a position, a slice or an array of positions; see ``column_files``.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it yet.
        CacheFormatError: Written by a newer version, or a cache of tokens.
        CacheDamagedError: A manifest or a column is not what was written; also later, of a column that changes.
    """
    return _opened(cache, number, open_columns, FileStrings)


def _opened(cache: Path, number: int | None, load: _Load, strings: type[StringColumn]) -> Generation:
    number, manifest, folder = find_manifest(cache, number)
    if manifest.get("kind") is not None:
        raise CacheFormatError(
            f"this cache holds {manifest['kind']}, not pictures",
            where=str(cache),
            why="a cache holds one kind of entries, and they are opened in different ways",
            fix="open it with latentcache.open_tokens(path), or give pictures another folder with --out",
            slug="cache-kind",
        )
    with contradictions(folder):
        return _assemble(number, manifest, load(folder, manifest["columns"]), folder, strings)


def _assemble(
    number: int,
    manifest: Mapping[str, Any],
    columns: Mapping[str, NDArray[Any]],
    folder: Path,
    strings: type[StringColumn],
) -> Generation:
    buckets = manifest["buckets"]
    shards = checked_shards(number, manifest)
    check_columns(columns, {"shard": len(shards), "bucket": len(buckets)})
    lists = json.loads(checked_bytes(folder / "refused.json", manifest["lists"]["checksum"]))
    recipe = Recipe.from_json(manifest["recipe"])
    rows = Rows(**{name: columns[name] for name in Rows.__dataclass_fields__})
    if recipe.geometry.flip:
        check_pairs(columns)
    return Generation(
        number=number,
        recipe=recipe,
        rows=rows,
        samples=_samples(columns, strings),
        buckets=tuple(Size(height, width) for height, width in buckets),
        shards=shards,
        refused=tuple(lists["refused"]),
        notes=tuple(lists["notes"]),
        manifest=manifest,
    )


def _arrays(rows: Rows, samples: Samples) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {name: getattr(rows, name) for name in Rows.__dataclass_fields__}
    arrays |= {name: getattr(samples, name) for name in ("content", "original_size", "stat")}
    for name in ("names", "captions"):
        column: StringColumn = getattr(samples, name)
        arrays |= {f"{name}_bytes": column.data, f"{name}_ends": column.ends}
    return arrays


def _samples(columns: Mapping[str, NDArray[Any]], strings: type[StringColumn]) -> Samples:
    return Samples(
        names=strings(columns["names_bytes"], columns["names_ends"]),
        captions=strings(columns["captions_bytes"], columns["captions_ends"]),
        content=columns["content"],
        original_size=columns["original_size"],
        stat=columns["stat"],
    )
