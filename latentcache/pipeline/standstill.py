"""Has nothing changed since the last build? Answered from columns, before anything is planned file by file.

Guarantee: says yes only where the long way round would encode nothing and publish nothing: the same files with the
same trusted stats and captions, the same refusals and notes, the same recipe and folder, and every entry where the
generation says it is. Any doubt is a no. Cost: about 1 µs per file beside the walk.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from operator import eq
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError
from latentcache.identity.stat import RACY_NS
from latentcache.pipeline.assemble import refusal_json
from latentcache.pipeline.preflight import Before
from latentcache.pipeline.report import BuildPlan, BuildReport
from latentcache.pipeline.survey import Memory, refused_before
from latentcache.recipe import Recipe
from latentcache.sources.sample import Refusal, SampleColumns, Scan
from latentcache.store.generation import Generation
from latentcache.store.index import holds, load_index
from latentcache.store.layout import CacheLayout


def stands_still(found: Scan, recipe: Recipe, before: Before, layout: CacheLayout) -> tuple[Refusal, ...] | None:
    """The refusals of a build that has nothing to do, in the order of names; None where there is something to do.

    Args:
        found: The data folder.
        recipe: What is asked for.
        before: The cache as it is.
        layout: The same.
    """
    generation = before.generation
    if generation is None or not generation.complete or not layout.retired().isdisjoint(generation.shards):
        return None
    if before.damage or layout.building.exists() or layout.open_shards():
        return None
    if generation.recipe.as_json() != recipe.as_json() or generation.source_root != str(found.root.resolve()):
        return None
    if list(generation.notes) != [refusal_json(item) for item in found.notes]:
        return None
    columns = SampleColumns.of(found.samples)
    refused = _refused_still(columns, found, recipe, generation)
    if refused is None or not _same_samples(columns, {item.name for item in refused}, generation):
        return None
    return refused if _all_there(generation, layout) else None


def still_plan(
    found: Scan, recipe: Recipe, generation: Generation, refused: tuple[Refusal, ...], model: str, cache: Path
) -> BuildPlan:
    """The plan of a build that has nothing to do."""
    counts = Counter(generation.rows.bucket.tolist())
    return BuildPlan(
        cache=cache,
        data=found.root,
        model=model,
        recipe=recipe,
        samples=len(generation.samples.names) + len(refused),
        buckets={size: counts[number] for number, size in enumerate(generation.buckets)},
        entries_cached=len(generation.rows.bucket),
        entries_to_make=0,
        files_to_read=0,
        bytes_to_write=0,
        free_bytes=shutil.disk_usage(cache).free,
        refused=refused,
        notes=found.notes,
    )


def still_report(plan: BuildPlan, generation: Generation, *, started: float, dry_run: bool) -> BuildReport:
    """What it says in the end."""
    places = generation.rows.offset + (generation.rows.shard.astype(np.uint64) << np.uint64(48))
    return BuildReport(
        plan=plan,
        dry_run=dry_run,
        samples=plan.samples,
        cached=0 if dry_run else len(np.unique(places)),
        refused=plan.refused,
        notes=plan.notes,
        generation=0 if dry_run else generation.number,
        elapsed_s=time.monotonic() - started,
        buckets={} if dry_run else plan.buckets,
        allow_failed=generation.allow_failed,
    )


def _refused_still(
    columns: SampleColumns, found: Scan, recipe: Recipe, generation: Generation
) -> tuple[Refusal, ...] | None:
    """Refusals of the scan, and of files that were refused for their content; None where any is new or gone."""
    memory = Memory(samples={}, refused={str(item["name"]): item for item in generation.refused})
    again: list[Refusal | None] = []
    if memory.refused:
        positions = [i for i, name in enumerate(columns.names) if name in memory.refused]
        again = [refused_before(columns[i], memory) for i in positions]
    known = [item for item in again if item is not None]
    if len(known) < len(again):
        return None
    ordered = sorted((*found.refused, *known), key=lambda item: item.name.encode("utf-8", "surrogateescape"))
    return tuple(ordered) if list(map(refusal_json, ordered)) == list(generation.refused) else None


def _same_samples(columns: SampleColumns, refused: set[str], generation: Generation) -> bool:
    """Whether the usable files are those of the generation, with stats that prove their bytes, and their captions."""
    names, captions, stats = columns.names, columns.captions, columns.stats
    if refused:
        kept = [i for i, name in enumerate(names) if name not in refused]
        names, captions, stats = [names[i] for i in kept], [captions[i] for i in kept], stats[kept]
    samples = generation.samples
    if len(names) != len(samples.names) or not np.array_equal(stats, samples.stat[:, :5]) or _any_racy(samples.stat):
        return False
    if not all(map(eq, samples.names, names)):  # string by string: no list of ten million names
        return False
    return not (len(samples.captions.data) or any(captions)) or all(map(eq, samples.captions, captions))


def _any_racy(stat: NDArray[np.uint64]) -> bool:
    """Whether a memo was taken when its file was too young to be trusted."""
    times = stat.view(np.int64)
    return bool((times[:, 5] - np.maximum(times[:, 1], times[:, 2]) < RACY_NS).any())


def _all_there(generation: Generation, layout: CacheLayout) -> bool:
    """Whether every entry is committed where the generation says."""
    rows = generation.rows
    for number, name in enumerate(generation.shards):
        wanted = np.flatnonzero(rows.shard == number)
        try:
            index = load_index(layout.shards / name)
        except CacheDamagedError:
            return False
        if not holds(index, rows.key[wanted], rows.offset[wanted]).all():
            return False
    return True
