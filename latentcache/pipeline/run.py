"""The encoding run: decode threads on one side, the writer thread on the other, the device loop between them.

Decides nothing about content; it moves pieces. Guarantee: bounded memory (the byte budget, a short writer
queue); when decoders starve because half-filled buckets hold the budget, the fullest is flushed, so nothing
waits for ever; after a stop request the batch in hand is committed, unless it takes too long.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from latentcache.encoders.opening import matmul_ceiling
from latentcache.encoders.protocol import Encoder
from latentcache.failpoint import failpoint
from latentcache.geometry.sizes import Size
from latentcache.pipeline.batch_size import BatchSizes
from latentcache.pipeline.decoding import DecodePool, raise_outcome
from latentcache.pipeline.encoding import BatchEncoder, Encoded, new_entry
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.speed import StageClock
from latentcache.pipeline.work import Failed, Looked, Piece, Planned, Progress
from latentcache.pipeline.writing import WriterThread
from latentcache.recipe import Recipe
from latentcache.store.catalog import Catalog

#: How often the loop looks whether it was asked to stop, in seconds.
_TICK_S = 0.05


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What a run found and made."""

    looked: dict[int, Looked] = field(default_factory=dict)
    """By sample index; pieces dropped."""
    failed: list[Failed] = field(default_factory=list)
    unencodable: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    """Content hash -> cause and detail, for pictures that decode and cannot be encoded."""
    encoded: set[bytes] = field(default_factory=set)
    """Keys computed by this run."""
    written_bytes: int = 0
    """Headers and payloads committed."""
    clock: StageClock = field(default_factory=StageClock)


