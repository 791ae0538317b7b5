"""Pictures and their mirror images: two entries on disk, one row for whoever plans an epoch.

Decides how a loader sees variants. On disk the rows of all pictures come first, then those of their mirror images in
the same order. Folded, a picture is one row that knows where its mirror image lies, so that selections, splits,
repeats and plans count it once and keep both together. Nothing is copied until rows are selected or doubled.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.key import FLIPPED, VARIANT_BYTE
from latentcache.store.generation import Generation, Rows

#: ``flip_shard`` of a picture whose mirror image is not stored.
NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRows(Rows):
    """Rows of pictures, each with the place of its mirror image."""

    flip_shard: NDArray[np.int32]
    """(N,) as ``shard``; -1 where there is none."""
    flip_offset: NDArray[np.uint64]
    """(N,) as ``offset``."""


def folded(generation: Generation) -> Generation:
    """The same generation with one row for each sample and resolution; as it is where nothing is mirrored."""
    if not generation.recipe.geometry.flip:
        return generation
    rows = generation.rows
    half = len(rows.shard) // 2
    first: dict[str, Any] = {name: getattr(rows, name)[:half] for name in names_of(rows)}
    first |= {"flip_shard": rows.shard[half:], "flip_offset": rows.offset[half:]}
    return replace(generation, rows=FoldedRows(**first))


def doubled(generation: Generation) -> Generation:
    """Rows of N pictures, then of their N mirror images: row i + N is the mirror image of row i, or i itself.

    Args:
        generation: A folded one.
    """
    rows = generation.rows
    assert isinstance(rows, FoldedRows)
    stored = rows.flip_shard != NOWHERE
    key, crop = rows.key.copy(), rows.crop.copy()
    key[stored, VARIANT_BYTE] = FLIPPED
    widths = np.array([size.width for size in generation.buckets], dtype=np.uint32)
    crop[stored, 1] = (rows.resize[:, 1] - rows.crop[:, 1] - widths[rows.bucket])[stored]
    other = replace(
        rows,
        key=key,
        crop=crop,
        shard=np.where(stored, rows.flip_shard, rows.shard),
        offset=np.where(stored, rows.flip_offset, rows.offset),
    )
    columns = {n: np.concatenate([getattr(rows, n), getattr(other, n)]) for n in Rows.__dataclass_fields__}
    return replace(generation, rows=Rows(**columns))


def in_pairs(generation: Generation, rows: Set[int]) -> Set[int]:
    """Rows of a generation as it is on disk, each with its mirror image: one does not stand without the other.

    Args:
        generation: As it is on disk, not folded.
        rows: Any of its rows.
    """
    if not generation.recipe.geometry.flip:
        return rows
    count = len(generation.rows.shard)
    return rows | {(row + count // 2) % count for row in rows}


def names_of(rows: Rows) -> list[str]:
    """The columns that these rows have."""
    return list(type(rows).__dataclass_fields__)


def alike(parts: Sequence[Rows]) -> Sequence[Rows]:
    """Rows of several caches with the same columns: all folded where one is."""
    if not any(isinstance(rows, FoldedRows) for rows in parts):
        return parts
    return [rows if isinstance(rows, FoldedRows) else _without_flips(rows) for rows in parts]


def moved(rows: Rows, shards: np.int32) -> Rows:
    """Rows whose mirror images lie so many shards further on, in a longer list of shards."""
    if not isinstance(rows, FoldedRows):
        return rows
    return replace(rows, flip_shard=np.where(rows.flip_shard == NOWHERE, NOWHERE, rows.flip_shard + shards))


def _without_flips(rows: Rows) -> FoldedRows:
    columns: dict[str, Any] = {name: getattr(rows, name) for name in names_of(rows)}
    return FoldedRows(**columns, flip_shard=np.full_like(rows.shard, NOWHERE), flip_offset=rows.offset)
