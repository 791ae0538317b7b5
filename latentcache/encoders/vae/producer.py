"""Make latents of the pixels of images, in a worker.

Guarantee: latents that are not finite are never stored and never zeroed. Before a build starts, one fixed image
proves that the encoder works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.pixels import PixelProducer, Pixels
from latentcache.encoders.vae.builtin import Encoder, Pending, StubEncoder
from latentcache.encoders.vae.describe import ModelDescription
from latentcache.errors import DeviceMemoryError, EncoderError, UsageError
from latentcache.fields.dtypes import as_floats, is_finite
from latentcache.fields.latents import LatentsRecipe
from latentcache.fields.protocol import Failure, Made, Prepared, ProducerContext
from latentcache.fields.recipe import EXACT, measured
from latentcache.images.resize import resample_self_test
from latentcache.sources.causes import hint_for

_SIDE = 64


class VaeProducer(PixelProducer):
    """Latents of images."""

    def __init__(self, producer: Mapping[str, Any], recipe: LatentsRecipe, context: ProducerContext) -> None:
        super().__init__(producer, recipe, context)
        self._description = ModelDescription(**producer, spec=recipe.encoder)
        if recipe.pixels.resample == "lanczos-u8" and not resample_self_test():
            raise UsageError(
                "not possible on this machine",
                argument="resample",
                value="lanczos-u8",
                why="torch has no uint8 Lanczos here, or it disagrees with Pillow in the self-test",
                fix="install torch 2.13 or newer, or use --resample=lanczos-pil (encodes all again)",
            )
        self._encoder: Encoder | None = None

    def open(self) -> None:
        """See :class:`Producer`."""
        images_only = self._recipe.geometry.clips is None
        context = self._context
        self._encoder = encoder = open_encoder(
            self._description, device=context.device, as_conv2d=images_only, warn=context.warn
        )
        self.device = encoder.device
        self.noise = checked_noise(encoder) if self._description.needs_torch else EXACT

    def encode(self, batch: Sequence[Prepared]) -> Pending:
        """See :class:`Producer`. Items of one group."""
        assert self._encoder is not None
        values = [item.value for item in batch]
        pending = self._encoder.submit(values)
        return Pending(lambda: self._made(values, pending.result()), pending.done)

    def close(self) -> None:
        """Free the memory of the device, and close files."""
        super().close()
        if self._encoder is not None:
            self._encoder.close()

    def _made(self, values: Sequence[Pixels], encoded: NDArray[Any]) -> list[Made | Failure]:
        """Keep finite items and encode the others again, one at a time: float32 needs twice the memory."""
        return [
            Made(array=np.ascontiguousarray(latents)) if is_finite(latents) else self._precisely(value)
            for value, latents in zip(values, encoded, strict=True)
        ]

    def _precisely(self, value: Pixels) -> Made | Failure:
        """Encode one item in float32 throughout, or say why that fails."""
        assert self._encoder is not None
        reason, detail = "non-finite", "the encoder gives NaN or infinity for it, also in float32"
        try:
            latents = self._encoder.encode([value], precise=True)[0]
        except DeviceMemoryError as error:
            reason = "out-of-memory"
            detail = f"its latents are not finite, and in float32 {error.why or error.what}"
        else:
            if is_finite(latents):
                return Made(array=np.ascontiguousarray(latents))
            if latents.dtype == np.float16 and not np.isnan(latents).any():  # too large to be stored
                storage = self._recipe.encoder.storage_dtype
                reason = "storage-overflow"
                detail = f"values beyond the range of {storage}"
        return Failure(reason=reason, detail=detail, hint=hint_for(reason))


def open_encoder(
    description: ModelDescription,
    *,
    device: str = "auto",
    as_conv2d: bool = True,
    warn: Callable[[str], None] = lambda message: None,
) -> Encoder:
    """Open the encoder of a description; ``as_conv2d`` and ``warn`` as in :class:`VaeEncoder`."""
    if not description.needs_torch:
        return StubEncoder(description.spec, description.delay_ms)
    # torch and diffusers take seconds to import; the demo and the stub must not pay for them.
    from latentcache.encoders.devices import choose_device
    from latentcache.encoders.vae.encoder import VaeEncoder

    return VaeEncoder(description, choose_device(device), as_conv2d=as_conv2d, warn=warn)


def checked_noise(encoder: Encoder) -> dict[str, Any]:
    """Encode one fixed image alone and beside two others, and check the result; raises EncoderError.

    Other sizes run other kernels, so the noise (see ``fields.noise``) is a lower bound; empty without enough memory.
    """
    image = _sample_image(math.lcm(_SIDE, encoder.spec.multiple))
    alone = encoder.encode(image)
    compute = encoder.spec.compute_dtype
    problem, fix = "", "download the weights again"
    if not is_finite(alone):
        problem = f"values that are not finite in {compute}"
        why = "its weights are damaged, or its range is too wide"
        if compute != "float32" and is_finite(encoder.encode(image, precise=True)):
            why = "it overflows in this precision"
            fix = "add --compute-dtype=bfloat16 or --compute-dtype=float32"
    elif (alone == alone[:, :, :1, :1]).all():
        problem, why = "the same latent for every part of an image", "the weights are all zero, or of another class"
    if problem:
        where = "one test image, before the build"
        raise EncoderError(f"{encoder.spec.family} gives {problem}", where=where, why=why, fix=fix)
    try:
        beside = encoder.encode(np.concatenate([image, image[:, ::-1], image[:, :, ::-1]]))
    except DeviceMemoryError:
        return {}
    pair = [as_floats(batch[0]) for batch in (alone, beside)]
    noise = {"devices": [encoder.device], **measured(*(latents[: encoder.spec.channels] for latents in pair))}
    logvar = pair[0][encoder.spec.channels :]
    return noise | ({"scale_logvar": float(logvar.std())} if len(logvar) else {})


def _sample_image(side: int) -> Pixels:
    """The fixed image, (1, side, 2 * side, 3): two ramps and a fine pattern, so no two parts are alike."""
    y, x = np.mgrid[0:side, 0 : 2 * side]
    channels = [255 * x // (2 * side - 1), 255 * y // (side - 1), (7 * x + 13 * y + x * y // 16) % 256]
    return np.ascontiguousarray(np.stack(channels, axis=-1)[None], dtype=np.uint8)