@dataclass(slots=True, kw_only=True)
class EncodeRun:
    """One pass over the samples that have to be read."""

    recipe: Recipe
    catalog: Catalog
    pool: DecodePool
    writer: WriterThread
    open_encoder: Callable[[], Encoder]
    """Called when the first piece is to be encoded: a run that finds everything committed loads no model."""
    sizes: BatchSizes
    stop: StopSignal
    progress: Progress
    advanced: Callable[[Progress], None]
    warn: Callable[[str], None]
    result: RunResult = field(default_factory=RunResult)
    _waiting: dict[Size, list[Piece]] = field(default_factory=dict)
    _unencoded: int = 0
    """Pieces decoded, until their batch has been encoded."""
    _batches: BatchEncoder | None = None
    _encoder: Encoder | None = None

    def __call__(self, todo: Sequence[Planned]) -> RunResult:
        """Do it all, or as much as there is time for before a stop request.

        Raises:
            StoreError: The disk is full or fails; what was committed stays.
            EncoderError: The model cannot be used.
            DeviceError: The device failed.
            InterruptedBuildError: After a stop request the batch in hand took too long and was given up.
        """
        try:
            self.pool.start(todo)
            self._loop(todo)
        finally:
            self.result.clock.end()
            self.pool.stop()
            try:
                self.writer.finish()
            finally:
                self.result.written_bytes = self.progress.payload_bytes
                if self._encoder is not None:
                    self._encoder.close()
        return self.result

    def _loop(self, todo: Sequence[Planned]) -> None:
        self.sizes.expect(expected_pieces(todo, self.recipe.variants))
        remaining = len(todo)
        while remaining and not self.stop.requested:
            outcome = self._next()
            if outcome is not None:
                remaining -= 1
                self._take(outcome)
            elif self._starving():
                self._flush_fullest()
            self._fetch(wait=False)
            self.advanced(self.progress)
        while self._waiting and not self.stop.requested:
            self._flush_fullest()
            self.advanced(self.progress)
        self._fetch(wait=True)
        self.advanced(self.progress)

    def _next(self) -> Looked | Failed | None:
        """An outcome, or None when there is none yet; without waiting where waiting would not help."""
        busy = self._batches is not None and self._batches.busy
        timeout = 0.0 if self._starving() else _TICK_S
        try:
            with self.result.clock.waiting("decode", counts=not busy):
                return raise_outcome(self.pool.outcomes.get(timeout=timeout))
        except queue.Empty:
            return None

    def _starving(self) -> bool:
        """Whether the decoders wait for the bytes of half-filled buckets."""
        kept = sum(_nbytes(pieces) for pieces in self._waiting.values())
        return bool(kept) and self.pool.decoder.budget.starving(kept)

    def _take(self, outcome: Looked | Failed) -> None:
        """Note one outcome and queue its pieces."""
        self.progress.looked += 1
        if isinstance(outcome, Failed):
            self.result.failed.append(outcome)
            self.progress.quarantined += 1
            return
        pieces = outcome.pieces
        self.result.looked[outcome.index] = Looked(
            index=outcome.index, content=outcome.content, memo=outcome.memo, size=outcome.size
        )
        for piece in pieces:
            if not self._copy_twin(piece):
                self._queue(piece)

    def _queue(self, piece: Piece) -> None:
        self._count(1)
        bucket = piece.placement.bucket
        waiting = self._waiting.setdefault(bucket, [])
        waiting.append(piece)
        if len(waiting) >= self.sizes.limit(bucket):
            self._encode(self._waiting.pop(bucket))

    def _count(self, pieces: int) -> None:
        """Note pieces that wait to be encoded, or no longer do; a sample has one piece per resolution and variant."""
        self._unencoded += pieces
        self.progress.waiting = -(-self._unencoded // (len(self.pool.decoder.tables) * self.recipe.variants))

    def _copy_twin(self, piece: Piece) -> bool:
        """Store the latents of an entry with equal pixels under the new key, where there is one."""
        payload = None if piece.twin is None else self.catalog.payload(piece.twin)
        if piece.twin is None or payload is None:
            return False
        self.writer.put([new_entry(piece, self.recipe, piece.twin.header.shape, payload)])
        self.pool.decoder.budget.release(piece.pixels.nbytes)
        self.progress.cached += 1
        return True

    def _flush_fullest(self) -> None:
        bucket = max(self._waiting, key=lambda size: _nbytes(self._waiting[size]))
        self._encode(self._waiting.pop(bucket))

    def _encode(self, pieces: list[Piece]) -> None:
        """Have pieces of one bucket encoded; takes what is done meanwhile."""
        with self.stop.abandonable():
            done = self._batch_encoder().submit(pieces)
        self._store(done)

    def _fetch(self, *, wait: bool) -> None:
        """Take what the device has done, or wait for all that it was given."""
        if self._batches is not None and self._batches.busy:
            with self.stop.abandonable():
                done = self._batches.collect(wait=wait)
            self._store(done)

    def _store(self, done: Sequence[Encoded]) -> None:
        """Hand entries to the writer."""
        for batch in done:
            failpoint("result-received")
            self._count(-len(batch.pieces))
            self.pool.decoder.budget.release(_nbytes(batch.pieces))
            self.result.encoded.update(entry.key for entry in batch.entries)
            self.progress.encoded += len(batch.entries)
            if batch.entries:
                with self.result.clock.waiting("write"):
                    self.writer.put(batch.entries)

    def _batch_encoder(self) -> BatchEncoder:
        if self._batches is None:
            self._encoder = self.open_encoder()
            self.result.clock.ceiling_flops = matmul_ceiling(self._encoder)
            self.result.clock.begin()
            self._batches = BatchEncoder(
                encoder=self._encoder,
                recipe=self.recipe,
                sizes=self.sizes,
                refuse=self._refuse,
                warn=self.warn,
                clock=self.result.clock,
            )
        return self._batches

    def _refuse(self, piece: Piece, cause: str, detail: str) -> None:
        self.result.unencodable[piece.content] = (cause, detail)
        self.progress.quarantined += 1


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.pixels.nbytes for piece in pieces)


def expected_pieces(todo: Sequence[Planned], variants: int) -> Counter[Size]:
    """Pieces of each bucket, at most: some may turn out to be there already."""
    return Counter(placement.bucket for planned in todo for placement in planned.placements * variants)
