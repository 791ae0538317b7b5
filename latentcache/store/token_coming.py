"""What a build of tokens sets out to make, for those who follow it: its documents, without tokens and places.

Records are read and hashed before the first is tokenised, so every document and its content are known; how many
tokens it has is not. Guarantee: as for pictures (``coming``), by the same functions and in the same folder. Cost: 24
bytes a document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.content import HASH_BYTES
from latentcache.store.columns import StringColumn, check_limits, check_shapes, check_strings
from latentcache.store.coming import TOKENS_COMING_VERSION, find_announcement, put_announcement, string_arrays
from latentcache.store.documents import Documents
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import Blocks, Sources, TokenGeneration
from latentcache.token_recipe import TokenRecipe

_SHAPES: Mapping[str, tuple[str, int]] = {"content": ("|u1", HASH_BYTES), "source": ("<i4", 0), "line": ("<u4", 0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAnnouncement:
    """What a build sets out to make. N documents in the order of the generation to be."""

    recipe: TokenRecipe
    content: NDArray[np.uint8]
    """(N, 16) content hashes of their records."""
    source: NDArray[np.int32]
    """(N,) position in ``sources``."""
    line: NDArray[np.uint32]
    """(N,) line or row, from 1."""
    sources: tuple[str, ...]
    """Files, relative to the folder of DATA."""
    facts: Mapping[str, Any]
    """More for the manifest: ``source``, ``provenance``."""
    before: int = 0
    """Generation that was current when the build began, 0 without one."""


def announce_tokens(layout: CacheLayout, coming: TokenAnnouncement) -> Path:
    """Say what will be there; gives the path of the log to be. An older announcement is replaced.

    Raises:
        DiskFullError: No space.
        CacheReadOnlyError: The cache cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {name: getattr(coming, name) for name in _SHAPES}
    arrays |= string_arrays("sources", StringColumn.of(coming.sources))
    about = {
        "version": TOKENS_COMING_VERSION,
        "before": coming.before,
        "recipe": coming.recipe.as_json(),
        **coming.facts,
    }
    return put_announcement(layout, about, arrays)


def load_announced_tokens(layout: CacheLayout) -> TokenGeneration | None:
    """The generation to be, without tokens and places; None where no build is announced.

    Raises:
        CacheFormatError: Announced by a newer version, or a build of pictures.
        CacheDamagedError: It is not what was written.
    """
    return find_announcement(layout, _generation, version=TOKENS_COMING_VERSION)


def _generation(manifest: Mapping[str, Any], columns: Mapping[str, NDArray[Any]]) -> TokenGeneration:
    count = len(columns["content"])
    check_shapes(columns, _SHAPES, count)
    check_strings(columns, "sources")
    names = StringColumn(columns["sources_bytes"], columns["sources_ends"])
    check_limits(columns, {"source": len(names)})
    return TokenGeneration(
        number=int(manifest["before"]) + 1,
        recipe=TokenRecipe.from_json(manifest["recipe"]),
        documents=Documents(
            content=columns["content"],
            block=np.full(count, -1, dtype=np.int32),
            start=np.zeros(count, dtype=np.uint32),
            length=np.zeros(count, dtype=np.uint32),
            span_ends=np.zeros(count, dtype=np.int64),
            spans=np.empty((0, 2), dtype=np.uint32),
            source=columns["source"],
            line=columns["line"],
            sources=tuple(names),
        ),
        control=np.zeros(count, dtype=np.uint32),
        blocks=_room(count),
        sources=Sources(
            names=names,
            content=np.zeros((len(names), HASH_BYTES), dtype=np.uint8),
            stat=np.zeros((len(names), 6), dtype=np.uint64),
        ),
        shards=(),
        refused=(),
        notes=(),
        manifest=manifest,
    )


def _room(count: int) -> Blocks:
    """Places for blocks: each that arrives holds a document that was not there, so there are at most so many."""
    return Blocks(
        key=np.zeros((count, 32), dtype=np.uint8),
        shard=np.zeros(count, dtype=np.int32),
        offset=np.zeros(count, dtype=np.uint64),
        tokens=np.zeros(count, dtype=np.uint32),
        ids_hash=np.zeros((count, HASH_BYTES), dtype=np.uint8),
    )
