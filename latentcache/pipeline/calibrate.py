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
    """``known`` with what this encoder shows on this device.

    A device without room for three small pictures says nothing: then nothing is recorded of it.
    """
    try:
        largest, mean = noise_floor(encoder)
    except DeviceMemoryError:
        return known
    return joined_noise(known, {"devices": [encoder.device], "noise_floor": {"largest": largest, "mean": mean}})


def joined_noise(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both together: a cache may be made on several devices, at once or one after the other."""
    floors = [part["noise_floor"] for part in (one, other) if "noise_floor" in part]
    floor = {name: max(part[name] for part in floors) for name in ("largest", "mean") if floors}
    devices = sorted({*one.get("devices", ()), *other.get("devices", ())})
    return {"devices": devices, "noise_floor": floor} if floors else dict(one or other)
