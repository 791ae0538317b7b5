"""The recipe that follows from what was asked for, from the model and from the cache as it is.

Decides how settings that were not said, or ``auto``, are resolved: an existing cache keeps what it holds, so that
the same command on another machine, or with another torch, or without its flags, does not encode everything
again; a new cache gets the best this machine can do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentcache.encoders.describe import ModelDescription, describe_model
from latentcache.encoders.protocol import Precision
from latentcache.errors import RecipeError
from latentcache.pipeline.resize import resample_self_test
from latentcache.pipeline.settings import BuildSettings, RecipeSettings
from latentcache.recipe import EncoderSpec, GeometrySettings, PixelProfile, Recipe

#: Side lengths are multiples of this many pixels unless the model asks for more: what UNets want at f8.
DEFAULT_STEP = 64
DEFAULT_RESOLUTION = 512
DEFAULT_MODEL = "demo"
_MAKE_RECIPE = "write one with `latentcache info CACHE --json > recipe.json`"


def resolve_recipe(
    settings: RecipeSettings,
    cached: Recipe | None,
    *,
    cached_model: str | None,
    has_cuda: bool,
    cached_config: str | None = None,
    resample_works: Callable[[], bool] | None = None,
    auto_compute: Callable[[ModelDescription], str] | None = None,
) -> tuple[Recipe, ModelDescription]:
    """The recipe a build follows, and the model behind it.

    Args:
        settings: What was asked for.
        cached: The recipe of the cache as it is; what was not asked for follows it.
        cached_model: The model that ``cached`` was made with, as it was named then.
        cached_config: The configuration file it was made with, for a lone weights file.
        has_cuda: Whether the encoder will run on a CUDA device.
        resample_works: Says whether torch's resize can be used; asked of this process where it is not given.
        auto_compute: Says in which precision a new cache is computed on CUDA, where none was named; it may load
            the model. Without it the configuration alone decides.

    Raises:
        RecipeError: The settings leave no bucket.
        EncoderError: The model cannot be used.
        DeviceError: The device failed while the precision was looked for.
    """
    description = describe_model(
        settings.model or cached_model or DEFAULT_MODEL,
        compute_dtype=settings.compute_dtype or "auto",
        storage_dtype=settings.storage_dtype or (cached.encoder.storage_dtype if cached else "float16"),
        posterior=settings.latents or (cached.encoder.posterior if cached else "mode"),
        tiling=_tiling(settings, cached),
        has_cuda=has_cuda,
        config=settings.model_config or (cached_config if settings.model is None else None),
    )
    spec = description.spec
    if settings.compute_dtype in (None, "auto"):
        if cached is not None and _same_weights(spec, cached.encoder):
            spec = replace(spec, compute_dtype=cached.encoder.compute_dtype)
        elif has_cuda and description.kind == "diffusers" and auto_compute is not None:
            spec = replace(spec, compute_dtype=auto_compute(description))
        description = replace(description, spec=spec)
    resample = cached.pixels.resample if cached else _best_resample(description, resample_works or resample_self_test)
    recipe = Recipe(
        geometry=_geometry(settings, cached, spec.multiple),
        pixels=_overlay(settings, cached.pixels if cached else PixelProfile(resample=resample)),
        encoder=spec,
    )
    recipe.geometry.tables()
    return recipe, description


def found_precision(
    settings: BuildSettings, ask: Callable[[ModelDescription, bool], Precision], warn: Callable[[str], None]
) -> Callable[[ModelDescription], str]:
    """How a build finds the precision of a new cache on CUDA: it has a worker probe the first device.

    Args:
        settings: Of the build.
        ask: Has a model probed, with its convolutions folded or not.
        warn: Told why it is not float16.
    """

    def find(description: ModelDescription) -> str:
        found = ask(description, settings.fold)
        if found.why:
            warn(f"computing in {found.compute_dtype}: {found.why}")
        return found.compute_dtype

    return find


def requested_recipe(settings: RecipeSettings, cached: Recipe) -> Recipe:
    """``cached`` with everything replaced that was said: what a ``build`` with these settings would ask for.

    The model is looked at only where one was named, so a check needs no model at hand.

    Raises:
        RecipeError: The settings leave no bucket.
        EncoderError: The model cannot be used.
    """
    if settings.model is not None:
        return resolve_recipe(settings, cached, cached_model=None, has_cuda=False)[0]
    said: dict[str, Any] = {"storage_dtype": settings.storage_dtype, "compute_dtype": settings.compute_dtype}
    said |= {"posterior": settings.latents, "tiling": settings.tiling}
    encoder = replace(cached.encoder, **_said(said))
    geometry = _geometry(settings, cached, encoder.multiple)
    recipe = Recipe(geometry=geometry, pixels=_overlay(settings, cached.pixels), encoder=encoder)
    recipe.geometry.tables()
    return recipe


def read_recipe(file: Path) -> Recipe:
    """A recipe from a file: the object itself, or whatever has it under ``recipe`` (``info --json``, a manifest).

    Raises:
        RecipeError: The file cannot be read, or holds no recipe.
    """
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(
            f"the recipe cannot be read: {file}", where=str(file), why=str(error), fix=_MAKE_RECIPE
        ) from error
    parts = found.get("recipe", found) if isinstance(found, dict) else None
    try:
        recipe = Recipe.from_json(parts if isinstance(parts, dict) else {})
        recipe.geometry.tables()
    except RecipeError as error:
        raise RecipeError(
            f"there is no recipe in {file}", where=str(file), why=error.why or error.what, fix=_MAKE_RECIPE
        ) from error
    return recipe


def _geometry(settings: RecipeSettings, cached: Recipe | None, model_multiple: int) -> GeometrySettings:
    base = cached.geometry if cached else GeometrySettings(resolutions=(DEFAULT_RESOLUTION,))
    if settings.resolutions:
        base = replace(base, resolutions=settings.resolutions, buckets=())
    if settings.buckets:
        base = replace(base, resolutions=(), buckets=settings.buckets)
    step = settings.bucket_step if settings.bucket_step is not None else _step(settings, cached, model_multiple)
    if step < 1:
        raise RecipeError(f"--bucket-step {step} is below 1", fix=f"--bucket-step {DEFAULT_STEP}")
    sides = {name: getattr(settings, name) for name in ("min_side", "max_side", "flip")}
    said = {name: value for name, value in sides.items() if value is not None}
    return replace(base, multiple=math.lcm(step, model_multiple), **said)


def _step(settings: RecipeSettings, cached: Recipe | None, model_multiple: int) -> int:
    """Grid of the sides where none was said: a list of buckets is its own grid, anything else follows the cache."""
    if settings.buckets:
        return model_multiple
    if cached is None or (settings.resolutions and cached.geometry.buckets):
        return DEFAULT_STEP
    return cached.geometry.multiple


def _best_resample(description: ModelDescription, works: Callable[[], bool]) -> str:
    """Torch's resize is 4 times cheaper than Pillow's, but importing torch for a numpy encoder is not."""
    return "lanczos-u8" if description.kind == "diffusers" and works() else "lanczos-pil"


def _overlay(settings: RecipeSettings, profile: PixelProfile) -> PixelProfile:
    said = {"icc": settings.icc, "alpha": settings.alpha and settings.alpha.lower(), "resample": settings.resample}
    return replace(profile, **_said(said))


def _said(values: dict[str, Any]) -> dict[str, Any]:
    """Without what was not said, or left to ``auto``."""
    return {name: value for name, value in values.items() if value not in (None, "auto")}


def _tiling(settings: RecipeSettings, cached: Recipe | None) -> bool:
    """As asked for. A cache keeps its tiles, but another model does not inherit them: it may have none."""
    if settings.tiling is not None:
        return settings.tiling
    return cached is not None and cached.encoder.tiling and settings.model is None


def _same_weights(asked: EncoderSpec, cached: EncoderSpec) -> bool:
    return (asked.family, asked.fingerprint, asked.config) == (cached.family, cached.fingerprint, cached.config)
