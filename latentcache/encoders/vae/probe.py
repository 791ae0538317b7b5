"""Questions that only a process with torch can answer: the precision of a new cache, and the resize kernel.

Workers call :func:`find_precision` and :func:`can_resample` by name; arguments and results are JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from latentcache.encoders.vae.describe import ModelDescription
from latentcache.encoders.vae.encoder import VaeEncoder, choose_device
from latentcache.encoders.vae.opening import check_encoder
from latentcache.errors import EncoderError
from latentcache.images.resize import resample_self_test


def find_precision(model: Mapping[str, Any], device: str = "auto", fold: bool = True) -> dict[str, Any]:
    """Precision of a new cache of this model on this device.

    It is chosen once, before the first key is made, and kept by the cache: float32 off CUDA; on CUDA float16 (its
    error is an eighth of bfloat16's: 0.25 % against 2.0 % of the latents' spread) if the configuration does not warn
    of overflow (``force_upcast``) and a test image stays finite; else bfloat16 if the device computes it; else
    float32. An image that overflows nevertheless is found by its finite flag and encoded again in float32.

    Args:
        model: ``ModelDescription.as_json()``.
        device: ``auto``, ``cpu`` or a torch device.
        fold: As in ``open_encoder``.

    Returns:
        ``compute_dtype``, and ``why``: the reason if float16 was tried and is too narrow.

    Raises:
        DeviceError: The device does not exist or failed.
        DeviceMemoryError: The encoder, or one small image, does not fit.
    """
    description, chosen = ModelDescription.from_json(model), choose_device(device)
    if chosen.type != "cuda":
        return {"compute_dtype": "float32", "why": ""}
    why = "" if description.force_upcast else too_narrow(description, chosen, fold=fold)
    wide = "bfloat16" if has_bfloat16(chosen) else "float32"
    return {"compute_dtype": wide if why or description.force_upcast else "float16", "why": why}


def too_narrow(description: ModelDescription, device: torch.device, *, fold: bool = True) -> str:
    """Why a model cannot compute in float16: its weights or a test image overflow; empty: it can."""
    half = replace(description, spec=replace(description.spec, compute_dtype="float16"))
    try:
        encoder = VaeEncoder(half, device, fold=fold)
        try:
            check_encoder(encoder)
        finally:
            encoder.close()
    except EncoderError as error:  # if the weights are damaged, the next precision fails, too
        return f"float16 is too narrow: {error.what}"
    return ""


def has_bfloat16(device: torch.device) -> bool:
    """True if a device computes bfloat16; devices that only emulate it are slower than in float32."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def can_resample() -> bool:
    """True if the uint8 resize of torch works here and agrees with Pillow's."""
    return resample_self_test()
