"""Describe a model without loading it: its spec, its files, its precision; and the recipe of latents made with it.

Identity: the fingerprint of the encoder half and the hash of the configuration fields that ``encode`` uses.
Guarantee: the class comes from ``config.json``, never from a name. Every reason that makes a model unusable and that
its files show is an error here, before torch is imported. For people, latents become images again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders import files
from latentcache.encoders.devices import installed, precision
from latentcache.encoders.vae import builtin, families
from latentcache.errors import EncoderError, LatentcacheError, UnsupportedModelError, UsageError
from latentcache.fields.latents import (
    EncoderSpec,
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
#: Of equal encoders these are equal.
_IDENTITY = ("family", "fingerprint", "config")
_CAN_RESAMPLE = "latentcache.images.resize:resample_self_test"
Frames = list[NDArray[np.uint8]]
"""Images (H, W, 3): one, or those of a clip."""


class ModelDescription(Value):
    """Everything that opens an encoder, and the names of its results."""

    label: str
    """The model, as the user called it."""
    spec: EncoderSpec
    weights: tuple[str, ...] = ()
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
    memo: Mapping[str, Any] | None = None
    """Stats of the weights and their fingerprint; see ``files.fingerprint_memo``."""

    @property
    def needs_torch(self) -> bool:
        """True for every real model."""
        return bool(self.config_path)


def describe(settings: LatentsSettings, context: DescribeContext) -> Described:
    """Describe latents, or control images, which are as the latents of the same build.

    Settings that were not given follow the cache, so another machine, another torch or missing flags do not encode
    everything again. A new cache gets the best of this machine.
    """
    if context.followed is not None:
        _check_followed(settings, context.followed)
        return context.followed
    settings, trainer = settings.with_trainer()
    before = _cached_recipe(context)
    description = describe_model(settings, context)
    profile = before.pixels if before else PixelProfile(resample=_best_resample(settings, description, context))
    settings, origin = _with_resolution(settings, description, context)
    recipe = _recipe(settings, before, description.spec, profile, description.frame_step)
    sizes = recipe.geometry.resolutions
    needs_torch = description.needs_torch
    if needs_torch and description.resolution not in (0, *sizes):
        origin += f"; the model is trained at {description.resolution}"
    is_lone_file = needs_torch and files.expanded(description.label).is_file()
    return Described(
        recipe=recipe,
        label=description.label,
        producer={name: getattr(description, name) for name in ("label", "delay_ms", "weights", "config_path")},
        provenance={
            "model": files.recorded_name(description.label) if needs_torch else description.label,
            "model_config": files.recorded_name(description.config_path) if is_lone_file else None,
            "revision": description.revision,
            "asked": {name: list(values) for name, values in context.asked.items()},
            "weights": description.memo,
            "libraries": installed(_LIBRARIES),
            "decoders": installed((*_DECODERS, *("av",) * (recipe.geometry.clips is not None))),
        },
        notes=tuple(_notes(settings, description, recipe, context)),
        chosen=({"resolution": f"{', '.join(map(str, sizes))} ({origin})"} if sizes else {})
        | ({"trainer": trainer} if trainer else {}),
        needs_torch=needs_torch or recipe.pixels.resample == "lanczos-u8",
        demo=description.label == "demo",
    )


def describe_mask(settings: LatentsSettings, context: DescribeContext) -> Described:
    """Describe masks, which are as the latents of the same build; without them as settings and cache say."""
    if context.followed is None and isinstance(context.recipe, LatentsRecipe) and settings.model is None:
        latents = Described(recipe=_of_cache(settings, context.recipe), label="")
    else:
        latents = describe(settings, replace(context, recipe=None, provenance={}))
    assert isinstance(latents.recipe, LatentsRecipe)
    decoders = {"decoders": installed(_DECODERS)}
    chosen = {} if context.followed else latents.chosen
    return Described(recipe=mask_recipe(latents.recipe), label="mask", provenance=decoders, chosen=chosen)


def describe_model(settings: LatentsSettings, context: DescribeContext) -> ModelDescription:
    """Describe the model that settings or else the cache name, without loading it.

    A precision that was not given is that of the cache, for equal weights. Else it is float32 off CUDA. On CUDA it is
    float16 (eight times closer to float32 than bfloat16), or bfloat16 if the configuration says ``force_upcast``.
    """
    before = _cached_recipe(context)
    provenance = context.provenance
    old = before.encoder if before else None
    config_path = provenance.get("model_config") if settings.model is None else None
    chosen = followed(settings, model=provenance.get("model"), model_config=config_path)
    if old is not None:
        tiling = old.tiling and settings.model is None  # another model may have no tiles
        chosen = followed(chosen, storage_dtype=old.storage_dtype, latents=old.posterior, tiling=tiling)
    model, posterior = chosen.model or DEFAULT_MODEL, chosen.latents or "mode"
    storage = chosen.storage_dtype or "float16"
    tiling = bool(chosen.tiling)
    if model == DEFAULT_MODEL or files.is_stub(model):
        if tiling:
            raise no_tiling(model)
        return _builtin(model, storage, posterior)
    offline = context.check and settings.model is None
    located = families.locate(model, chosen.model_config, provenance, offline=offline)
    where = str(located.config_path)
    config = located.config
    family = families.family_of(config["_class_name"], where)
    if posterior != "mode" and not family.posterior:
        raise no_posterior(family.name, "it gives one latent for an image and no distribution")
    shape = families.shape_of(family, config, where)
    tensors = families.encoder_tensors(located.weights, ldm=family.ldm)
    memo = files.fingerprint_memo(tensors, provenance.get("weights"))
    spec = EncoderSpec(
        family=config["_class_name"],
        fingerprint=memo["fingerprint"],
        config=families.config_hash(config, tiling=tiling),
        channels=shape.channels,
        factor=shape.factor,
        multiple=shape.multiple,
        storage_dtype=storage,
        posterior=posterior,
        tiling=tiling,
        normalization=families.normalization_of(family, config, tensors, where),
    )
    is_same = old is not None and all(getattr(old, name) == getattr(spec, name) for name in _IDENTITY)
    half = "bfloat16" if config.get("force_upcast") else "float16"
    cached = old.compute_dtype if old is not None and (is_same or context.check) else ""
    compute = precision(settings.compute_dtype, cached, half, context)
    cells, part = families.denoiser_size(located.config_path)
    return ModelDescription(
        label=model,
        spec=replace(spec, compute_dtype=compute),
        resolution=cells * shape.factor or family.resolutions.get(spec.normalization.scale, 0),
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
    return context.recipe if isinstance(context.recipe, LatentsRecipe) else None


def _builtin(model: str, storage: str, posterior: str) -> ModelDescription:
    """Describe ``demo`` or ``stub[:delay_ms=N]``."""
    spec = builtin.builtin_spec(model.partition(":")[0], storage, posterior)
    return ModelDescription(
        label=model,
        spec=spec,
        delay_ms=0 if model == DEFAULT_MODEL else files.stub_delay(model, "model"),
        frame_step=builtin.FRAME_STEP,
        resolution=512,
        resolution_from=f"default of {spec.family}",
    )


def _with_resolution(
    settings: LatentsSettings, description: ModelDescription, context: DescribeContext
) -> tuple[LatentsSettings, str]:
    """Complete settings by a resolution, and say where it is from; raises UsageError if none is known.

    What DATA's configuration asks for counts as given, until an option replaces it or the configuration changes.
    """
    before = _cached_recipe(context)
    asked = list(context.asked.get("resolutions", ()))
    if settings.resolutions or settings.buckets:
        return settings, "as given"
    if asked and (before is None or asked != context.provenance.get("asked", {}).get("resolutions")):
        if len(asked) > 1:
            raise UsageError(
                f"the configuration in DATA asks for several resolutions: {', '.join(map(str, asked))}",
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


def _notes(
    settings: LatentsSettings, description: ModelDescription, recipe: LatentsRecipe, context: DescribeContext
) -> Iterator[str]:
    """Tell the user what the recipe means for this data and machine."""
    before = _cached_recipe(context)
    step = recipe.geometry.multiple
    if before is None or before.geometry != recipe.geometry:
        for side in recipe.geometry.resolutions:
            if isinstance(side, int) and side % step:
                smaller = side // step * step
                yield f"resolution {side} gives squares of {smaller} pixels: sides are multiples of {step}"
    if not description.needs_torch and context.device.startswith(("cuda", "mps", "xpu")):
        yield f"--device={context.device} is not used: this encoder runs on the CPU"
    is_chosen = before is None and context.ask is not None and settings.resample in (None, "auto")
    if is_chosen and description.needs_torch and recipe.pixels.resample == "lanczos-pil":
        yield "Pillow resizes the images; with torch 2.13 or newer a new cache takes a third of the CPU time"
    family = description.spec.family
    if description.needs_torch and description.spec.normalization.kind == "none":
        yield f"the configuration of {family} has no scaling factor: batches have latents as its encode gives them"


def _of_cache(settings: LatentsSettings, before: LatentsRecipe) -> LatentsRecipe:
    """Change the recipe of a cache by settings; no model is looked at."""
    options: dict[str, Any] = {"storage_dtype": settings.storage_dtype, "compute_dtype": settings.compute_dtype}
    options |= {"posterior": settings.latents, "tiling": settings.tiling}
    changes = {name: value for name, value in options.items() if value not in (None, "auto")}
    step = before.geometry.clips.step if before.geometry.clips else 1
    return _recipe(settings, before, replace(before.encoder, **changes), before.pixels, step)


def _check_followed(settings: LatentsSettings, latents: Described) -> None:
    """Raise an error if settings of masks or control images differ from those of the latents that they follow."""
    recipe = latents.recipe
    model = settings.model
    assert isinstance(recipe, LatentsRecipe)
    models = (latents.label, latents.provenance.get("model"))
    is_same = model is None or model in models or files.recorded_name(model) in models
    if is_same and _of_cache(replace(settings, compute_dtype=None), recipe) == recipe:
        return
    differing = next(option.name for option in fields(settings) if getattr(settings, option.name) is not None)
    raise UsageError(
        "the latents have other settings",
        argument=differing,
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
    """Choose torch's resize, 4 times cheaper than Pillow's, unless torch would be imported for it alone."""
    if settings.resample not in (None, "auto") or not description.needs_torch or context.ask is None:
        return PixelProfile().resample
    return "lanczos-u8" if context.ask(_CAN_RESAMPLE) else "lanczos-pil"


# latents back to images


def decoder(recipe: LatentsRecipe, provenance: Mapping[str, Any]) -> Callable[[NDArray[np.float32]], Frames]:
    """Return a function from raw latents (C, F, h, w) to images, by the model that the cache records.

    The whole model is loaded on the CPU, and nothing is downloaded.

    Raises:
        LatentcacheError: The model is not here, not the one that made the latents, or no folder of diffusers.
    """
    described = describe(LatentsSettings(), DescribeContext(recipe=recipe, provenance=provenance, check=True))
    assert isinstance(described.recipe, LatentsRecipe)
    if described.recipe.encoder.fingerprint != recipe.encoder.fingerprint:
        raise EncoderError(f"{described.label} is not the model that made these latents", fix="build the cache again")
    description = ModelDescription(**described.producer, spec=recipe.encoder)
    if not description.needs_torch:  # its first channels are means of red, green and blue
        return lambda latent: [_pixels(frame.transpose(1, 2, 0)) for frame in latent[:3].swapaxes(0, 1)]
    import diffusers
    import torch

    folder = Path(description.config_path).parent
    try:
        model_class: Any = getattr(diffusers, recipe.encoder.family)
        model = model_class.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    except (OSError, ValueError) as error:
        fix = "decoding needs the folder of a diffusers model"
        raise EncoderError(f"{folder} cannot be loaded", why=str(error)[:200], fix=fix) from error

    takes_clips = any(weight.ndim == 5 for weight in model.parameters())

    @torch.inference_mode()
    def decode(latent: NDArray[np.float32]) -> Frames:
        values = torch.from_numpy(np.ascontiguousarray(latent))[None]
        try:
            decoded = model.decode(values if takes_clips else values[:, :, 0]).sample[0].float().numpy()
        except (RuntimeError, MemoryError) as error:
            raise LatentcacheError("the model cannot decode it", why=str(error)[:200], fix="--decode 0") from error
        frames = decoded.swapaxes(0, 1) if decoded.ndim == 4 else decoded[None]
        return [_pixels(frame.transpose(1, 2, 0)) for frame in frames]

    return decode


def _pixels(values: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """(H, W, 3) from -1 to 1 as bytes."""
    return np.asarray(np.clip((values + 1) * 127.5, 0, 255).round().astype(np.uint8))
