"""Questions that only a process with torch can answer: the precision of a new cache, and the resize kernel.

Workers call :func:`find_precision` and :func:`can_resample` by name; arguments and results are JSON values.

The precision of a new cache is chosen once, before the first key is made, and kept by the cache: float32 off CUDA; on
CUDA float16 (its error is an eighth of bfloat16's: 0.25 % against 2.0 % of the latents' spread) if the configuration
does not warn of overflow (``force_upcast``) and a probe passes; else bfloat16 if the device computes it; else
float32. The probe encodes images that drive activations to their extremes, in float16, and checks the output of
every layer: all finite and below an eighth of float16's largest number. The answer never comes from a model's name.
A probe is not a
proof: an image that overflows nevertheless is found by its finite flag and encoded again in float32. Cost: one load
of the model and six small images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latentcache.encoders.protocol import Pixels, encode
from latentcache.encoders.vae.describe import ModelDescription
from latentcache.encoders.vae.encoder import VaeEncoder, choose_device
from latentcache.encoders.vae.opening import sample_image
from latentcache.errors import EncoderError
from latentcache.images.resize import resample_self_test

#: Factor by which an image of the data may exceed the activations of the probe before float16 overflows.
HEADROOM = 8
LARGEST = float(torch.finfo(torch.float16).max)
_SIDE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Result of the probe."""

    largest: float
    """Largest absolute value of any layer; infinite if one value was not finite."""
    layer: str
    """Name of that layer."""

    @property
    def fits(self) -> bool:
        """True if float16 is safe for images with up to ``HEADROOM`` times larger activations."""
        return self.largest * HEADROOM <= LARGEST

    def __str__(self) -> str:
        value = f"{self.largest:.3g}" if math.isfinite(self.largest) else "infinity"
        return f"{self.layer} reaches {value} with a test image"


def has_bfloat16(device: torch.device) -> bool:
    """True if a device computes bfloat16; devices that only emulate it are slower than in float32."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def choose_precision(*, on_cuda: bool, force_upcast: bool, bfloat16: bool, fits: bool) -> str:
    """The compute type that ``auto`` means.

    Args:
        on_cuda: True if the encoder will run on CUDA.
        force_upcast: True if its configuration warns of float16.
        bfloat16: True if the device computes bfloat16.
        fits: True if the probe of float16 passed; ignored with ``force_upcast``.
    """
    if not on_cuda:
        return "float32"
    if not force_upcast and fits:
        return "float16"
    return "bfloat16" if bfloat16 else "float32"


def find_precision(model: Mapping[str, Any], device: str = "auto", fold: bool = True) -> dict[str, Any]:
    """Precision of a new cache of this model on this device.

    Args:
        model: ``ModelDescription.as_json()``.
        device: ``auto``, ``cpu`` or a torch device.
        fold: As in ``open_encoder``.

    Returns:
        ``compute_dtype``, and ``why``: the reason if it is not float16 on CUDA.

    Raises:
        DeviceError: The device does not exist or failed.
        DeviceMemoryError: The encoder, or one small image, does not fit.
    """
    description, chosen = ModelDescription.from_json(model), choose_device(device)
    on_cuda = chosen.type == "cuda"
    found = None if description.force_upcast or not on_cuda else probe_range(description, chosen, fold=fold)
    compute = choose_precision(
        on_cuda=on_cuda,
        force_upcast=description.force_upcast,
        bfloat16=has_bfloat16(chosen),
        fits=found is not None and found.fits,
    )
    why = "" if found is None or found.fits else f"float16 is too narrow: {found}"
    return {"compute_dtype": compute, "why": why}


def can_resample() -> bool:
    """True if the uint8 resize of torch works here and agrees with Pillow's."""
    return resample_self_test()


def probe_range(description: ModelDescription, device: torch.device, *, fold: bool = True) -> Range:
    """Encode the images of the probe in float16 and check every layer.

    Raises:
        DeviceError: The device failed.
        DeviceMemoryError: The encoder, or one image of 128 x 256, does not fit.
    """
    half = replace(description, spec=replace(description.spec, compute_dtype="float16"))
    try:
        encoder = VaeEncoder(half, device, fold=fold)
    except EncoderError:  # weights beyond float16; if they are damaged, the next precision fails too
        return Range(largest=math.inf, layer="its weights")
    largest = _Largest()
    hooks = [part.register_forward_hook(largest.of(name)) for name, part in encoder.module.named_modules()]
    try:
        for image in probe_images(description.spec.multiple):
            encode(encoder, image)
    finally:
        for hook in hooks:
            hook.remove()
        encoder.close()
    return largest.range()


def probe_images(multiple: int) -> list[Pixels]:
    """Six images (1, S, 2S, 3): ramps, noise of extremes, stripes and squares of one pixel, and two flat ones."""
    image = sample_image(-(-_SIDE // multiple) * multiple)
    y, x = np.mgrid[0 : image.shape[1], 0 : image.shape[2]]
    checks = np.broadcast_to(((x + y) % 2 * 255)[None, :, :, None], image.shape)
    stripes = np.stack([(x // 2 % 2) * 255, (y // 2 % 2) * 255, ((x + y) // 8 % 2) * 255], axis=-1)[None]
    noise = np.random.default_rng(0).integers(0, 2, image.shape) * 255
    flat = [np.full(image.shape, value) for value in (0, 255)]
    return [np.ascontiguousarray(made, dtype=np.uint8) for made in (image, checks, stripes, noise, *flat)]


class _Largest:
    """The largest value of every layer: one number for each, kept on the device."""

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
