"""The device loop's arithmetic: batches of one size, halved when memory runs out, retried when not finite.

Guarantee: every piece that goes in comes out as an entry or as a refusal with its cause; latents that are not
finite are never stored and never zeroed. While the device works on one batch the host makes the next; at most two
are with it at once. The device's memory is given back only in the out-of-memory path.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.posterior import drawn, encoded_channels, encoded_dtype
from latentcache.encoders.protocol import EncodedBatch, Encoder, Pending
from latentcache.errors import DeviceMemoryError, EncoderError
from latentcache.geometry.sizes import Size, latent_size
from latentcache.identity.content import checksum
from latentcache.identity.key import KIND_LATENTS
from latentcache.pipeline.batch_size import BatchSizes
from latentcache.pipeline.speed import StageClock
from latentcache.pipeline.work import Cut, Piece
from latentcache.recipe import Recipe
from latentcache.store.entry import EntryFacts, EntryHeader, NewEntry, numpy_dtype, pack_facts, pack_header

#: Batches that a device has been given and whose results were not fetched, at most.
IN_FLIGHT = 2
Refuse = Callable[[Piece, str, str], None]
"""Called with a piece, the cause and the detail when a piece cannot be encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Pieces that are done with."""

    pieces: list[Piece]
    entries: list[NewEntry]
    """Of the pieces, without those that were refused."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch that the device has been given."""

    pieces: list[Piece]
    pending: Pending
    started: float
    """When it was begun, by the monotonic clock."""
    host_s: float
    """Seconds until it was given away: for an encoder that computes at once, all of its work."""


