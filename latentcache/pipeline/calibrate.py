"""How far apart two encodings of one picture may lie: measured once by each build with a real model, and recorded.

Decides what a manifest says of it, so that ``verify --reencode`` knows noise from drift. Measured on the fixed test
picture, alone and among two others: other sizes run other kernels, so it is a lower bound, and ``verify.drift`` puts
a floor under it. Cost: two calls of the encoder with small pictures, after the model was loaded.
"""

from __future__ import annotations

from typing import Any

from latentcache.encoders.describe import ModelDescription
from latentcache.encoders.opening import noise_floor
from latentcache.encoders.protocol import Encoder
from latentcache.errors import DeviceMemoryError
from latentcache.pipeline.preflight import Before
from latentcache.recipe import Recipe

#: Encoders that compute with integers: bit for bit the same everywhere.
_EXACT = {"devices": ["cpu"], "noise_floor": {"largest": 0.0, "mean": 0.0}}


def known_noise(before: Before, recipe: Recipe, description: ModelDescription) -> dict[str, Any]:
    """What is known without opening the encoder: of the demo and the stub, or what earlier builds recorded."""
    if description.kind != "diffusers":
        return dict(_EXACT)
    last = before.generation
    if last is None or last.recipe.encoder.identity() != recipe.encoder.identity():
        return {}
    made = last.manifest["provenance"]
    return {name: made[name] for name in _EXACT if name in made}


def measured_noise(encoder: Encoder, known: dict[str, Any]) -> dict[str, Any]:
    """``known`` with what this encoder shows on this device; a cache may be made on several.

    A device without room for three small pictures says nothing: then nothing is recorded of it.
    """
    try:
        largest, mean = noise_floor(encoder)
    except DeviceMemoryError:
        return known
    last = known.get("noise_floor", {"largest": 0.0, "mean": 0.0})
    floor = {"largest": max(largest, last["largest"]), "mean": max(mean, last["mean"])}
    return {"devices": sorted({encoder.device, *known.get("devices", [])}), "noise_floor": floor}
