"""Documents that are committed already, by the content hash of their records: what a build need not tokenise.

Guarantee: what is known is read from columns that were checked, or from a block whose payload passes its check now.
Blocks that the current generation uses whole are known by its columns; others, as those of a build that was killed,
are read. Cost: 60 bytes of memory a document, and one pass over the blocks that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CorruptEntryError
from latentcache.identity.content import HASH_BYTES
from latentcache.identity.key import KIND_TOKENS, RECIPE_BYTES
from latentcache.store.blocks import unpack_block
from latentcache.store.catalog import Catalog, Located
from latentcache.store.documents import as_items, take_spans
from latentcache.store.token_generation import TokenGeneration
from latentcache.token_recipe import TokenRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some documents and where they lie. K documents, S runs."""

    content: NDArray[np.uint8]
    block: NDArray[np.int32]
    start: NDArray[np.uint32]
    length: NDArray[np.uint32]
    control: NDArray[np.uint32]
    span_ends: NDArray[np.int64]
    spans: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Every document that is committed. ``documents.block`` points into ``blocks``."""

    documents: Part
    blocks: tuple[Located, ...]
    damaged: tuple[Located, ...] = ()
    """Blocks that fail their check."""
    _order: NDArray[np.intp] = field(repr=False)
    _sorted: NDArray[Any] = field(repr=False)

    def find(self, content: NDArray[np.uint8]) -> NDArray[np.int64]:
        """(N,) the position of each record's document, -1 where there is none.

        Args:
            content: (N, 16) content hashes of records.
        """
        if not len(self._sorted):
            return np.full(len(content), -1, dtype=np.int64)
        wanted = as_items(content)
        place = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return np.where(self._sorted[place] == wanted, self._order[place], -1).astype(np.int64)


def known_documents(catalog: Catalog, generation: TokenGeneration | None, recipe: TokenRecipe) -> Known:
    """What was tokenised by this recipe, by whichever build.

    Args:
        catalog: Every committed entry.
        generation: The current generation, if there is one.
        recipe: What is asked for.
    """
    places = _blocks_of(catalog, recipe)
    number = {found.key: position for position, found in enumerate(places)}
    parts, by_columns = _from_columns(generation, recipe, places, number)
    damaged = []
    for found in places:
        if found.key in by_columns:
            continue
        payload = catalog.payload(found)
        try:
            if payload is None:
                raise CorruptEntryError("a block of tokens is damaged")
            block = unpack_block(found.header, payload)
        except CorruptEntryError:
            damaged.append(found)
            continue
        names = ("content", "start", "length", "control", "span_ends", "spans")
        columns = {name: np.array(getattr(block, name)) for name in names}
        where = np.full(len(block.length), number[found.key], dtype=np.int32)
        parts.append(Part(block=where, **columns))
    documents = _joined(parts)
    order = np.argsort(as_items(documents.content), kind="stable")
    return Known(
        documents=documents,
        blocks=tuple(places),
        damaged=tuple(damaged),
        _order=order,
        _sorted=as_items(documents.content)[order],
    )


def _blocks_of(catalog: Catalog, recipe: TokenRecipe) -> list[Located]:
    """The blocks of a recipe, in the order of their keys."""
    committed = catalog.keys()
    keys = [key for key in committed if key[0] == KIND_TOKENS and key[-RECIPE_BYTES:] == recipe.key_part]
    found = (catalog.locate(key) for key in sorted(keys))
    return [one for one in found if one is not None and one.header.recipe_id == recipe.recipe_id]


def _from_columns(
    generation: TokenGeneration | None, recipe: TokenRecipe, places: Sequence[Located], number: dict[bytes, int]
) -> tuple[list[Part], set[bytes]]:
    """Documents of blocks that the generation uses whole, and the keys of those blocks."""
    if generation is None or generation.recipe.recipe_id != recipe.recipe_id or not len(generation.blocks):
        return [], set()
    documents, blocks = generation.documents, generation.blocks
    keys = [key.tobytes() for key in blocks.key]
    moved = np.array([number.get(key, -1) for key in keys], dtype=np.int32)
    held = np.array([places[position].header.original_size.height if position >= 0 else 0 for position in moved])
    _, first = np.unique(documents.block.astype(np.int64) << 32 | documents.start, return_index=True)
    whole = (np.bincount(documents.block[first], minlength=len(keys)) == held) & (moved >= 0)
    chosen = first[whole[documents.block[first]]]
    ends, spans = take_spans(documents.span_ends, documents.spans, chosen)
    part = Part(
        content=documents.content[chosen],
        block=moved[documents.block[chosen]],
        start=documents.start[chosen],
        length=documents.length[chosen],
        control=generation.control[chosen],
        span_ends=ends,
        spans=spans,
    )
    return [part], {key for key, used in zip(keys, whole, strict=True) if used}


def _joined(parts: Sequence[Part]) -> Part:
    """All parts as one."""
    empty = Part(
        content=np.empty((0, HASH_BYTES), dtype=np.uint8),
        block=np.empty(0, dtype=np.int32),
        start=np.empty(0, dtype=np.uint32),
        length=np.empty(0, dtype=np.uint32),
        control=np.empty(0, dtype=np.uint32),
        span_ends=np.empty(0, dtype=np.int64),
        spans=np.empty((0, 2), dtype=np.uint32),
    )
    all_parts = [empty, *parts]
    before = np.cumsum([0, *(len(part.spans) for part in all_parts)])
    ends = [part.span_ends + shift for part, shift in zip(all_parts, before, strict=False)]
    names = ("content", "block", "start", "length", "control", "spans")
    joined = {name: np.concatenate([getattr(part, name) for part in all_parts]) for name in names}
    return Part(span_ends=np.concatenate(ends), **joined)
