"""``repair_cache``: takes what fails its check out of a cache, so that a build makes it again.

Guarantee: nothing is removed but what a full verification calls corrupt, and, where asked for, what is stale or has
drifted; no entry is changed, sources are not touched. Damaged shards are copied entry by entry, as far as
they are whole, and retired; readers of the generation before go on. Killed at any point, the cache is the old one or
the new one, and the same command goes on. Cost: a full verification, and a copy of every damaged shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import numpy as np

from latentcache.failpoint import failpoint
from latentcache.geometry.sizes import latent_size
from latentcache.identity.key import KEY_BYTES
from latentcache.recipe import DTYPES, Recipe
from latentcache.store.catalog import Catalog, Located, index_or_none
from latentcache.store.entry import HEADER_BYTES
from latentcache.store.generation import Generation, load_generation
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_lock
from latentcache.store.retire import check_one_disk, moved, republish, retire
from latentcache.store.salvage import Salvaged, places_in, salvage
from latentcache.store.variants import in_pairs
from latentcache.verify.drift import Reencode
from latentcache.verify.findings import Finding, VerifyReport
from latentcache.verify.removals import (
    OF_SHARDS,
    Removal,
    RepairPlan,
    RepairReport,
    corrupt_of,
    damaged_shards,
    write_log,
)
from latentcache.verify.run import verify_cache
from latentcache.verify.selection import Depth
from latentcache.verify.twins import alike

#: Reasons of ``stale`` for which an entry is no longer right. A caption is no part of one.
_OF_ENTRIES = frozenset({"source-changed", "source-removed", "geometry-changed"})


def repair_cache(
    cache: Path,
    *,
    data: Path | None = None,
    requested: Recipe | Callable[[Recipe], Recipe] | None = None,
    drop_stale: bool = False,
    depth: Depth | None = None,
    reencode: Reencode | None = None,
    confirm: Callable[[RepairPlan], bool],
) -> RepairReport:
    """Verify everything, then take out what is corrupt.

    Args:
        cache: The cache folder.
        data: The data folder, where it is not the recorded one.
        requested: As for :func:`verify_cache`; what differs from it is reported and kept.
        drop_stale: Take out entries whose source or geometry is no longer the same, too.
        depth: A full one, that may ask for samples to be encoded again; what has drifted is then taken out, too.
        reencode: As for :func:`verify_cache`.
        confirm: Shown the plan, where there is anything to do; False leaves all as it is.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version.
        CacheLockedError: A build, another repair or a collection is at work here.
        CacheDamagedError: The manifest or a column is damaged, so nothing can be said of single samples.
        CacheReadOnlyError: The cache cannot be written.
        StoreError: A part of the cache lies on another file system.
        DiskFullError: No room to copy a damaged shard. Nothing is lost.
        SourceNotFoundError: The data folder is gone; say where it is with ``data``.
    """
    layout = CacheLayout(cache)
    layout.current_generation()  # no lock is left in a folder that is no cache
    with builder_lock(layout.lock):
        report = verify_cache(
            cache, data=data, requested=requested, depth=depth or Depth(full=True), reencode=reencode
        )
        generation = load_generation(cache, report.generation)
        plan = _plan(layout, generation, report, drop_stale=drop_stale)
        if not plan.needed or not confirm(plan):
            return RepairReport(plan=plan)
        check_one_disk(layout)
        return _carry_out(layout, generation, plan)


def _plan(layout: CacheLayout, generation: Generation, report: VerifyReport, *, drop_stale: bool) -> RepairPlan:
    corrupt = corrupt_of(report)
    condemned = {f.key: f.reason for f in corrupt if f.reason not in OF_SHARDS and not f.is_unused}
    whole = defaultdict[str, set[bytes]](set)
    for finding in filter(_is_whole_and_wrong, corrupt):
        whole[finding.file.split("/")[1]].add(bytes.fromhex(finding.key))
    wrong = alike(layout, whole)
    reasons = dict(_rows_alike(generation, wrong)) | dict(_rows_of_keys(generation, condemned))
    if drop_stale:
        reasons = dict(_rows_of_stale(generation, report.findings)) | reasons
    removals = tuple(_removal(generation, row, reason) for row, reason in sorted(reasons.items()))
    shards = damaged_shards(layout, generation, corrupt, also=wrong.keys())
    return RepairPlan(report=report, removals=removals, shards=shards, wrong=wrong)


def _rows_of_keys(generation: Generation, reasons: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Rows with these keys, in hex, and why; files with the same bytes share an entry."""
    wanted = {bytes.fromhex(key): reason for key, reason in reasons.items() if key}
    flat = generation.rows.key.tobytes() if wanted else b""
    for row in range(len(flat) // KEY_BYTES):
        reason = wanted.get(flat[row * KEY_BYTES : (row + 1) * KEY_BYTES])
        if reason is not None:
            yield row, reason


def _rows_alike(generation: Generation, wrong: Mapping[str, Set[bytes]]) -> Iterator[tuple[int, str]]:
    """Rows whose entry holds the bytes of a wrong one, and was not found itself."""
    for name in set(wrong) & set(generation.shards):
        for row in _rows_in(generation, [name]):
            if generation.rows.key[row].tobytes() in wrong[name]:
                yield row, "same-bytes"


def _rows_of_stale(generation: Generation, findings: Sequence[Finding]) -> Iterator[tuple[int, str]]:
    reasons = {f.path: f.reason for f in findings if f.category == "stale" and f.reason in _OF_ENTRIES}
    by_sample = {n: reasons[name] for n, name in enumerate(generation.samples.names) if name in reasons}
    for row, sample in enumerate(generation.rows.sample.tolist()):
        if sample in by_sample:
            yield row, by_sample[sample]


def _removal(generation: Generation, row: int, reason: str) -> Removal:
    shape, itemsize = _shape_of(generation, row), DTYPES[generation.recipe.encoder.storage_dtype][1]
    return Removal(
        row=row,
        path=generation.samples.names[int(generation.rows.sample[row])],
        key=generation.rows.key[row].tobytes().hex(),
        reason=reason,
        num_bytes=HEADER_BYTES + int(np.prod(shape)) * itemsize,
    )


def _shape_of(generation: Generation, row: int) -> tuple[int, int, int]:
    """(C, H, W) that the recipe gives the entry of a row."""
    spec = generation.recipe.encoder
    cells = latent_size(generation.buckets[int(generation.rows.bucket[row])], spec.factor)
    return spec.stored_channels, cells.height, cells.width


def _carry_out(layout: CacheLayout, generation: Generation, plan: RepairPlan) -> RepairReport:
    """Copy, log, retire, publish, in this order: until the last step readers and builds see nothing half."""
    salvaged, placed = _saved(layout, generation, plan)
    reasons = {
        item.row: item.reason for item in plan.removals if item.row not in placed or item.reason in _OF_ENTRIES
    }
    for row in _rows_in(generation, plan.shards):
        if row not in placed:
            reasons.setdefault(row, "not-whole")
    removals = tuple(_removal(generation, row, reason) for row, reason in sorted(reasons.items()))
    log = write_log(layout, generation.number, removals)
    for name in plan.shards:
        failpoint("repair-delete")
        retire(layout, name, "damaged")
    dropped = reasons.keys() | (_rows_lost(generation, plan.report.damage) - placed.keys())
    rows, shards = moved(generation, in_pairs(generation, dropped), placed)
    complete = generation.complete and not dropped
    failpoint("repair-delete")
    number = republish(layout, generation, rows=rows, shards=shards, complete=complete)
    return RepairReport(
        plan=plan,
        done=True,
        generation=number,
        complete=complete,
        removals=removals,
        salvaged=salvaged,
        log=log,
    )


def _saved(
    layout: CacheLayout, generation: Generation, plan: RepairPlan
) -> tuple[tuple[Salvaged, ...], dict[int, Located]]:
    """Copy what is whole of the damaged shards; gives what became of them, and the new place of each row."""
    rows = _rows_in(generation, plan.shards)
    elsewhere = _elsewhere(layout, generation, rows, plan.shards)
    salvaged = tuple(
        salvage(
            layout,
            layout.shards / name,
            skip=elsewhere.keys() | plan.wrong.get(name, set()),
            hints=places_in(generation, name),
        )
        for name in plan.shards
    )
    copies = Catalog([load_index(layout.shards / found.shard) for found in salvaged if found.shard])
    placed: dict[int, Located] = {}
    for row in rows:
        key = generation.rows.key[row].tobytes()
        found = elsewhere.get(key) or copies.locate(key)
        if found is not None and found.header.shape == _shape_of(generation, row):
            placed[row] = found
    return salvaged, placed


def _is_whole_and_wrong(finding: Finding) -> bool:
    """Whether its checksum would let an entry through that must not be kept."""
    return finding.reason in ("non-finite", "unused-non-finite") or finding.category == "drift"


def _rows_in(generation: Generation, shards: Sequence[str]) -> list[int]:
    numbers = [generation.shards.index(name) for name in shards if name in generation.shards]
    return list(np.flatnonzero(np.isin(generation.rows.shard, numbers)).tolist())


def _rows_lost(generation: Generation, damage: Sequence[Finding]) -> set[int]:
    """Rows whose entry is not there: the new generation does not promise it any more."""
    lost = {finding.key: "" for finding in damage if finding.category == "missing"}
    return {row for row, _ in _rows_of_keys(generation, lost)}


def _elsewhere(
    layout: CacheLayout, generation: Generation, rows: Sequence[int], damaged: Sequence[str]
) -> dict[bytes, Located]:
    """Entries of damaged shards that are whole in another shard too: by an earlier repair that was killed."""
    folders = [folder for folder in layout.sealed_shards() if folder.name not in damaged]
    catalog = Catalog([index for folder in folders if (index := index_or_none(folder))])
    found = {}
    for row in rows:
        located = catalog.locate(generation.rows.key[row].tobytes())
        if located is not None and catalog.payload(located) is not None:
            found[located.key] = located
    return found
