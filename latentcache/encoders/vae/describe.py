"""What a model is, found out without loading it: its spec, its files, its precision.

Decides identity: the fingerprint of the encoder half and the hash of the configuration fields that ``encode``
uses. Guarantee: the class comes from ``config.json``, never from a name; everything that makes a model
unusable and can be seen in its files is said here, before torch is imported. Cost: reading the encoder's
weights once at disk speed (a 335 MB VAE: a fraction of a second).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders import demo, stub, weights
from latentcache.encoders.facts import config_hash, facts_of, normalisation_of
from latentcache.encoders.families import Family, family_of
from latentcache.encoders.layouts import encoder_names
from latentcache.encoders.locate import Located, locate
from latentcache.encoders.posterior import require_posterior
from latentcache.encoders.storage import STORAGE_TYPES
from latentcache.errors import EncoderError, UnsupportedModelError, UsageError
from latentcache.recipe import POSTERIORS, EncoderSpec, Normalisation

#: Compute types that can be asked for.
COMPUTE_TYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """All that is needed to open an encoder, and to name what it makes."""

    label: str
    """What the user called it."""
    kind: Literal["demo", "stub", "diffusers"]
    spec: EncoderSpec
    weights: tuple[Path, ...] = ()
    config_path: Path | None = None
    force_upcast: bool = False
    """Whether the configuration warns of overflow in float16."""
    delay_ms: int = 0
    """Pause per picture of the stub; not part of its identity."""


def describe_model(
    model: str,
    *,
    compute_dtype: str = "auto",
    storage_dtype: str = "float16",
    posterior: str = "mode",
    tiling: bool = False,
    device: str = "auto",
    config: str | None = None,
    has_cuda: bool = False,
) -> ModelDescription:
    """Describe a model without loading it.

    Args:
        model: ``demo``; ``stub`` or ``stub:delay_ms=N``; a VAE or pipeline folder; a ``.safetensors`` file; a hub id.
        compute_dtype: ``auto`` or one of float32, float16, bfloat16. ``auto`` is float32 off CUDA; on CUDA
            float16 (eight times closer to float32 than bfloat16), bfloat16 where the configuration says force_upcast.
        storage_dtype: float16, bfloat16 or float32.
        posterior: What is stored of it: mode, sample or moments.
        tiling: Encode large pictures in tiles, as the class itself does. Other latents than of whole pictures.
        device: ``auto``, ``cpu`` or a torch device.
        config: ``config.json`` for weights that have none beside them.
        has_cuda: Whether ``device="auto"`` will find a CUDA device (:func:`cuda_available`).

    Raises:
        UsageError: An unknown type or stub option.
        ModelNotFoundError: No such model.
        UnsupportedModelError: No picture encoder, or one without what was asked for, or a damaged file.
        EncoderError: A lone file without configuration, or a tensor that is not there.
    """
    _check_choice("--storage-dtype", storage_dtype, tuple(STORAGE_TYPES))
    _check_choice("--compute-dtype", compute_dtype, COMPUTE_TYPES)
    _check_choice("--latents", posterior, POSTERIORS)
    if tiling and (model == "demo" or model.partition(":")[0] == "stub"):
        raise no_tiling(model)
    if model == "demo":
        require_posterior("demo", posterior, "it computes its latents and has nothing to draw from")
        return ModelDescription(label=model, kind="demo", spec=demo.demo_spec(storage_dtype))
    if model.partition(":")[0] == "stub":
        return ModelDescription(
            label=model, kind="stub", spec=stub.stub_spec(storage_dtype, posterior), delay_ms=_stub_delay(model)
        )
    located = locate(model, config)
    force_upcast = bool(located.config.get("force_upcast", False))
    compute = _compute_type(compute_dtype, on_cuda=_on_cuda(device, has_cuda), force_upcast=force_upcast)
    return ModelDescription(
        label=model,
        kind="diffusers",
        spec=_spec(located, compute_dtype=compute, storage_dtype=storage_dtype, posterior=posterior, tiling=tiling),
        weights=located.weights,
        config_path=located.config_path,
        force_upcast=force_upcast,
    )


def cuda_available() -> bool:
    """Whether this machine seems to have a usable CUDA device, without asking torch. Never raises."""
    if Path("/dev/nvidia0").exists():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False


def no_tiling(family: str) -> UnsupportedModelError:
    """The error for an encoder that cannot encode in tiles."""
    return UnsupportedModelError(
        f"{family} cannot encode in tiles",
        where="--tiling",
        why="its class has no tiled encode",
        fix="leave --tiling out; a batch that does not fit is halved, down to one picture",
        slug="no-tiling",
    )


def _spec(located: Located, *, compute_dtype: str, storage_dtype: str, posterior: str, tiling: bool) -> EncoderSpec:
    where = str(located.config_path)
    class_name = located.config["_class_name"]
    family = family_of(class_name, where)
    if family.output in ("latent", "latents"):
        require_posterior(class_name, posterior, "it gives one latent for a picture and no distribution")
    if tiling and not family.tiles:
        raise no_tiling(class_name)
    facts = facts_of(family, located.config, where)
    tensors = weights.read_headers(located.weights)
    names = _encoder_half(family, tensors, located)
    normalisation = _normalisation(family, located, names, tensors)
    _check_length(normalisation, facts.channels, where)
    return EncoderSpec(
        family=class_name,
        fingerprint=weights.fingerprint(names, tensors),
        config=config_hash(family, located.config, tiling=tiling),
        channels=facts.channels,
        factor=facts.factor,
        multiple=facts.multiple,
        compute_dtype=compute_dtype,
        storage_dtype=storage_dtype,
        posterior=posterior,
        tiling=tiling,
        normalisation=normalisation,
        generic=family.generic,
    )


def _encoder_half(family: Family, tensors: Mapping[str, weights.TensorInfo], located: Located) -> Mapping[str, str]:
    """Tensors of the encoder: name in diffusers -> name in the file.

    Raises:
        UnsupportedModelError: There are none.
    """
    names = encoder_names(tensors, ldm=family.ldm)
    if not any(name.startswith("encoder.") for name in names):
        example = next(iter(tensors), "none")
        raise UnsupportedModelError(
            f"{located.weights[0].name} holds no encoder",
            where=str(located.weights[0]),
            why=f"none of its {len(tensors)} tensors is called encoder.*; the first is {example}",
            fix="give weights that hold the whole VAE, not its decoder, a transformer or a LoRA",
        )
    return names


def _normalisation(
    family: Family, located: Located, names: Mapping[str, str], tensors: Mapping[str, weights.TensorInfo]
) -> Normalisation:
    def read(name: str) -> NDArray[np.float32]:
        if name not in names:
            raise EncoderError(
                f"tensor {name} is not in {located.weights[0].name}",
                where=str(located.weights[0]),
                why="it says how the latents of this class are normalised",
                fix="download the weights again",
            )
        return weights.read_tensor(tensors[names[name]])

    if family.generic and {"latents_mean", "latents_std"} <= names.keys():
        # Statistics among the weights (LTX-2) are in no configuration, which speaks of a scale of 1 only.
        family = replace(family, normalisation="buffers")
    return normalisation_of(family, located.config, read)


def _check_length(normalisation: Normalisation, channels: int, where: str) -> None:
    expected = channels * normalisation.patch**2
    for name, values in (("mean", normalisation.mean), ("std", normalisation.std)):
        if values and len(values) != expected:
            raise UnsupportedModelError(
                f"the latents have {expected} channels, their {name} has {len(values)}",
                where=where,
                fix="use the config.json that was published with the model",
            )


def _compute_type(requested: str, *, on_cuda: bool, force_upcast: bool) -> str:
    if requested != "auto":
        return requested
    if not on_cuda:
        return "float32"
    return "bfloat16" if force_upcast else "float16"


def _on_cuda(device: str, has_cuda: bool) -> bool:
    return device.startswith("cuda") or (device == "auto" and has_cuda)


def _stub_delay(model: str) -> int:
    """The N of ``stub:delay_ms=N``.

    Raises:
        UsageError: Another option, or no number.
    """
    _, colon, option = model.partition(":")
    name, _, value = option.partition("=")
    if colon and (name != "delay_ms" or not (value.isascii() and value.isdigit())):
        raise UsageError(
            f"unknown option of the stub encoder: {option or '(empty)'}",
            where=f"--model {model}",
            fix="use --model stub or --model stub:delay_ms=20",
        )
    return int(value) if colon else 0


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(choices)
        raise UsageError(f"unknown type {value}", where=option, fix=f"use {option} with one of: {listed}")
