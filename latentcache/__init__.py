"""latentcache: encode once, prove it on demand, train from batches that are right by construction.

Names here are loaded when they are first used, so that ``import latentcache`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module

from latentcache._version import __version__ as __version__

TYPE_CHECKING = False  # typing's own, without the import: signals before this file is read have no message
if TYPE_CHECKING:
    from typing import Any

    from latentcache.errors import LatentcacheError as LatentcacheError
    from latentcache.errors import StoreError as StoreError
    from latentcache.loader.cache import Cache as Cache
    from latentcache.loader.cache import open_cache as open_cache
    from latentcache.loader.loader import Loader as Loader
    from latentcache.loader.rows import Rows as Rows
    from latentcache.loader.view import combine as combine
    from latentcache.pipeline.build import build_cache as build_cache
    from latentcache.pipeline.merge import merge_caches as merge_caches
    from latentcache.pipeline.settings import BuildSettings as BuildSettings
    from latentcache.plan.batching import PlanReport as PlanReport
    from latentcache.verify.verify import verify_cache as verify_cache

_HOMES = {
    "BuildSettings": "latentcache.pipeline.settings",
    "Cache": "latentcache.loader.cache",
    "LatentcacheError": "latentcache.errors",
    "Loader": "latentcache.loader.loader",
    "PlanReport": "latentcache.plan.batching",
    "Rows": "latentcache.loader.rows",
    "StoreError": "latentcache.errors",
    "build_cache": "latentcache.pipeline.build",
    "combine": "latentcache.loader.view",
    "merge_caches": "latentcache.pipeline.merge",
    "open_cache": "latentcache.loader.cache",
    "verify_cache": "latentcache.verify.verify",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'latentcache' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
