"""What a check opens: the generation, held while it lasts, and the data that it was made from.

Guarantee: damage to a generation comes with a way out; what a manifest says of its build, and every refusal that it
keeps, has the form that the checks rely on, whoever wrote and signed it; a stranger does not say which folder of ours
is looked at.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from latentcache.errors import CacheDamagedError, SourceNotFoundError
from latentcache.store.generation import Generation, unpack_memo
from latentcache.store.layout import CacheLayout
from latentcache.store.pins import pinned
from latentcache.store.publication import contradictions
from latentcache.store.token_generation import AnyGeneration, TokenGeneration
from latentcache.verify.selection import Depth, Limits
from latentcache.verify.untrusted import check_foreign

_Opened = TypeVar("_Opened", Generation, TokenGeneration)


def limits_of(layout: CacheLayout, depth: Depth) -> Limits | None:
    """What the process may use that reads a stranger's cache, after a look at its outside; None for one of ours.

    Raises:
        CacheDamagedError: As for :func:`~latentcache.verify.untrusted.check_foreign`.
    """
    return (depth.limits or check_foreign(layout)) if depth.untrusted else None


def open_held(cache: Path, load: Callable[[Path, int | None], _Opened]) -> _Opened:
    """The current generation; damage to it comes with a way out, because a build does not get past it either.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version, or of another kind.
        CacheDamagedError: The manifest or a column is damaged.
    """
    try:
        generation = pinned(cache, load)
        with contradictions(CacheLayout(cache).generation(generation.number)):
            _check_told(generation)
        return generation
    except CacheDamagedError as error:
        if error.fix == error.default_fix:
            current = shlex.quote(str(cache / "CURRENT"))
            error.fix = f"rm {current}, then the `latentcache build` command that made the cache: entries are kept"
        raise


def find_data(cache: Path, generation: AnyGeneration, depth: Depth, data: Path | None = None) -> Path | None:
    """The data that was named, or that was recorded, or where it would be had cache and data moved together.

    Args:
        cache: The cache folder.
        generation: What was built.
        depth: Of a stranger's cache nothing that it records is looked at: then None, where nothing was named.
        data: What was named.

    Raises:
        SourceNotFoundError: It is not there.
    """
    if data is not None or depth.untrusted:
        return data
    source = generation.manifest["source"]
    places = [Path(source["root"]), Path(cache, source["relative"])]
    of_files = isinstance(generation, TokenGeneration)
    for place in places:
        if place.is_dir() or (of_files and place.exists()):
            return place
    what = "the data" if of_files else "the data folder"
    raise SourceNotFoundError(
        f"{what} of this cache is gone: {places[0]}",
        where=str(places[0]),
        why="nothing is there" if places[1].resolve() == places[0] else f"it is not at {places[1].resolve()} either",
        fix=f"say where it is: latentcache verify {shlex.quote(str(cache))} --data DATA",
    )


def _check_told(generation: AnyGeneration) -> None:
    """Refuse a manifest or a list of another form than ours: a signature says that it is whole, not whose it is.

    Raises:
        KeyError, TypeError, ValueError: As said.
    """
    source, made = generation.manifest["source"], generation.manifest["provenance"]
    texts = [source["root"], source["relative"]]
    objects: list[Any] = [made, made.get("libraries", {}), *generation.refused, *generation.notes]
    if isinstance(generation, TokenGeneration):
        objects += [source["options"], source["listing"]]
        texts += [source["listing"]["hash"], made["tokenizer"], source["options"].get("share", "")]
        _ = source["listing"]["racy"]
    for item in (*generation.refused, *generation.notes):
        texts += [item["name"], item["cause"]]
        bytes.fromhex(item.get("content", ""))
        if item.get("stat"):
            unpack_memo(item["stat"])
    if not all(isinstance(one, str) and "\0" not in one for one in texts):
        raise TypeError(f"a text is none: {[one for one in texts if not isinstance(one, str)][:3]}")
    if not all(isinstance(one, Mapping) for one in objects):
        raise TypeError("something is no JSON object")
