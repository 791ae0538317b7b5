"""The device loop of one worker: decode threads on one side, the writer thread on the other.

Decides nothing about content; it moves pieces. Guarantee: bounded memory (17/16 of the byte budget, a short writer
queue, two batches on the device); when decoders starve because half-filled buckets hold the budget, the fullest is
flushed, so nothing waits for ever; after a stop request the batches on the device are committed.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from latentcache.encoders.opening import matmul_ceiling
from latentcache.encoders.protocol import Encoder
from latentcache.failpoint import failpoint
from latentcache.geometry.sizes import Size
from latentcache.pipeline.batch_size import BatchSizes
from latentcache.pipeline.board import DEVICE, ENCODING, OPENING, Board
from latentcache.pipeline.channel import Channel
from latentcache.pipeline.decoding import DecodePool, raise_outcome
from latentcache.pipeline.encoding import BatchEncoder, Encoded, new_entry
from latentcache.pipeline.forms import refusal_form
from latentcache.pipeline.speed import StageClock
from latentcache.pipeline.work import Failed, Looked, Piece, Planned
from latentcache.pipeline.writing import WriterThread
from latentcache.recipe import Recipe
from latentcache.store.catalog import Located

#: How often the loop looks whether it was asked to stop, in seconds.
_TICK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreWork:
    """An order: so many samples more will be looked at. It comes before the first outcome of them."""

    count: int


class NoMoreWork:
    """An order: when everything is encoded, commit it and end."""


@dataclass(slots=True, kw_only=True)
class EncodeRun:
    """One worker's pass over the samples its decode threads are fed with; orders come through their queue."""

    recipe: Recipe
    pool: DecodePool
    writer: WriterThread
    open_encoder: Callable[[], Encoder]
    """Called when the first piece is to be encoded: a run that finds everything committed loads no model."""
    payload: Callable[[Located], bytes | None]
    """Latents of a committed entry."""
    sizes: BatchSizes
    channel: Channel
    board: Board
    clock: StageClock = field(default_factory=StageClock)
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set by anybody: commit what the device has in hand and end."""
    _remaining: int = 0
    _ending: bool = False
    _waiting: dict[Size, list[Piece]] = field(default_factory=dict)
    _batches: BatchEncoder | None = None
    _encoder: Encoder | None = None

    def __call__(self) -> None:
        """Do what is asked until there is no more, or until ``stopping``.

        Raises:
            StoreError: The disk is full or fails; what was committed stays.
            EncoderError: The model cannot be used.
            DeviceError: The device failed.
        """
        try:
            self.pool.start()
            self._loop()
        finally:
            self.clock.end()
            self.pool.stop()
            try:
                self.writer.finish()
            finally:
                if self._encoder is not None:
                    self._encoder.close()

    def _loop(self) -> None:
        while not (self.stopping.is_set() or (self._ending and self._idle() and not self._busy())):
            found = self._next()
            if isinstance(found, MoreWork):
                self._remaining += found.count
            elif isinstance(found, NoMoreWork):
                self._ending = True
            elif found is not None:
                self._remaining -= 1
                self._take(found)
            elif self._waiting and (not self._remaining or self._starving()):
                self._flush_fullest()
            self._fetch(wait=self._idle())
        self._fetch(wait=True)

    def _idle(self) -> bool:
        """Whether nothing is left to look at or to encode, as far as was asked."""
        return not self._remaining and not self._waiting

    def _busy(self) -> bool:
        return self._batches is not None and self._batches.busy

    def _next(self) -> Looked | Failed | MoreWork | NoMoreWork | None:
        """An outcome or an order, or None when there is none yet; without waiting where waiting would not help."""
        idle = self._waiting and (not self._remaining or self._starving())
        try:
            with self.clock.waiting("decode", counts=not self._busy()):
                found = self.pool.outcomes.get(timeout=0.0 if idle else _TICK_S)
        except queue.Empty:
            return None
        return found if isinstance(found, MoreWork | NoMoreWork) else raise_outcome(found)

    def _starving(self) -> bool:
        """Whether the decoders wait for the bytes of half-filled buckets."""
        kept = sum(_nbytes(pieces) for pieces in self._waiting.values())
        return bool(kept) and self.pool.decoder.budget.starving(kept)

    def _take(self, outcome: Looked | Failed) -> None:
        """Tell one outcome and queue its pieces."""
        if isinstance(outcome, Failed):
            self.channel.send("failed", index=outcome.index, refusal=refusal_form(outcome.refusal))
            return
        for piece in outcome.pieces:
            if not self._copy_twin(piece):
                self._queue(piece)

    def _queue(self, piece: Piece) -> None:
        bucket = piece.placement.bucket
        waiting = self._waiting.setdefault(bucket, [])
        waiting.append(piece)
        if len(waiting) >= self.sizes.limit(bucket):
            self._encode(self._waiting.pop(bucket))

    def _copy_twin(self, piece: Piece) -> bool:
        """Store the latents of an entry with equal pixels under the new key, where there is one."""
        payload = None if piece.twin is None else self.payload(piece.twin)
        if piece.twin is None or payload is None:
            return False
        self.channel.send("copied", key=piece.key.hex())
        self.writer.put([new_entry(piece, self.recipe, piece.twin.header.shape, payload)])
        self.pool.decoder.budget.release(piece.pixels.nbytes)
        return True

    def _flush_fullest(self) -> None:
        bucket = max(self._waiting, key=lambda size: _nbytes(self._waiting[size]))
        self._encode(self._waiting.pop(bucket))

    def _encode(self, pieces: list[Piece]) -> None:
        """Have pieces of one bucket encoded; takes what is done meanwhile."""
        batches = self._batch_encoder()
        with self._encoding(batches, pieces):
            for piece in pieces:
                failpoint("encoding", piece.name)
            done = batches.submit(pieces)
        self._store(done)

    def _fetch(self, *, wait: bool) -> None:
        """Take what the device has done, or wait for all that it was given."""
        if self._batches is None or not self._batches.busy:
            return
        with self._encoding(self._batches):
            done = self._batches.collect(wait=wait)
        self._store(done)

    @contextmanager
    def _encoding(self, batches: BatchEncoder, pieces: Sequence[Piece] = ()) -> Iterator[None]:
        """Whatever ends the process in the block, one of the pieces may be the cause, or of those on the device."""
        with self.board.doing(DEVICE, ENCODING, [piece.index for piece in (*batches.in_flight, *pieces)]):
            yield

    def _store(self, done: Sequence[Encoded]) -> None:
        """Hand entries to the writer."""
        for batch in done:
            failpoint("result-received")
            self.pool.decoder.budget.release(_nbytes(batch.pieces))
            if batch.entries:
                # Said before they are handed over, so that a commit never comes before the word of what it holds.
                self.channel.send("encoded", keys=[entry.key.hex() for entry in batch.entries])
                with self.clock.waiting("write"):
                    self.writer.put(batch.entries)

    def _batch_encoder(self) -> BatchEncoder:
        if self._batches is None:
            with self.board.doing(DEVICE, OPENING):
                self._encoder = self.open_encoder()
                self.clock.ceiling_flops = matmul_ceiling(self._encoder)
            self.clock.begin()
            self._batches = BatchEncoder(
                encoder=self._encoder,
                recipe=self.recipe,
                sizes=self.sizes,
                refuse=self._refuse,
                warn=lambda words: self.channel.send("warned", words=words),
                clock=self.clock,
            )
        return self._batches

    def _refuse(self, piece: Piece, cause: str, detail: str) -> None:
        self.channel.send("refused", index=piece.index, key=piece.key.hex(), cause=cause, detail=detail)


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.pixels.nbytes for piece in pieces)


def expected_pieces(todo: Sequence[Planned], variants: int, *, workers: int = 1) -> Counter[Size]:
    """Pieces of each bucket for each worker, at most: some may turn out to be there already."""
    counts = Counter(placement.bucket for planned in todo for placement in planned.placements * variants)
    return Counter({bucket: -(-count // workers) for bucket, count in counts.items()})
