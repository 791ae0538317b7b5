"""Describe a model without loading it: its spec, its files, its precision; and the recipe of latents made with it.

Identity: the fingerprint of the encoder half and the hash of the configuration fields that ``encode`` uses.
Guarantee: the class comes from ``config.json``, never from a name. Every reason that makes a model unusable and that
its files show is an error here, before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from latentcache.encoders.hub import is_stub, stub_delay
from latentcache.encoders.vae import builtin
from latentcache.encoders.vae.families import config_hash, family_of, normalization_of, shape_of
from latentcache.encoders.vae.locate import denoiser_size, encoder_tensors, locate
from latentcache.encoders.versions import installed, on_cuda
from latentcache.encoders.weights import fingerprint_memo, read_headers
from latentcache.errors import UnsupportedModelError, UsageError
from latentcache.fields.latents import (
    EncoderSpec,
    GeometrySettings,
    LatentsRecipe,
    LatentsSettings,
    PixelProfile,
    geometry_of,
    pixels_of,
)
from latentcache.fields.paired import mask_recipe
from latentcache.fields.protocol import DescribeContext, Described
from latentcache.fields.settings import followed
from latentcache.value import Value

DEFAULT_MODEL = "demo"
_LIBRARIES = ("torch", "diffusers", "numpy", "pillow", "simplejpeg")
_DECODERS = ("pillow", "simplejpeg")
_HAS_BFLOAT16 = "latentcache.encoders.vae.encoder:has_bfloat16"
_CAN_RESAMPLE = "latentcache.images.resize:resample_self_test"


class ModelDescription(Value):
    """Everything that opens an encoder, and the names of its results."""

    label: str
    """The model, as the user called it."""
    spec: EncoderSpec
    weights: tuple[str, ...] = ()
    """Paths, as in :attr:`config_path`."""
    config_path: str = ""
    delay_ms: int = 0
    """Pause per image of the stub; not part of its identity."""
    revision: str = ""
    """Commit of a hub repository."""
    frame_step: int = 0
    """Frames per latent frame: a clip has ``k * frame_step + 1`` frames. 0: the model takes images only."""
    resolution: int = 0
    """Side in pixels of the images that the model is trained on; 0: not known."""
    resolution_from: str = ""
    """Where it is from."""
    memo: Mapping[str, Any] | None = None
    """Stats of the weights and their fingerprint; see ``weights.fingerprint_memo``."""

    @property
    def needs_torch(self) -> bool:
        """True for every real model."""
        return bool(self.config_path)


def describe(settings: LatentsSettings, context: DescribeContext) -> Described:
    """The recipe that settings, model and cache give. Settings that were not given follow the cache.

    An existing cache keeps its choices, so another machine, another torch or missing flags do not encode everything
    again. A new cache gets the best of this machine. Control images are as the latents that the same build makes.
    """
    if context.followed is not None:
        _check_followed(settings, context.followed)
        return context.followed
    settings, trainer = settings.with_trainer()
    before, description = _cached_recipe(context), _described(settings, context)
    spec, needs_torch = description.spec, description.needs_torch
    profile = before.pixels if before else PixelProfile(resample=_best_resample(settings, description, context))
    settings, origin = _with_resolution(settings, description, context)
    recipe = _recipe(settings, before, spec, profile, description.frame_step)
    sizes, notes = recipe.geometry.resolutions, _off_grid(recipe.geometry, before)
    if needs_torch and description.resolution not in (0, *sizes):
        origin += f"; the model is trained at {description.resolution}"
    if not needs_torch and context.device.startswith(("cuda", "mps", "xpu")):
        notes += [f"--device={context.device} is not used: this encoder runs on the CPU"]
    chosen_here = before is None and needs_torch and context.ask is not None and settings.resample in (None, "auto")
    if chosen_here and profile.resample == "lanczos-pil":
        notes += ["Pillow resizes the images; with torch 2.13 or newer a new cache takes a third of the CPU time"]
    if needs_torch and spec.normalization.kind == "none":
        notes += [
            f"the configuration of {spec.family} has no scaling factor: batches have latents as its encode gives them"
        ]
    path = Path(description.label).expanduser()
    here = needs_torch and path.exists()
    lone = here and path.is_file()
    return Described(
        recipe=recipe,
        label=description.label,
        producer={name: getattr(description, name) for name in ("label", "delay_ms", "weights", "config_path")},
        provenance={  # the model so that a later build finds it again
            "model": str(path.resolve()) if here else description.label,
            "model_config": str(Path(description.config_path).resolve()) if lone else None,
            "revision": description.revision,
            "asked": {name: list(values) for name, values in context.asked.items()},
            "weights": description.memo,
            "libraries": installed(_LIBRARIES),
            "decoders": installed((*_DECODERS, *("av",) * (recipe.geometry.clips is not None))),
        },
        notes=tuple(notes),
        chosen=({"resolution": f"{', '.join(map(str, sizes))} ({origin})"} if sizes else {})
        | ({"trainer": trainer} if trainer else {}),
        needs_torch=needs_torch or recipe.pixels.resample == "lanczos-u8",
        demo=description.label == "demo",
    )


def describe_mask(settings: LatentsSettings, context: DescribeContext) -> Described:
    """The recipe of masks beside latents; alone it follows the settings and the cache."""
    if context.followed is None and isinstance(context.recipe, LatentsRecipe) and settings.model is None:
        found = Described(recipe=_of_cache(settings, context.recipe), label="")
    else:
        found = describe(settings, replace(context, recipe=None, provenance={}))
    assert isinstance(found.recipe, LatentsRecipe)
    decoders, chosen = {"decoders": installed(_DECODERS)}, {} if context.followed else found.chosen
    return Described(recipe=mask_recipe(found.recipe), label="mask", provenance=decoders, chosen=chosen)


def describe_model(
    settings: LatentsSettings,
    *,
    on_cuda: bool = False,
    known: Mapping[str, Any] = MappingProxyType({}),
    offline: bool = False,
) -> ModelDescription:
    """Describe the model that settings name, without loading it.

    A precision that was not given is float32 off CUDA. On CUDA float16 (eight times closer to float32 than bfloat16),
    bfloat16 if the configuration says ``force_upcast``. ``known``: provenance of an earlier build.
    ``offline``: nothing is downloaded.
    """
    model, posterior = settings.model or DEFAULT_MODEL, settings.latents or "mode"
    storage, tiling = settings.storage_dtype or "float16", bool(settings.tiling)
    if model == DEFAULT_MODEL or is_stub(model):
        if tiling:
            raise no_tiling(model)
        delay = 0 if model == DEFAULT_MODEL else stub_delay(model, "model")
        spec = builtin.builtin_spec(model.partition(":")[0], storage, posterior)
        size: dict[str, Any] = {"resolution": 512, "resolution_from": f"default of {spec.family}"}
        return ModelDescription(label=model, spec=spec, delay_ms=delay, frame_step=builtin.FRAME_STEP, **size)
    revision = str(known.get("revision", "")) if known.get("model") == model else ""
    located = locate(model, settings.model_config, revision=revision, offline=offline)
    where, config = str(located.config_path), located.config
    compute = settings.compute_dtype or "auto"
    if compute == "auto":
        half = "bfloat16" if config.get("force_upcast") else "float16"
        compute = half if on_cuda else "float32"
    family = family_of(config["_class_name"], where)
    if posterior != "mode" and not family.posterior:
        raise no_posterior(family.name, "it gives one latent for an image and no distribution")
    shape = shape_of(family, config, where)
    everything = read_headers(located.weights)
    tensors = encoder_tensors(everything, ldm=family.ldm)
    if not any(name.startswith("encoder.") for name in tensors):
        raise UnsupportedModelError(
            f"{located.weights[0].name} has no encoder",
            where=str(located.weights[0]),
            why=f"none of its tensors is called encoder.*; the first is {next(iter(everything), 'none')}",
            fix="give the weights of the whole VAE, not of its decoder, a transformer or a LoRA",
        )
    normalization = normalization_of(family, config, tensors, where)
    memo = fingerprint_memo(tensors, known.get("weights"))
    spec = EncoderSpec(
        family=config["_class_name"],
        fingerprint=memo["fingerprint"],
        config=config_hash(config, tiling=tiling),
        channels=shape.channels,
        factor=shape.factor,
        multiple=shape.multiple,
        compute_dtype=compute,
        storage_dtype=storage,
        posterior=posterior,
        tiling=tiling,
        normalization=normalization,
    )
    cells, part = denoiser_size(located.config_path)
    return ModelDescription(
        label=model,
        spec=spec,
        resolution=cells * shape.factor or family.resolutions.get(normalization.scale, 0),
        resolution_from=f"from the model's {part}" if cells else "usual for this VAE",
        weights=tuple(map(str, located.weights)),
        config_path=where,
        revision=located.revision,
        frame_step=shape.frame_step,
        memo=memo,
    )


def no_posterior(family: str, why: str) -> UnsupportedModelError:
    """The error for an encoder without a posterior."""
    return UnsupportedModelError(
        f"{family} has no posterior",
        argument="latents",
        value="moments",
        why=why,
        fix="--latents=mode, or an autoencoder that has one (AutoencoderKL and its like)",
        slug="no-posterior",
    )


def no_tiling(family: str) -> UnsupportedModelError:
    """The error for an encoder that cannot encode in tiles."""
    return UnsupportedModelError(
        f"{family} cannot encode in tiles",
        argument="tiling",
        why="its class has no tiled encode",
        fix="leave it out; a batch that does not fit is halved, down to one image",
        slug="no-tiling",
    )


def _cached_recipe(context: DescribeContext) -> LatentsRecipe | None:
    """The recipe of the cache."""
    return context.recipe if isinstance(context.recipe, LatentsRecipe) else None


def _described(settings: LatentsSettings, context: DescribeContext) -> ModelDescription:
    """The model, with the precision of the cache or the best one of this machine."""
    before, provenance = _cached_recipe(context), context.provenance
    old = before.encoder if before else None
    config = provenance.get("model_config") if settings.model is None else None
    chosen = followed(settings, model=provenance.get("model"), model_config=config)
    if old is not None:
        tiling = old.tiling and settings.model is None  # another model may have no tiles
        chosen = followed(chosen, storage_dtype=old.storage_dtype, latents=old.posterior, tiling=tiling)
    description = describe_model(
        chosen,
        on_cuda=not context.check and on_cuda(context.device),
        known=provenance,
        offline=context.check and settings.model is None,
    )
    if settings.compute_dtype not in (None, "auto"):
        return description
    compute = description.spec.compute_dtype
    weights = ("family", "fingerprint", "config")
    if old is not None and (
        context.check or all(getattr(description.spec, name) == getattr(old, name) for name in weights)
    ):
        compute = old.compute_dtype
    elif compute == "bfloat16" and context.ask is not None and not context.ask(_HAS_BFLOAT16):
        compute = "float32"
    return replace(description, spec=replace(description.spec, compute_dtype=compute))


def _with_resolution(
    settings: LatentsSettings, description: ModelDescription, context: DescribeContext
) -> tuple[LatentsSettings, str]:
    """Settings with a resolution, and where it is from; raises UsageError if none is known.

    What DATA's configuration asks for counts as given, until an option replaces it or the configuration changes.
    """
    before, asked = _cached_recipe(context), list(context.asked.get("resolutions", ()))
    if settings.resolutions or settings.buckets:
        return settings, "as given"
    if asked and (before is None or asked != context.provenance.get("asked", {}).get("resolutions")):
        if len(asked) > 1:
            each = ", ".join(map(str, asked))
            raise UsageError(
                f"the configuration in DATA asks for several resolutions: {each}",
                why="a cache stores every image at each of its resolutions",
                fix=f"--resolution={asked[-1]}, or build each data set into a cache of its own",
            )
        return replace(settings, resolutions=tuple(asked)), "from the configuration in DATA"
    if before is not None:
        return settings, "as the cache"
    is_video = settings.frames is not None and description.needs_torch
    if is_video or not description.resolution:
        raise UsageError(
            f"no resolution was given, and {description.label} does not say its training size",
            why="video models are trained at many sizes" if is_video else f"{description.spec.family}: unknown size",
            fix="add --resolution=PIXELS, the side of a square of equal area",
        )
    return replace(settings, resolutions=(description.resolution,)), description.resolution_from


def _off_grid(geometry: GeometrySettings, before: LatentsRecipe | None) -> list[str]:
    """Notes on new resolutions whose squares are smaller: sides are multiples of a step."""
    if before is not None and before.geometry == geometry:
        return []
    step = geometry.multiple
    return [
        f"resolution {side} gives squares of {side // step * step} pixels: sides are multiples of {step}"
        for side in geometry.resolutions
        if isinstance(side, int) and side % step
    ]


def _of_cache(settings: LatentsSettings, before: LatentsRecipe) -> LatentsRecipe:
    """The recipe of a cache with the settings that were given; no model is looked at."""
    given: dict[str, Any] = {"storage_dtype": settings.storage_dtype, "compute_dtype": settings.compute_dtype}
    given |= {"posterior": settings.latents, "tiling": settings.tiling}
    changes = {name: value for name, value in given.items() if value not in (None, "auto")}
    step = before.geometry.clips.step if before.geometry.clips else 1
    return _recipe(settings, before, replace(before.encoder, **changes), before.pixels, step)


def _check_followed(settings: LatentsSettings, latents: Described) -> None:
    """Raise an error if settings of masks or control images differ from those of the latents that they follow."""
    recipe, model = latents.recipe, settings.model
    assert isinstance(recipe, LatentsRecipe)
    models = (None, latents.label, latents.provenance.get("model"))
    is_same = model in models or str(Path(model or "").expanduser().resolve()) in models
    if is_same and _of_cache(replace(settings, compute_dtype=None), recipe) == recipe:
        return
    given = [one for one in fields(settings) if getattr(settings, one.name) is not None]
    raise UsageError(
        "the latents have other settings",
        argument=given[0].name,
        why="masks and control images are as the latents that they belong to",
        fix="add latents to the fields, or leave such settings out",
    )


def _recipe(
    settings: LatentsSettings, before: LatentsRecipe | None, encoder: EncoderSpec, profile: PixelProfile, step: int
) -> LatentsRecipe:
    geometry = geometry_of(settings, before, encoder.multiple, step)
    geometry.tables()
    return LatentsRecipe(geometry=geometry, pixels=pixels_of(settings, profile), encoder=encoder)


def _best_resample(settings: LatentsSettings, description: ModelDescription, context: DescribeContext) -> str:
    """Torch's resize is 4 times cheaper than Pillow's, but importing torch for a numpy encoder is not."""
    if settings.resample not in (None, "auto") or not description.needs_torch or context.ask is None:
        return PixelProfile().resample
    return "lanczos-u8" if context.ask(_CAN_RESAMPLE) else "lanczos-pil"
