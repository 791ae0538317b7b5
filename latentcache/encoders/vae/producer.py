"""Make latents of the pixels of images, in a worker.

Guarantee: latents that are not finite are never stored and never zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.pixels import PixelProducer
from latentcache.encoders.protocol import EncodedBatch, Encoder, PendingBatch, Pixels
from latentcache.encoders.vae.describe import ModelDescription
from latentcache.encoders.vae.opening import checked_noise, open_encoder
from latentcache.errors import DeviceMemoryError, UsageError
from latentcache.fields.latents import LatentsRecipe
from latentcache.fields.noise import EXACT
from latentcache.fields.protocol import Failure, Made, Prepared, ProducerContext
from latentcache.images.resize import resample_self_test
from latentcache.sources.causes import hint_for


class VaeProducer(PixelProducer):
    """Latents of images.

    Args:
        producer: ``model``: ``ModelDescription.as_json()``.
        recipe: Of the cache.
        context: Of the worker; its options may have ``max_pixels``.

    Raises:
        UsageError: This machine cannot resize as the recipe does.
    """

    def __init__(self, producer: Mapping[str, Any], recipe: LatentsRecipe, context: ProducerContext) -> None:
        super().__init__(recipe, context)
        self._description = ModelDescription.from_json(producer["model"], recipe.encoder)
        self._fold = recipe.geometry.clips is None
        _check_resample(recipe)
        self._encoder: Encoder
        self._is_open = False

    def open(self) -> None:
        """See :class:`Producer`.

        Raises:
            EncoderError: The model cannot be used.
            DeviceError: The device does not exist or failed.
        """
        if self._is_open:
            return
        self._encoder = open_encoder(self._description, device=self._context.device, fold=self._fold)
        self._is_open, self.device, self.noise = True, self._encoder.device, EXACT
        if self._description.needs_torch:
            self.noise = checked_noise(self._encoder)

    def encode(self, batch: Sequence[Prepared]) -> _Batch:
        """See :class:`Producer`. Items of one group."""
        self.open()
        values = [item.value for item in batch]
        return _Batch(values, self._encoder.submit(values), self._made)

    def close(self) -> None:
        """Free the memory of the device, and close files."""
        super().close()
        if self._is_open:
            self._encoder.close()

    def _made(self, values: Sequence[Pixels], encoded: EncodedBatch) -> list[Made | Failure]:
        """Items that are finite; the others are encoded again, one by one: float32 needs twice the memory."""
        return [
            Made(array=np.ascontiguousarray(latents)) if finite else self._precisely(value)
            for value, latents, finite in zip(values, encoded.latents, encoded.finite, strict=True)
        ]

    def _precisely(self, value: Pixels) -> Made | Failure:
        """One item from float32 throughout, or why there is none."""
        try:
            encoded = self._encoder.encode([value], precise=True)
        except DeviceMemoryError as error:
            return _failure("out-of-memory", f"its latents are not finite, and in float32 {error.why or error.what}")
        if encoded.finite[0]:
            return Made(array=np.ascontiguousarray(encoded.latents[0]))
        if _is_only_too_large(encoded.latents):
            storage = self._recipe.encoder.storage_dtype
            return _failure("storage-overflow", f"values beyond the range of {storage}")
        return _failure("non-finite", "the encoder gives NaN or infinity for it, also in float32")


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that the device has been given; see :class:`fields.protocol.Pending`."""

    values: Sequence[Pixels]
    pending: PendingBatch
    made: Callable[[Sequence[Pixels], EncodedBatch], list[Made | Failure]]

    def done(self) -> bool:
        """True if ``result`` would return at once."""
        return self.pending.done()

    def result(self) -> list[Made | Failure]:
        """One per item, in order."""
        return self.made(self.values, self.pending.result())


def _check_resample(recipe: LatentsRecipe) -> None:
    """Check that this machine can resize as the recipe does."""
    if recipe.pixels.resample == "lanczos-u8" and not resample_self_test():
        raise UsageError(
            "--resample lanczos-u8: not possible on this machine",
            why="torch has no uint8 Lanczos here, or it disagrees with Pillow in the self-test",
            fix="install torch 2.13 or newer, or use --resample lanczos-pil (encodes everything again)",
        )


def _failure(reason: str, detail: str) -> Failure:
    return Failure(reason=reason, detail=detail, hint=hint_for(reason))


def _is_only_too_large(latents: NDArray[Any]) -> bool:
    """True if values were finite until they were stored as float16; bfloat16 has float32's range."""
    return latents.dtype == np.float16 and not np.isnan(latents).any()
