"""latentcache: latents computed once, proven true on demand, served in batches that are right by construction.

Names here are loaded when they are first used, so that ``import latentcache`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own, without the import: until this file is through no signal has words
if TYPE_CHECKING:
    from typing import Any

    from latentcache.errors import LatentcacheError, StoreError
    from latentcache.geometry.placement import place
    from latentcache.loader.cache import open_cache
    from latentcache.loader.cache_mix import combine_caches
    from latentcache.loader.loader import CacheLoader
    from latentcache.loader.token_mix import combine_views
    from latentcache.loader.token_opening import open_tokens
    from latentcache.pipeline.build import build_cache
    from latentcache.pipeline.settings import BuildSettings, RecipeSettings
    from latentcache.plan.epoch import plan_epoch
    from latentcache.recipe import Recipe
    from latentcache.verify.run import verify_cache

_HOMES = {
    "BuildSettings": "latentcache.pipeline.settings",
    "CacheLoader": "latentcache.loader.loader",
    "LatentcacheError": "latentcache.errors",
    "Recipe": "latentcache.recipe",
    "RecipeSettings": "latentcache.pipeline.settings",
    "StoreError": "latentcache.errors",
    "build_cache": "latentcache.pipeline.build",
    "combine_caches": "latentcache.loader.cache_mix",
    "combine_views": "latentcache.loader.token_mix",
    "open_cache": "latentcache.loader.cache",
    "open_tokens": "latentcache.loader.token_opening",
    "place": "latentcache.geometry.placement",
    "plan_epoch": "latentcache.plan.epoch",
    "verify_cache": "latentcache.verify.run",
}

__version__ = "0.1.0"
__all__ = [
    "BuildSettings",
    "CacheLoader",
    "LatentcacheError",
    "Recipe",
    "RecipeSettings",
    "StoreError",
    "build_cache",
    "combine_caches",
    "combine_views",
    "open_cache",
    "open_tokens",
    "place",
    "plan_epoch",
    "verify_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'latentcache' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
