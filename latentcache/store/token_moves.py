"""Publishes a generation again with its entries in other places, or without some: of pictures, or of tokens.

Guarantee: the documents that stay keep their order, their ids and their runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from latentcache.store.documents import take_spans
from latentcache.store.generation import Rows
from latentcache.store.layout import CacheLayout
from latentcache.store.retire import OWN_FACTS, republish
from latentcache.store.token_accounts import fingerprint, token_accounts
from latentcache.store.token_generation import (
    AnyGeneration,
    Blocks,
    TokenGeneration,
    publish_tokens,
)


def republish_any(
    layout: CacheLayout, old: AnyGeneration, *, rows: Rows, shards: Sequence[str], complete: bool
) -> int:
    """As :func:`~latentcache.store.retire.republish`, for generations of both kinds."""
    if isinstance(old, TokenGeneration):
        return republish_tokens(layout, old, rows=rows, shards=shards, complete=complete)
    return republish(layout, old, rows=rows, shards=shards, complete=complete)


def republish_tokens(
    layout: CacheLayout, old: TokenGeneration, *, rows: Rows, shards: Sequence[str], complete: bool
) -> int:
    """Publish the blocks that ``rows`` still has, and the documents in them. Returns the number of the generation.

    Args:
        layout: The cache, whose builder lock the caller holds.
        old: What is published again.
        rows: Rows of ``old``, some of them left out or in other places; ``sample`` numbers the blocks of ``old``.
        shards: The shard names that ``rows.shard`` points into.
        complete: Whether every usable record has its document.

    Raises:
        DiskFullError: No space; the old generation stays.
        CacheReadOnlyError: The cache cannot be written.
    """
    number = np.full(len(old.blocks), -1, dtype=np.int32)
    number[rows.sample] = np.arange(len(rows.sample), dtype=np.int32)
    chosen = np.flatnonzero(number[old.documents.block] >= 0)
    ends, spans = take_spans(old.documents.span_ends, old.documents.spans, chosen)
    names = ("content", "start", "length", "source", "line")
    columns = {name: getattr(old.documents, name)[chosen] for name in names}
    documents = replace(
        old.documents, block=number[old.documents.block[chosen]], span_ends=ends, spans=spans, **columns
    )
    blocks = Blocks(
        key=rows.key,
        shard=rows.shard,
        offset=rows.offset,
        tokens=old.blocks.tokens[rows.sample],
        ids_hash=rows.pixel_hash,
    )
    control = old.control[chosen]
    facts = {name: old.manifest[name] for name in sorted(old.manifest.keys() - OWN_FACTS)}
    made = {
        "fingerprint": fingerprint(old.recipe.recipe_id, documents),
        "tokens": token_accounts(documents, control, len(old.sources)),
    }
    return publish_tokens(
        layout,
        recipe=old.recipe,
        documents=documents,
        control=control,
        blocks=blocks,
        sources=old.sources,
        shards=shards,
        refused=old.refused,
        notes=old.notes,
        facts=facts | made | {"replaces": old.number},
        complete=complete,
    )
