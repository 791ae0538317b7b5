"""In which precision a new cache is computed: decided once, before the first key is made, and kept by the cache.

Decides: float32 off CUDA. On CUDA float16 (its error is an eighth of bfloat16's: 0.25 % against 2.0 % of the latents'
spread) where the configuration does not warn of overflow (``force_upcast``) and a probe passes; else bfloat16 where
the device computes it; else float32. The probe encodes pictures made to drive activations as far as they go, in
float16, and looks at the output of every layer: all finite and below an eighth of float16's largest number.
Guarantee: an answer is never from a model's name. A probe is no proof: a picture that overflows all the same is
found by its finite flag and encoded again in float32. Cost: one load of the model and six small pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latentcache.encoders.describe import ModelDescription
from latentcache.encoders.opening import sample_picture
from latentcache.encoders.protocol import Pixels, Precision
from latentcache.encoders.vae import VaeEncoder, choose_device
from latentcache.errors import EncoderError

#: How many times the activations of the probe a picture of the data may drive before float16 overflows.
HEADROOM = 8
LARGEST = float(torch.finfo(torch.float16).max)
_SIDE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What the probe found."""

    largest: float
    """Largest absolute value that any layer gave; infinite where one was not finite."""
    layer: str
    """Which layer gave it."""

    @property
    def fits(self) -> bool:
        """Whether float16 is safe for pictures up to ``HEADROOM`` times as wild."""
        return self.largest * HEADROOM <= LARGEST

    def in_words(self) -> str:
        """For a message."""
        value = f"{self.largest:.3g}" if math.isfinite(self.largest) else "infinity"
        return f"{self.layer} reaches {value} with a test picture"


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes bfloat16 by itself; those that only emulate it are slower than in float32."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def choose_precision(*, on_cuda: bool, force_upcast: bool, bfloat16: bool, fits: bool) -> str:
    """The compute type that ``auto`` means.

    Args:
        on_cuda: Where the encoder will run.
        force_upcast: Whether its configuration warns of float16.
        bfloat16: Whether the device computes bfloat16.
        fits: Whether the probe of float16 passed; not asked for where ``force_upcast`` says no.
    """
    if not on_cuda:
        return "float32"
    if not force_upcast and fits:
        return "float16"
    return "bfloat16" if bfloat16 else "float32"


def auto_precision(description: ModelDescription, device: str, *, fold: bool = True) -> Precision:
    """Find out in which precision a new cache of this model is to be computed on this device.

    Raises:
        DeviceError: The device is not there or failed.
        DeviceMemoryError: The encoder, or one small picture, does not fit.
    """
    chosen = choose_device(device)
    on_cuda = chosen.type == "cuda"
    found = None if description.force_upcast or not on_cuda else probe_range(description, chosen, fold=fold)
    compute = choose_precision(
        on_cuda=on_cuda,
        force_upcast=description.force_upcast,
        bfloat16=has_bfloat16(chosen),
        fits=found is not None and found.fits,
    )
    why = "" if found is None or found.fits else f"float16 is too narrow: {found.in_words()}"
    return Precision(compute_dtype=compute, why=why)


def probe_range(description: ModelDescription, device: torch.device, *, fold: bool = True) -> Range:
    """Encode the pictures of the probe in float16 and look at every layer.

    Raises:
        DeviceError: The device failed.
        DeviceMemoryError: The encoder, or one picture of 128 x 256, does not fit.
    """
    half = replace(description, spec=replace(description.spec, compute_dtype="float16"))
    try:
        encoder = VaeEncoder(half, device, fold=fold)
    except EncoderError:  # weights beyond float16; if they are damaged, the next precision says so
        return Range(largest=math.inf, layer="its weights")
    largest = _Largest()
    hooks = [part.register_forward_hook(largest.of(name)) for name, part in encoder.module.named_modules()]
    try:
        for picture in probe_pictures(description.spec.multiple):
            encoder.encode(picture)
    finally:
        for hook in hooks:
            hook.remove()
        encoder.close()
    return largest.range()


def probe_pictures(multiple: int) -> list[Pixels]:
    """Six pictures (1, S, 2S, 3): ramps, noise of extremes, stripes and squares of one pixel, and two flat ones."""
    picture = sample_picture(-(-_SIDE // multiple) * multiple)
    y, x = np.mgrid[0 : picture.shape[1], 0 : picture.shape[2]]
    checks = np.broadcast_to(((x + y) % 2 * 255)[None, :, :, None], picture.shape)
    stripes = np.stack([(x // 2 % 2) * 255, (y // 2 % 2) * 255, ((x + y) // 8 % 2) * 255], axis=-1)[None]
    noise = np.random.default_rng(0).integers(0, 2, picture.shape) * 255
    flat = [np.full(picture.shape, value) for value in (0, 255)]
    return [np.ascontiguousarray(made, dtype=np.uint8) for made in (picture, checks, stripes, noise, *flat)]


class _Largest:
    """Remembers the largest value of every layer: one number for each, kept on the device."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def of(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """A forward hook for the layer of this name."""

        def look(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                largest = output.abs().amax().float()  # NaN stays NaN
                known = self._found.get(name)
                self._found[name] = largest if known is None else torch.maximum(known, largest)

        return look

    def range(self) -> Range:
        """The largest of all, and the first layer that gave it."""
        found = {name: value.item() for name, value in self._found.items()}
        values = {name: math.inf if math.isnan(value) else value for name, value in found.items()}
        layer = max(values, key=lambda name: values[name], default="")
        return Range(largest=values.get(layer, math.inf), layer=layer or "the encoder")
