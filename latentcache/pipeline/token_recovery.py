"""What a build of tokens does about what it finds broken in its own cache, before it plans.

Guarantee: what is whole is kept, and what is not is said; nothing that is damaged stays where a document could be
looked for in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from latentcache.pipeline.token_inputs import TokenBefore
from latentcache.pipeline.token_known import Known, known_documents
from latentcache.store.catalog import Located, load_catalog
from latentcache.store.durable import make_folder
from latentcache.store.layout import CacheLayout
from latentcache.store.retire import retire
from latentcache.store.salvage import mend_shards, salvage
from latentcache.token_recipe import TokenRecipe

Warn = Callable[[str], None]


def recover(layout: CacheLayout, before: TokenBefore, warn: Warn) -> None:
    """Take over what a build that died has committed, and what is whole of damaged shards.

    Args:
        layout: The cache, whose builder lock the caller holds.
        before: As the build found it.
        warn: Told of each thing that is mended.
    """
    if before.damage:
        warn(f"the manifest was damaged and is made again ({before.damage})")
    make_folder(layout.shards)
    for found in mend_shards(layout, before.generation):
        saved = f"{found.saved} whole entries of it were saved, what else is needed is made again"
        warn(f"shard {found.source} was damaged: {saved}")


def known_whole(layout: CacheLayout, before: TokenBefore, recipe: TokenRecipe, warn: Warn | None) -> Known:
    """The documents of the cache, once what is damaged has been set aside.

    Args:
        layout: The cache.
        before: As the build found it.
        recipe: What is asked for.
        warn: Told of each damaged block; None where nothing may be changed.
    """
    known = known_documents(load_catalog(layout), before.generation, recipe)
    if not known.damaged or warn is None:
        return known
    _set_aside(layout, known.damaged, warn)
    return known_documents(load_catalog(layout), before.generation, recipe)


def _set_aside(layout: CacheLayout, damaged: Sequence[Located], warn: Warn) -> None:
    """Copy what is whole of the shards of damaged blocks and retire them: what is made again has the same key."""
    for block in damaged:
        warn(f"block {block.key.hex()} is damaged: what is needed of it is made again")
    for name in dict.fromkeys(block.shard for block in damaged):
        salvage(layout, layout.shards / name)
        retire(layout, name, "damaged")
