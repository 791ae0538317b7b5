"""What a build finds in its cache, whatever that holds: the newest whole generation, and what a dead build began.

Guarantee: damage never ends a build here; only what a newer version wrote, or a build of the other kind, does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from latentcache.errors import CacheDamagedError, CacheFormatError, CacheNotFoundError, RecipeError
from latentcache.store.durable import read_json
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import FORMAT_VERSION, is_whole

_Generation = TypeVar("_Generation")
_Begun = TypeVar("_Begun")


def newest_whole(
    layout: CacheLayout, load: Callable[[Path, int | None], _Generation]
) -> tuple[_Generation | None, str]:
    """The current generation, or the newest whole one with what is wrong with the current; None without any.

    Args:
        layout: The cache.
        load: Opens a generation of the kind that is built, the current one where no number is given.

    Raises:
        CacheFormatError: Written by a newer version, or of the other kind.
    """
    damage = ""
    for number in (None, *sorted(layout.generations(), reverse=True)):
        try:
            return load(layout.root, number), damage
        except CacheNotFoundError:
            if layout.building.exists() or not layout.generations():
                return None, damage
            damage = f"{layout.current.name} is missing"
        except CacheDamagedError as error:
            damage = damage or f"{error.what}: {error.why}"
    return None, damage


def begun(layout: CacheLayout, kind: str | None, read: Callable[[Mapping[str, Any]], _Begun]) -> _Begun | None:
    """What a build that has not ended set out to do. A marker that cannot be read says nothing: None.

    Args:
        layout: The cache.
        kind: What the marker says of the kind that is built; None for pictures.
        read: Reads a marker that is whole.

    Raises:
        CacheFormatError: A newer version is at work here, or a build of the other kind.
    """
    try:
        found = read_json(layout.building) if layout.building.exists() else {}
        if int(found.get("format", 0)) > FORMAT_VERSION:
            raise CacheFormatError(
                f"a build of format {found['format']} is under way here; this version knows up to {FORMAT_VERSION}",
                where=str(layout.building),
                fix="upgrade with `pip install -U latentcache`, or build into another folder with --out",
            )
        if not is_whole(found):
            return None
        if found.get("kind") != kind:
            raise CacheFormatError(
                f"a build of {found.get('kind') or 'pictures'} has been started here and has not ended",
                where=str(layout.root),
                fix=f"give {kind or 'pictures'} another folder with --out",
                slug="cache-kind",
            )
        return read(found)
    except (CacheDamagedError, RecipeError, KeyError, ValueError, TypeError):
        return None
