"""``repair_tokens``: takes blocks that fail their check out of a token cache, so that a build makes them again.

Guarantee: nothing is removed but what a full verification calls corrupt, or found to have drifted; damaged shards are
copied block by block as far as they are whole, and retired; readers of the generation before go on. Killed at any
point, the cache is the old one or the new one. Documents that shared a block with a damaged one go with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.store.catalog import Catalog, Located
from latentcache.store.entry import HEADER_BYTES
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_lock
from latentcache.store.retire import moved, retire
from latentcache.store.salvage import Salvaged, places_in, salvage
from latentcache.store.token_generation import TokenGeneration, load_tokens
from latentcache.store.token_moves import republish_tokens
from latentcache.verify.removals import (
    OF_SHARDS,
    Removal,
    RepairPlan,
    RepairReport,
    corrupt_of,
    damaged_shards,
    write_log,
)
from latentcache.verify.selection import Depth
from latentcache.verify.token_run import verify_tokens


def repair_tokens(cache: Path, *, confirm: Callable[[RepairPlan], bool], **look: Any) -> RepairReport:
    """Verify everything, then take out what is corrupt.

    Args:
        cache: The cache folder.
        confirm: Shown the plan, where there is anything to do; False leaves all as it is.
        **look: As for :func:`~latentcache.verify.token_run.verify_tokens`; a ``depth`` is a full one.

    Raises:
        CacheLockedError: A build, another repair or a collection is at work here.
        CacheReadOnlyError: The cache cannot be written.
        DiskFullError: No room to copy a damaged shard. Nothing is lost.
        StoreError: As for ``verify_tokens``.
    """
    layout = CacheLayout(cache)
    layout.current_generation()  # no lock is left in a folder that is no cache
    with builder_lock(layout.lock):
        report = verify_tokens(cache, **{"depth": Depth(full=True), **look})
        generation = load_tokens(cache, report.generation)
        corrupt = corrupt_of(report)
        keys = _keys_of_documents(generation)
        condemned = [found for found in corrupt if found.reason not in OF_SHARDS and not found.is_unused]
        reasons = {found.key or keys[found.path]: found.reason for found in condemned}
        plan = RepairPlan(
            report=report,
            removals=_removals(generation, reasons),
            shards=damaged_shards(layout, generation, corrupt),
        )
        if not plan.needed or not confirm(plan):
            return RepairReport(plan=plan)
        return _carry_out(layout, generation, plan, reasons)


def _keys_of_documents(generation: TokenGeneration) -> dict[str, str]:
    """Key of the block, in hex, by file and line of the document."""
    documents = generation.documents
    keys = [key.tobytes().hex() for key in generation.blocks.key]
    return {documents.where(number): keys[block] for number, block in enumerate(documents.block.tolist())}


def _removals(generation: TokenGeneration, reasons: dict[str, str]) -> tuple[Removal, ...]:
    """One removal for each block, with the name of its first document."""
    blocks, itemsize = generation.blocks, 2 if generation.recipe.dtype == "uint16" else 4
    found = []
    for row in range(len(blocks)):
        key = blocks.key[row].tobytes().hex()
        if key in reasons:
            first = int(np.flatnonzero(generation.documents.block == row)[0])
            size = HEADER_BYTES + int(blocks.tokens[row]) * itemsize
            path = generation.documents.where(first)
            found.append(Removal(row=row, path=path, key=key, reason=reasons[key], num_bytes=size))
    return tuple(found)


def _carry_out(
    layout: CacheLayout, generation: TokenGeneration, plan: RepairPlan, reasons: dict[str, str]
) -> RepairReport:
    """Copy, log, retire, publish, in this order: until the last step readers and builds see nothing half."""
    condemned = {bytes.fromhex(key) for key in reasons}
    numbers = [generation.shards.index(name) for name in plan.shards if name in generation.shards]
    rows = np.flatnonzero(np.isin(generation.blocks.shard, numbers)).tolist()
    # A block that has drifted is whole: it must not be taken over, and neither must builds find it again.
    drifted = {int(shard) for row, shard in enumerate(generation.blocks.shard.tolist()) if _drifted(plan, row)}
    shards = tuple(dict.fromkeys([*plan.shards, *(generation.shards[number] for number in sorted(drifted))]))
    rows += np.flatnonzero(np.isin(generation.blocks.shard, sorted(drifted - set(numbers)))).tolist()
    salvaged, placed = _saved(layout, generation, shards, rows, condemned)
    lost = {finding.key for finding in plan.report.damage if finding.category == "missing"}
    for row in rows:
        if row not in placed:
            reasons.setdefault(generation.blocks.key[row].tobytes().hex(), "not-whole")
    removals = _removals(generation, reasons)
    log = write_log(layout, generation.number, removals)
    for name in shards:
        retire(layout, name, "damaged")
    gone = {item.row for item in removals}
    gone |= {
        row for row, key in enumerate(generation.blocks.key) if key.tobytes().hex() in lost and row not in placed
    }
    moved_rows, names = moved(generation, gone, placed)
    complete = generation.complete and not gone
    number = republish_tokens(layout, generation, rows=moved_rows, shards=names, complete=complete)
    return RepairReport(
        plan=plan,
        done=True,
        generation=number,
        complete=complete,
        removals=removals,
        salvaged=salvaged,
        log=log,
    )


def _drifted(plan: RepairPlan, row: int) -> bool:
    return any(item.row == row and item.reason == "tokens" for item in plan.removals)


def _saved(
    layout: CacheLayout, generation: TokenGeneration, shards: tuple[str, ...], rows: list[int], condemned: set[bytes]
) -> tuple[tuple[Salvaged, ...], dict[int, Located]]:
    """Copy what is whole of these shards; gives what became of them, and the new place of each row."""
    salvaged = tuple(
        salvage(layout, layout.shards / name, skip=condemned, hints=places_in(generation, name)) for name in shards
    )
    copies = Catalog([load_index(layout.shards / found.shard) for found in salvaged if found.shard])
    placed = {}
    for row in rows:
        key = generation.blocks.key[row].tobytes()
        found = copies.locate(key)
        if found is not None and key not in condemned:
            placed[row] = found
    return salvaged, placed
