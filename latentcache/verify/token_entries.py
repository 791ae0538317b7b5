"""Checks of the headers of blocks of tokens: each is held against its key, the recipe and the columns.

Cost: 20 us a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.identity.key import KIND_TOKENS
from latentcache.store.blocks import block_facts
from latentcache.store.entry import unpack_header
from latentcache.store.token_generation import TokenGeneration


def wrong_blocks(
    entries: NDArray[Any], rows: NDArray[np.intp], generation: TokenGeneration
) -> Iterator[tuple[int, str]]:
    """Blocks whose header is not what it should be, and why.

    Args:
        entries: (n,) what the index of their shard says of each.
        rows: (n,) positions of the blocks.
        generation: What they should be.
    """
    blocks, recipe = generation.blocks, generation.recipe
    for row, entry in zip(rows.tolist(), entries, strict=True):
        key = blocks.key[row].tobytes()
        try:
            header = unpack_header(entry["header"].tobytes(), key)
        except StoreError as error:
            yield row, error.why or error.what
            continue
        facts = block_facts(blocks.ids_hash[row].tobytes())
        expected = (KIND_TOKENS, recipe.dtype, recipe.recipe_id, int(blocks.tokens[row]), facts)
        found = (header.kind, header.dtype, header.recipe_id, header.true_length, entry["facts"].tobytes())
        if expected != found or header.content != key[8:24] or header.recipe_id[:8] != key[24:]:
            yield row, "its header is not that of the recorded block"
