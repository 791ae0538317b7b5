"""``open_tokens``: the current generation of a token cache, held until the last reader is gone.

Guarantee: a cache that was made with another tokenizer than the one that is named is refused with what differs; ids
of one tokenizer given to a model of another train on noise without a word. Cost: reading the columns, 48 bytes a
document and 8 a run.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from latentcache.errors import CacheIncompleteError, StaleCacheError
from latentcache.loader.token_cache import TokenCache
from latentcache.store.layout import CacheLayout
from latentcache.store.pins import pinned
from latentcache.store.plans import PlanFolder
from latentcache.store.token_generation import TokenGeneration, load_tokens
from latentcache.store.token_reader import TokenReader
from latentcache.token_recipe import TokenRecipe, token_differences


def open_tokens(
    path: str | os.PathLike[str],
    tokenizer: TokenRecipe | str | None = None,
    *,
    allow_partial: bool = False,
) -> TokenCache:
    """Open the current generation of a token cache, and hold it: nothing collects it before the last reader is gone.

    Args:
        path: The cache folder.
        tokenizer: What the model was made with: the hex fingerprint of a tokenizer, or a whole recipe. Without it
            nothing is compared.
        allow_partial: Serve what is there of a cache that a repair took documents out of.

    Raises:
        StaleCacheError: It was made with another tokenizer or recipe; the fields that differ are named.
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version, or a cache of pictures.
        CacheDamagedError: Its manifest or a column is damaged.
        CacheIncompleteError: A repair removed documents, and no build has made them again.
    """
    root = Path(path)
    generation = pinned(root, load_tokens)
    if tokenizer is not None:
        _refuse_other(generation.recipe, tokenizer, root)
    if not (generation.complete or allow_partial):
        raise _incomplete(root, generation)
    layout = CacheLayout(root)
    return TokenCache(
        store=TokenReader(layout, generation),
        recipe=generation.recipe,
        fingerprint=generation.fingerprint,
        name=str(root),
        generation=generation.number,
        plans=PlanFolder(layout),
    )


def _refuse_other(cached: TokenRecipe, wanted: TokenRecipe | str, root: Path) -> None:
    if isinstance(wanted, TokenRecipe):
        different = token_differences(cached, wanted)
    else:
        different = [("tokenizer", cached.tokenizer, wanted)] if wanted != cached.tokenizer else []
    if different:
        changes = ", ".join(f"{name}: {was} -> {now}" for name, was, now in different)
        raise StaleCacheError(
            f"{root} was made with another tokenizer or recipe",
            where=str(root),
            why=changes,
            fix="build the cache again with the tokenizer of the model, or load the model that fits",
            differences=tuple((name, str(was), str(now)) for name, was, now in different),
        )


def _incomplete(root: Path, generation: TokenGeneration) -> CacheIncompleteError:
    build = f"latentcache build {shlex.quote(generation.source_root)} --out {shlex.quote(str(root))}"
    return CacheIncompleteError(
        f"documents are missing from {root}",
        where=str(root),
        why="a repair removed damaged blocks, and no build has made them again",
        fix=f"{build} (or open_tokens(..., allow_partial=True) to train on what is there)",
    )