@dataclass(slots=True, kw_only=True)
class BatchEncoder:
    """Encodes pieces of one bucket at a time. For one thread.

    Args:
        encoder: What does the work.
        recipe: Whose id goes into the headers.
        sizes: Pieces per call.
        refuse: Told of pieces that cannot be encoded.
        warn: Told each time a batch is halved, which is remembered for its bucket.
        clock: Told what was done.
    """

    encoder: Encoder
    recipe: Recipe
    sizes: BatchSizes
    refuse: Refuse
    warn: Callable[[str], None]
    clock: StageClock = field(default_factory=StageClock)
    _flights: deque[_Flight] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        """Whether the device has been given a batch whose result was not fetched."""
        return bool(self._flights)

    @property
    def in_flight(self) -> list[Piece]:
        """The pieces of those batches."""
        return [piece for flight in self._flights for piece in flight.pieces]

    def encode(self, pieces: Sequence[Piece]) -> list[NewEntry]:
        """Entries of the pieces, all of one bucket, without those that were refused; waits for all of them."""
        done = self.submit(pieces)
        done += self.collect(wait=True)
        return [entry for batch in done for entry in batch.entries]

    def submit(self, pieces: Sequence[Piece]) -> list[Encoded]:
        """Begin to encode pieces of one bucket.

        Returns:
            What is done meanwhile: of these pieces, or of those before.
        """
        done: list[Encoded] = []
        waiting = list(pieces)
        while waiting:
            bucket = waiting[0].placement.bucket
            batch = waiting[: self.sizes.limit(bucket)]
            timed = self.sizes.timed(bucket, len(batch))
            while len(self._flights) >= IN_FLIGHT or (timed and self._flights):
                done += self._fetch()
            try:
                self._begin(batch)
            except DeviceMemoryError as error:
                if len(batch) == 1 and self._flights:
                    done += self.collect(wait=True)  # it gets the device to itself before it is given up
                elif len(batch) == 1:
                    done.append(self._give_up(batch, error))
                    del waiting[:1]
                else:
                    self._halve(bucket, len(batch))
                continue  # the same pieces again
            del waiting[: len(batch)]
            if timed:
                done += self._fetch()
        return done + self.collect(wait=False)

    def collect(self, *, wait: bool) -> list[Encoded]:
        """What is done, or everything that was begun."""
        done: list[Encoded] = []
        while self._flights and (wait or self._flights[0].pending.done()):
            done += self._fetch()
        return done

    def _begin(self, batch: list[Piece]) -> None:
        started = time.monotonic()
        pending = self.encoder.submit([piece.pixels for piece in batch])
        self._flights.append(_Flight(batch, pending, started, time.monotonic() - started))

    def _fetch(self) -> list[Encoded]:
        """The oldest batch, waited for; encoded again in smaller parts where memory ran out on the device."""
        flight = self._flights.popleft()
        batch, bucket = flight.pieces, flight.pieces[0].placement.bucket
        waiting = time.monotonic()
        try:
            encoded = flight.pending.result()
        except DeviceMemoryError as error:
            if len(batch) == 1:
                return [self._give_up(batch, error)]
            self._halve(bucket, len(batch))
            return self.submit(batch)
        now = time.monotonic()
        seconds = encoded.device_s or flight.host_s
        self.sizes.took(bucket, len(batch), encoded.device_s or now - flight.started)
        self.clock.encoded(bucket, len(batch), device_s=seconds, waited_s=now - waiting)
        return [Encoded(pieces=batch, entries=self._entries(batch, encoded))]

    def _entries(self, batch: Sequence[Piece], encoded: EncodedBatch) -> list[NewEntry]:
        """Of what is finite; the rest is encoded again, one by one: float32 needs twice the memory."""
        encoded = self._stored(batch, encoded)
        good = [self._entry(piece, encoded, i) for i, piece in enumerate(batch) if encoded.finite[i]]
        for piece in [piece for i, piece in enumerate(batch) if not encoded.finite[i]]:
            good += self._precisely(piece)
        return good

    def _precisely(self, piece: Piece) -> list[NewEntry]:
        """The entry of a picture whose latents were not finite, from float32 throughout; or none."""
        try:
            encoded = self._stored([piece], self.encoder.encode(piece.pixels[None], precise=True))
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

    def _stored(self, batch: Sequence[Piece], encoded: EncodedBatch) -> EncodedBatch:
        """What is stored of the pieces: what the encoder gives, or one draw from it."""
        self._check(batch, encoded)
        if self.recipe.encoder.posterior != "sample":
            return encoded
        return drawn(encoded, [piece.pixel_hash for piece in batch], self.recipe)

    def _check(self, batch: Sequence[Piece], encoded: EncodedBatch) -> None:
        """Look at shape and type.

        Raises:
            EncoderError: They are not what geometry and recipe ask for: a fault of the encoder, not of a file.
        """
        spec = self.recipe.encoder
        cells = latent_size(Size(*batch[0].pixels.shape[:2]), spec.factor)
        expected = (len(batch), encoded_channels(spec), cells.height, cells.width)
        found, dtype = encoded.latents.shape, numpy_dtype(encoded_dtype(spec))
        if found != expected or encoded.latents.dtype != dtype or encoded.finite.shape != expected[:1]:
            raise EncoderError(
                "the encoder gives latents of another shape or type than its description says",
                where=spec.family,
                why=f"expected {expected} of {dtype}, found {found} of {encoded.latents.dtype}",
                fix="report this model: its row in encoders/families.py is wrong",
            )

    def _entry(self, piece: Piece, encoded: EncodedBatch, position: int) -> NewEntry:
        latents = np.ascontiguousarray(encoded.latents[position])
        return new_entry(piece, self.recipe, latents.shape, latents.tobytes())

    def _halve(self, bucket: Size, size: int) -> None:
        kept = self.sizes.halve(bucket, size)
        self.warn(f"out of memory at batch {size} of {bucket}; going on with {kept}")

    def _give_up(self, batch: list[Piece], error: DeviceMemoryError) -> Encoded:
        """A picture that does not fit alone."""
        self.refuse(batch[0], "out-of-memory", error.why or error.what)
        return Encoded(pieces=batch, entries=[])


def new_entry(cut: Cut, recipe: Recipe, shape: tuple[int, ...], payload: bytes) -> NewEntry:
    """The stored form of a picture's latents."""
    header = EntryHeader(
        kind=KIND_LATENTS,
        dtype=recipe.encoder.storage_dtype,
        shape=shape,
        payload_checksum=checksum(payload),
        content=cut.content,
        recipe_id=recipe.recipe_id,
        original_size=cut.original_size,
    )
    facts = EntryFacts(pixel_hash=cut.pixel_hash, placement=cut.placement)
    return NewEntry(key=cut.key, value=pack_header(header, cut.key) + payload, facts=pack_facts(facts))


def _only_too_large(latents: NDArray[Any]) -> bool:
    """Whether float values were finite until they were stored; bfloat16, which has float32's range, never says so."""
    return latents.dtype == np.float16 and not np.isnan(latents).any()
