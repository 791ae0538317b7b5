"""What is looked at before a build starts: places, the cache as it is, free space, this machine's abilities.

Guarantee: everything here refuses in words before a picture is decoded or a model is loaded.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from latentcache.encoders.describe import ModelDescription
from latentcache.errors import (
    CacheDamagedError,
    DiskFullError,
    UsageError,
)
from latentcache.pipeline.before import begun, newest_whole
from latentcache.pipeline.report import BuildPlan
from latentcache.pipeline.resize import resample_self_test
from latentcache.recipe import Recipe
from latentcache.sources.sample import Scan
from latentcache.store.durable import as_store_error
from latentcache.store.generation import Generation, load_generation
from latentcache.store.installed import installed_version
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import format_version, signed

#: Left free on the disk beyond what the plan needs, in bytes.
RESERVE_BYTES = 64 << 20
_DECODERS = ("latentcache", "pillow", "simplejpeg")
_LIBRARIES = ("torch", "diffusers", "numpy", "pillow", "simplejpeg", "lmdb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The cache as a build finds it."""

    generation: Generation | None = None
    recipe: Recipe | None = None
    model: str | None = None
    model_config: str | None = None
    damage: str = ""
    """What is wrong with the current generation, where an older one or none had to stand in for it."""


def check_places(data: Path, cache: Path) -> None:
    """Refuse a cache that would lie inside the data, or in a folder that holds something else.

    Raises:
        UsageError: As said.
        CacheReadOnlyError: The cache folder cannot be looked into.
        CacheDamagedError: A folder is in the place of ``CURRENT``.
    """
    try:
        _check_places(data, cache)
        CacheLayout(cache).check_current()
    except OSError as error:
        raise as_store_error(error, cache) from error


def _check_places(data: Path, cache: Path) -> None:
    inside = cache.resolve()
    if inside == data.resolve() or data.resolve() in inside.parents:
        raise UsageError(
            f"the cache would lie inside the data folder: {cache}",
            where=str(cache),
            why="data folders are only read; a cache in one would be taken for data",
            fix=f"use --out {data.resolve().with_name(data.resolve().name + '.latentcache')}",
        )
    if cache.exists() and not cache.is_dir():
        raise UsageError(f"--out {cache} is a file", where=str(cache), fix="give a folder")
    if cache.is_dir() and not CacheLayout(cache).is_ours() and any(cache.iterdir()):
        raise UsageError(
            f"--out {cache} is no cache and not empty",
            where=str(cache),
            why="a cache is never mixed with other files",
            fix="give an empty or a new folder",
        )


def read_before(layout: CacheLayout) -> Before:
    """What the cache holds already; a build that was killed counts with its recipe.

    Entries are found by key, so a damaged manifest costs nothing but the memory of what was asked for: the newest
    generation that is whole stands in for it.

    Raises:
        CacheFormatError: Written by a newer version.
    """
    unfinished = begun(layout, None, _begun)
    generation, damage = newest_whole(layout, load_generation)
    if generation is None or unfinished is not None:
        return replace(unfinished or Before(), generation=generation, damage=damage)
    made = generation.manifest["provenance"]
    return Before(
        generation=generation,
        recipe=generation.recipe,
        model=str(made["model"]),
        model_config=made.get("model_config"),
        damage=damage,
    )


def check_damage(before: Before, *, model_said: bool) -> None:
    """Refuse to guess a model where the cache cannot say which one it was made with.

    Raises:
        CacheDamagedError: No generation is whole, and no model was named.
    """
    if before.damage and before.recipe is None and not model_said:
        raise CacheDamagedError(
            "the manifest is damaged, so the cache cannot say what it was made with",
            why=before.damage,
            fix="name it: run the build again with --model and the other flags it was made with; nothing is lost",
        )


