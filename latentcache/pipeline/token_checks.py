"""Small questions that a build of tokens asks: is there room, is nothing to do, what was refused before.

Guarantee: a doubt is a no: where it cannot be seen that nothing changed, the build takes the long way round.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from latentcache.errors import CacheDamagedError, DiskFullError
from latentcache.pipeline.preflight import RESERVE_BYTES
from latentcache.pipeline.token_inputs import TokenBefore
from latentcache.pipeline.token_report import TokenPlan
from latentcache.pipeline.token_settings import TokenSettings, options_json
from latentcache.pipeline.token_survey import as_refusals
from latentcache.sources.record_listing import Listing
from latentcache.sources.records import RecordScan
from latentcache.sources.sample import Refusal
from latentcache.store.index import holds, load_index
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import TokenGeneration
from latentcache.token_recipe import TokenRecipe

#: Causes that lie in the machine and its settings: tried again by every build.
_RETRIED = frozenset({"record-too-large"})


def is_chat(scan: RecordScan) -> bool:
    """Whether there are conversations, as the first usable record of any file is one.

    A file is of one form, so its first record speaks for it; no file speaks for another. Files are opened until one
    holds conversations.

    Raises:
        SourceError: A file cannot be read.
    """
    candidates = scan.but([file.name for file in scan.files if file.only_texts])
    return any(record.messages is not None for record in candidates.firsts())


def nothing_changed(before: TokenBefore, listing: Listing, settings: TokenSettings, layout: CacheLayout) -> bool:
    """Whether every file is the one that the last build read, and every block is where it says."""
    old = before.generation
    if old is None or before.damage or not old.complete or not layout.retired().isdisjoint(old.shards):
        return False
    if layout.building.exists() or layout.open_shards():
        return False
    source = old.manifest["source"]
    same = source["root"] == str(settings.data.resolve()) and source["options"] == options_json(settings)
    return same and listing.proves(source["listing"]) and _all_there(old, layout)


def _all_there(generation: TokenGeneration, layout: CacheLayout) -> bool:
    """Whether every block is committed where the generation says."""
    blocks = generation.blocks
    for number, name in enumerate(generation.shards):
        wanted = np.flatnonzero(blocks.shard == number)
        try:
            index = load_index(layout.shards / name)
        except CacheDamagedError:
            return False
        if not holds(index, blocks.key[wanted], blocks.offset[wanted]).all():
            return False
    return True


def refused_before(generation: TokenGeneration | None, recipe: TokenRecipe) -> Mapping[bytes, Refusal]:
    """Records that this recipe's tokenizer refused in the last build and would refuse again, by content hash."""
    if generation is None or generation.recipe.recipe_id != recipe.recipe_id:
        return {}
    kept = (refusal for refusal in as_refusals(generation.refused) if refusal.cause not in _RETRIED)
    return {refusal.content: refusal for refusal in kept if refusal.content}


def tries_again(generation: TokenGeneration) -> bool:
    """Whether a build tries some of what the last one refused: it was not the record's fault alone."""
    return any(refusal["cause"] in _RETRIED for refusal in generation.refused)


def check_room(plan: TokenPlan) -> None:
    """Refuse a build that cannot fit.

    Raises:
        DiskFullError: The plan needs more than is free.
    """
    if plan.todo + plan.taken and plan.bytes_to_write * 11 // 10 + RESERVE_BYTES > plan.free_bytes:
        raise DiskFullError(
            "the disk is too full for this build",
            where=str(plan.cache),
            why=f"the plan needs about {plan.bytes_to_write:,} bytes, a tenth more and {RESERVE_BYTES:,} in reserve;"
            f" {plan.free_bytes:,} are free",
            fix="free some space, or give another disk with --out",
        )
