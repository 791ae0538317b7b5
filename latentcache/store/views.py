"""Other selections of what is stored: part of a generation, some entries more often, several caches as one.

Each is a generation in memory, so that whatever takes a generation takes it too. Nothing is copied but columns.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.geometry.sizes import Size
from latentcache.recipe import Recipe, differences
from latentcache.store.columns import StringColumn
from latentcache.store.generation import Generation, Rows, Samples
from latentcache.store.layout import CacheLayout
from latentcache.store.variants import alike, moved, names_of

#: ``10_cats``: every picture below counts ten times, ``0_cats`` none; what a number is decides ``int``
#: (``extract_dreambooth_params`` in ``library/config_util.py`` of kohya's sd-scripts).
_REPEATS = re.compile(r"([0-9]{1,6})_")
#: What must be equal for entries of two caches to stand in one batch.
_SHARED = ("channels", "posterior", "factor", "storage_dtype", "normalisation", "family", "fingerprint", "config")


def select(generation: Generation, entries: NDArray[Any]) -> Generation:
    """The entries at these positions (or where True), in this order, each as often as it is named."""
    rows = generation.rows
    return replace(generation, rows=replace(rows, **{name: getattr(rows, name)[entries] for name in names_of(rows)}))


def folder_repeats(generation: Generation) -> NDArray[np.int64]:
    """(N,) how often each entry counts by the name of its top folder: ``10_cats/a.png`` ten times, others once.

    Entries of folders that count 0 times are left out, with a warning that says how many.
    """
    found = (_REPEATS.match(name) if "/" in name else None for name in generation.samples.names)
    by_sample = np.array([int(match[1]) if match else 1 for match in found], dtype=np.int64)
    repeats = np.asarray(by_sample[generation.rows.sample])
    if left := int(np.count_nonzero(repeats == 0)):
        warnings.warn(f"{left} of {len(repeats)} entries lie in folders that count 0 times (0_...)", stacklevel=3)
    return repeats


def combine(caches: Sequence[tuple[CacheLayout, Generation]]) -> Generation:
    """Several caches as one generation. Sizes that are equal become one bucket; names keep to their cache.

    Raises:
        UsageError: No cache, or latents that cannot stand in one batch; the fields that differ are named.
    """
    if not caches:
        raise UsageError("no cache to combine", fix="pass at least one")
    first = caches[0][1]
    for _, other in caches[1:]:
        require_alike(first.recipe, other.recipe)
    buckets = tuple(dict.fromkeys(size for _, generation in caches for size in generation.buckets))
    shards = tuple(str(layout.shards.resolve() / name) for layout, generation in caches for name in generation.shards)
    parts = alike([_shifted(caches, position, buckets) for position in range(len(caches))])
    columns = {name: np.concatenate([getattr(rows, name) for rows in parts]) for name in names_of(parts[0])}
    samples = _joined([generation.samples for _, generation in caches])
    pins = tuple(pin for _, generation in caches for pin in generation.pins)
    return replace(
        first, rows=replace(parts[0], **columns), samples=samples, buckets=buckets, shards=shards, pins=pins
    )


def _shifted(caches: Sequence[tuple[CacheLayout, Generation]], position: int, buckets: Sequence[Size]) -> Rows:
    """The rows of one cache, pointing into the combined lists."""
    generation = caches[position][1]
    before = [other for _, other in caches[:position]]
    bucket = np.array([buckets.index(size) for size in generation.buckets], dtype=np.int32)
    shards = np.int32(sum(len(other.shards) for other in before))
    rows = moved(generation.rows, shards)
    return replace(
        rows,
        bucket=bucket[rows.bucket] if len(rows.bucket) else rows.bucket,
        shard=rows.shard + shards,
        sample=rows.sample + np.int32(sum(len(other.samples.names) for other in before)),
    )


def _joined(parts: Sequence[Samples]) -> Samples:
    """The samples of all caches, one after the other."""
    arrays = ("content", "original_size", "stat")
    return Samples(
        names=StringColumn.of(name for part in parts for name in part.names),
        captions=StringColumn.of(caption for part in parts for caption in part.captions),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays},
    )


def require_alike(one: Recipe, other: Recipe) -> None:
    """Refuse to put entries of two recipes into one batch where their latents are of two kinds.

    Raises:
        UsageError: They are; the fields that differ are named.
    """
    wanted = {f"encoder.{name}" for name in _SHARED}
    differing = [row for row in differences(one, other) if row[0] in wanted]
    if differing:
        name, mine, theirs = differing[0]
        raise UsageError(
            "these caches hold latents of two kinds",
            why=f"{', '.join(row[0] for row in differing)} differ ({name}: {mine} and {theirs})",
            fix="build both with the same --model, --latents and --storage-dtype, or train on one",
        )
