"""``open_tokens``: the current generation of a token cache, held until the last reader is gone.

Guarantee: a cache that was made with another tokenizer than the one that is named is refused with what differs; ids
of one tokenizer given to a model of another train on noise without a word. Cost: reading the columns, 48 bytes a
document and 8 a run.
"""

from __future__ import annotations

import os
import shlex
import warnings
from pathlib import Path
from typing import Any

from latentcache.errors import CacheIncompleteError
from latentcache.loader.token_cache import TokenCache
from latentcache.loader.token_follow import coming_name
from latentcache.loader.token_match import refuse_other
from latentcache.store.document_arrivals import follow_tokens
from latentcache.store.layout import CacheLayout
from latentcache.store.pins import pinned
from latentcache.store.plans import PlanFolder
from latentcache.store.token_generation import TokenGeneration, load_tokens
from latentcache.store.token_reader import TokenReader
from latentcache.token_recipe import TokenRecipe


def open_tokens(
    path: str | os.PathLike[str],
    tokenizer: TokenRecipe | str | os.PathLike[str] | Any = None,
    *,
    allow_partial: bool = False,
    follow: bool = False,
    timeout_s: float = 600.0,
) -> TokenCache:
    """Open the current generation of a token cache, and hold it: nothing collects it before the last reader is gone.

    Args:
        path: The cache folder.
        tokenizer: What the model was made with: a ``tokenizer.json`` or the folder of one, a tokenizer of
            ``transformers`` that is loaded, the hex fingerprint of one, or a whole recipe. Without it nothing is
            compared.
        allow_partial: Serve what is there of a cache that a repair took documents out of.
        follow: Where a build with ``--stream`` is under way, open what it will hold: the number of its documents is
            exact at once, and so is that of the rows of ``padded`` where each document has one; a batch waits for
            its documents. Where none is, the current generation as usual.
        timeout_s: How long a batch waits, seconds.

    A cache that holds one share of its data (``build --shard``) is served with a warning.

    Raises:
        StaleCacheError: It was made with another tokenizer or recipe; the fields that differ are named.
        ModelNotFoundError: There is no tokenizer at this path.
        UnsupportedModelError: What is there is no tokenizer that can be compared.
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version, or a cache of pictures.
        CacheDamagedError: Its manifest or a column is damaged.
        CacheIncompleteError: A repair removed documents, and no build has made them again.
    """
    root = Path(path)
    layout = CacheLayout(root)
    coming = follow_tokens(layout, timeout_s=timeout_s) if follow else None
    generation = coming or pinned(root, load_tokens)
    if tokenizer is not None:
        refuse_other(generation, tokenizer, str(root))
    if not (generation.complete or allow_partial):
        raise _incomplete(root, generation)
    if generation.share:
        _warn_of_share(root, generation)
    recipe = generation.recipe
    return TokenCache(
        store=TokenReader(layout, generation),
        recipe=recipe,
        fingerprint=coming_name(recipe, coming.documents) if coming else generation.fingerprint,
        name=str(root),
        generation=generation.number,
        share=generation.share,
        plans=PlanFolder(layout),
    )


def _warn_of_share(root: Path, generation: TokenGeneration) -> None:
    """Nobody trains on a quarter of his data because of a path with a wrong digit."""
    build = f"latentcache build {shlex.quote(generation.source_root)} --take-from {shlex.quote(str(root))}"
    warnings.warn(
        f"{root} holds share {generation.share} of its data: one node of several made it; the whole is made by"
        f" `{build} ... --out WHOLE`, with --take-from for each share",
        stacklevel=3,
    )


def _incomplete(root: Path, generation: TokenGeneration) -> CacheIncompleteError:
    build = f"latentcache build {shlex.quote(generation.source_root)} --out {shlex.quote(str(root))}"
    return CacheIncompleteError(
        f"documents are missing from {root}",
        where=str(root),
        why="a repair removed damaged blocks, and no build has made them again",
        fix=f"{build} (or open_tokens(..., allow_partial=True) to train on what is there)",
    )
