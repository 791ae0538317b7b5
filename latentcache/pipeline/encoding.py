"""The device loop's arithmetic: batches of one size, halved when memory runs out, retried when not finite.

Guarantee: every piece that goes in comes out as an entry or as a refusal with its cause; latents that are not
finite are never stored and never zeroed. The device's memory is given back only in the out-of-memory path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.posterior import drawn, encoded_channels, encoded_dtype
from latentcache.encoders.protocol import EncodedBatch, Encoder, Pixels
from latentcache.errors import DeviceMemoryError, EncoderError
from latentcache.geometry.sizes import Size, latent_size
from latentcache.identity.content import checksum
from latentcache.identity.key import KIND_LATENTS
from latentcache.pipeline.work import Piece
from latentcache.recipe import Recipe
from latentcache.store.entry import EntryFacts, EntryHeader, numpy_dtype, pack_facts, pack_header
from latentcache.store.shard import NewEntry

Refuse = Callable[[Piece, str, str], None]
"""Called with a piece, the cause and the detail when a piece cannot be encoded."""


@dataclass(slots=True, kw_only=True)
class BatchEncoder:
    """Encodes pieces of one bucket at a time.

    Args:
        encoder: What does the work.
        recipe: Whose id goes into the headers.
        batch_size: Pieces per call at most.
        refuse: Told of pieces that cannot be encoded.
        warn: Told each time a batch is halved, which is remembered for its bucket.
    """

    encoder: Encoder
    recipe: Recipe
    batch_size: int
    refuse: Refuse
    warn: Callable[[str], None]
    _limits: dict[Size, int] = field(default_factory=dict)

    def limit(self, bucket: Size) -> int:
        """Pieces per call for this bucket: the batch size, or less after the device ran out of memory."""
        return self._limits.get(bucket, self.batch_size)

    def encode(self, pieces: Sequence[Piece]) -> list[NewEntry]:
        """Entries of the pieces, all of one bucket, without those that were refused."""
        entries: list[NewEntry] = []
        waiting = list(pieces)
        while waiting:
            bucket = waiting[0].placement.bucket
            batch = waiting[: self.limit(bucket)]
            try:
                entries += self._batch(batch)
            except DeviceMemoryError as error:
                if len(batch) > 1:
                    self._halve(bucket, len(batch))
                    continue  # the same pieces again
                self.refuse(batch[0], "out-of-memory", error.why or error.what)
            del waiting[: len(batch)]
        return entries

    def _batch(self, batch: Sequence[Piece]) -> list[NewEntry]:
        """One call of the encoder, and a second, precise one for what was not finite."""
        encoded = self._encoded(batch, precise=False)
        good = [self._entry(piece, encoded, i) for i, piece in enumerate(batch) if encoded.finite[i]]
        again = [piece for i, piece in enumerate(batch) if not encoded.finite[i]]
        for piece in again:  # one by one: the retry in float32 needs twice the memory
            good += self._precisely(piece)
        return good

    def _precisely(self, piece: Piece) -> list[NewEntry]:
        """The entry of a picture whose latents were not finite, from float32 throughout; or none."""
        try:
            encoded = self._encoded([piece], precise=True)
        except DeviceMemoryError as error:
            self.refuse(
                piece, "out-of-memory", f"its latents are not finite, and in float32 {error.why or error.what}"
            )
            return []
        if encoded.finite[0]:
            return [self._entry(piece, encoded, 0)]
        if _only_too_large(encoded.latents):
            self.refuse(piece, "storage-overflow", f"values beyond the range of {self.recipe.encoder.storage_dtype}")
        else:
            self.refuse(piece, "non-finite", "the encoder gives NaN or infinity for it, also in float32")
        return []

    def _encoded(self, batch: Sequence[Piece], *, precise: bool) -> EncodedBatch:
        """What is stored of the pieces: what the encoder gives, or one draw from it."""
        encoded = self._checked(_slab(batch), precise=precise)
        if self.recipe.encoder.posterior != "sample":
            return encoded
        return drawn(encoded, [piece.pixel_hash for piece in batch], self.recipe)

    def _checked(self, slab: Pixels, *, precise: bool) -> EncodedBatch:
        """What the encoder gives, after a look at its shape and type.

        Raises:
            EncoderError: They are not what geometry and recipe ask for: a fault of the encoder, not of a file.
        """
        encoded = self.encoder.encode(slab, precise=precise)
        spec = self.recipe.encoder
        cells = latent_size(Size(slab.shape[1], slab.shape[2]), spec.factor)
        expected = (len(slab), encoded_channels(spec), cells.height, cells.width)
        found, dtype = encoded.latents.shape, numpy_dtype(encoded_dtype(spec))
        if found != expected or encoded.latents.dtype != dtype or encoded.finite.shape != expected[:1]:
            raise EncoderError(
                "the encoder gives latents of another shape or type than its description says",
                where=spec.family,
                why=f"expected {expected} of {dtype}, found {found} of {encoded.latents.dtype}",
                fix="report this model: its row in encoders/families.py is wrong",
            )
        return encoded

    def _entry(self, piece: Piece, encoded: EncodedBatch, position: int) -> NewEntry:
        latents = np.ascontiguousarray(encoded.latents[position])
        return new_entry(piece, self.recipe, latents.shape, latents.tobytes())

    def _halve(self, bucket: Size, size: int) -> None:
        self._limits[bucket] = max(size // 2, 1)
        self.warn(f"out of memory at batch {size} of {bucket}; going on with {self._limits[bucket]}")


def new_entry(piece: Piece, recipe: Recipe, shape: tuple[int, ...], payload: bytes) -> NewEntry:
    """The stored form of a piece's latents."""
    header = EntryHeader(
        kind=KIND_LATENTS,
        dtype=recipe.encoder.storage_dtype,
        shape=shape,
        payload_checksum=checksum(payload),
        content=piece.content,
        recipe_id=recipe.recipe_id,
        original_size=piece.original_size,
    )
    facts = EntryFacts(pixel_hash=piece.pixel_hash, placement=piece.placement)
    return NewEntry(key=piece.key, value=pack_header(header, piece.key) + payload, facts=pack_facts(facts))


def _only_too_large(latents: NDArray[Any]) -> bool:
    """Whether float values were finite until they were stored; bfloat16, which has float32's range, never says so."""
    return latents.dtype == np.float16 and not np.isnan(latents).any()


def _slab(batch: Sequence[Piece]) -> Pixels:
    """(B, H, W, 3), C-contiguous."""
    return np.stack([piece.pixels for piece in batch])