def marker(recipe: Recipe, description: ModelDescription, samples: int) -> dict[str, Any]:
    """What BUILDING holds while a build runs: what it set out to do."""
    return signed(
        {
            "format": format_version(recipe),
            "recipe": recipe.as_json(),
            "model": model_name(description),
            "model_config": model_config(description),
            "samples": samples,
        }
    )


def remove_unused(layout: CacheLayout) -> None:
    """Take away a cache folder that holds nothing but its lock, which the caller holds."""
    if [path.name for path in layout.root.iterdir()] == [layout.lock.name]:
        layout.lock.unlink()
        layout.root.rmdir()


def model_name(description: ModelDescription) -> str:
    """How a later build finds the model again: a path as an absolute one, anything else as it was said."""
    path = Path(description.label)
    return str(path.resolve()) if description.kind == "diffusers" and path.exists() else description.label


def model_config(description: ModelDescription) -> str | None:
    """The configuration file of a lone weights file; a folder has its own."""
    lone = description.kind == "diffusers" and Path(description.label).is_file()
    return str(description.config_path.resolve()) if lone and description.config_path else None


def check_space(plan: BuildPlan) -> None:
    """Refuse a build that cannot fit.

    Raises:
        DiskFullError: The plan needs more than is free.
    """
    if plan.entries_to_make and plan.bytes_to_write * 11 // 10 + RESERVE_BYTES > plan.free_bytes:
        raise DiskFullError(
            "the disk is too full for this build",
            where=str(plan.cache),
            why=f"the plan needs {plan.bytes_to_write:,} bytes, a tenth more and {RESERVE_BYTES:,} in reserve;"
            f" {plan.free_bytes:,} are free",
            fix="free some space, or give another disk with --out",
        )


def check_resample(recipe: Recipe, works: Callable[[], bool] | None = None) -> None:
    """Refuse a recipe whose resize this machine cannot reproduce.

    Args:
        recipe: What is to be made.
        works: Says whether torch's kernel does; asked of this process where it is not given.

    Raises:
        UsageError: torch here has no uint8 Lanczos, or one that disagrees with Pillow.
    """
    if recipe.pixels.resample == "lanczos-u8" and not (works or resample_self_test)():
        raise UsageError(
            "this machine cannot do the resize of this recipe (lanczos-u8)",
            why="torch has no uint8 Lanczos here, or it disagrees with Pillow in the self-test",
            fix="install torch 2.13 or newer, or use --resample lanczos-pil (encodes everything again)",
        )


def default_threads(workers: int = 1) -> int:
    """Decode threads of each worker: its share of the cores but one; at least two, or one beside other workers."""
    cores = len(os.sched_getaffinity(0))
    return max(cores - 1, 2) if workers == 1 else max(cores // workers - 1, 1)


def source_facts(
    found: Scan,
    description: ModelDescription,
    cache: Path,
    *,
    fold: bool = True,
    noise: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the manifest says of where the entries come from; ``noise`` is that of ``calibrate``."""
    root = found.root.resolve()
    relative = os.path.relpath(root, cache.resolve())
    return {
        "source": {"root": str(root), "relative": relative, "captions": found.caption_source},
        "demo": description.kind == "demo",
        "provenance": {
            **provenance(model_name(description)),
            "model_config": model_config(description),
            "fold": fold,
            **(noise or {}),
        },
    }


def decoders() -> dict[str, str]:
    """Versions of what says whether a file is a picture."""
    return {name: installed_version(name) for name in _DECODERS}


def provenance(model: str, libraries: Sequence[str] = _LIBRARIES) -> dict[str, Any]:
    """Versions of libraries and machine: shown, never part of a recipe."""
    return {
        "model": model,
        "latentcache": installed_version("latentcache"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "libraries": {name: installed_version(name) for name in libraries},
    }


def _begun(marker: Mapping[str, Any]) -> Before:
    """Recipe and model of a build that has not ended."""
    recipe = Recipe.from_json(marker["recipe"])
    return Before(recipe=recipe, model=str(marker["model"]), model_config=marker.get("model_config"))
