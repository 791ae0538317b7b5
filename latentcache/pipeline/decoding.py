"""Decode threads: read a file once, hash and decode the same buffer, cut it for every bucket it goes to.

Guarantee: the key is made from the bytes that were decoded; a file that cannot be used becomes a refusal with its
cause and never stops the build; memory is bounded by 17/16 of the byte budget, which is taken before a file is read:
a sixteenth beside it is memory that threads keep for the next JPEG. Threads are enough: simplejpeg, Pillow and
torch's resize all release the interpreter lock (2 threads and 2 processes had the same throughput and CPU cost).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.encoders.protocol import Pixels
from latentcache.errors import LatentcacheError, UnusableSampleError
from latentcache.failpoint import failpoint
from latentcache.geometry.buckets import BucketTable
from latentcache.geometry.placement import Placement
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.identity.key import FLIPPED, VARIANT_BYTE
from latentcache.pipeline.board import DECODING, FIRST_DECODER, Board
from latentcache.pipeline.budget import ByteBudget
from latentcache.pipeline.decode import decode
from latentcache.pipeline.headers import picture_size, refused
from latentcache.pipeline.ledger import Ledger, Seen
from latentcache.pipeline.resize import pixel_hash, resize_crop, thread_setup
from latentcache.pipeline.scratch import Scratch, apart, scratch_for
from latentcache.pipeline.survey import keys_of, placements_for, stored_placements
from latentcache.pipeline.work import Failed, Looked, Piece, Planned, refuse, refused_by
from latentcache.recipe import Recipe
from latentcache.sources.reading import open_source, read_source
from latentcache.store.catalog import Located

#: Bytes that decoding and resizing hold per source pixel at their peak, beside the file, by its first bytes: measured
#: on 16 megapixels, the dearest kind of each format (JPEG: CMYK 11.4; WebP with alpha 24.4; PNG RGBA 16.4).
_DECODE_BYTES = {b"\xff\xd8": 12, b"RIFF": 25}
_MOST_BYTES, _OTHER_BYTES = 25, 17
_BOXED = b"ftyp"
#: How long the end of a build waits for samples in hand, in seconds; the threads end with the process anyway.
_LAST_S = 3.0
_HEAD_BYTES = 12
#: RGB, one byte each.
_RGB_BYTES = 3
#: How much decode threads give way to the thread that encodes, which nobody can replace. On two cores beside an
#: encoder of one thread: 0.89 of the encoder's own rate instead of 0.79 (medians of five rounds, better in four).
_NICER = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Everything a decode thread needs to know."""

    root: Path
    recipe: Recipe
    tables: Sequence[BucketTable]
    """Those of the recipe."""
    max_pixels: int
    ledger: Ledger
    budget: ByteBudget

    def look(self, planned: Planned, scratch: Scratch | None = None) -> Looked | Failed:
        """Read, hash and, where an entry is missing, decode one sample, in ``scratch`` where there is some.

        On return the budget holds the pixels of the pieces and nothing else; whoever encodes them releases it.
        """
        sample = planned.sample
        try:
            data, memo = read_source(self.root / sample.name)
        except UnusableSampleError as error:
            return Failed(index=planned.index, refusal=refused_by(sample, error))
        content = content_hash(data)
        try:
            size = picture_size(data, max_pixels=self.max_pixels)
            placements = placements_for(size, self.tables)
            seen = Seen(index=planned.index, content=content, memo=memo, size=size)
            pieces = self._pieces(data, sample.name, seen, placements, scratch)
        except UnusableSampleError as error:
            return Failed(index=planned.index, refusal=refused_by(sample, error, stat=memo, content=content))
        except MemoryError:
            detail = f"there is not enough memory to decode {planned.size} pixels"
            refusal = refuse(sample, "out-of-memory", detail, stat=memo, content=content)
            return Failed(index=planned.index, refusal=refusal)
        return Looked(index=planned.index, content=content, memo=memo, size=size, pieces=pieces)

    def _pieces(
        self, data: bytes, name: str, seen: Seen, placements: Sequence[Placement], scratch: Scratch | None
    ) -> tuple[Piece, ...]:
        """Decode once, cut for each placement whose entry is missing, mirror the cut where that one is missing.

        What waits for another picture with the same pixels is left out.
        """
        keys = keys_of(seen.content, placements, self.recipe)
        taken = set(self.ledger.take(seen, keys))
        stored = zip(keys, stored_placements(placements, self.recipe), strict=True)
        wanted = [(key, placement) for key, placement in stored if key in taken]
        if not wanted:
            return ()
        failpoint("decoding", name)
        cuts = self._cuts(data, seen, placements, wanted, scratch)
        hashes = [pixel_hash(pixels) for pixels in cuts]
        fates = self.ledger.fates(seen.index, hashes)
        return tuple(
            Piece(
                name=name,
                key=key,
                pixels=pixels,
                pixel_hash=hashed,
                placement=placement,
                original_size=seen.size,
                content=seen.content,
                index=seen.index,
                twin=fate if isinstance(fate, Located) else None,
            )
            for (key, placement), pixels, hashed, fate in zip(wanted, cuts, hashes, fates, strict=True)
            if fate != "wait"
        )

    def _cuts(
        self,
        data: bytes,
        seen: Seen,
        placements: Sequence[Placement],
        wanted: Sequence[tuple[bytes, Placement]],
        scratch: Scratch | None,
    ) -> list[Pixels]:
        """The pixels of each wanted entry, in memory of their own."""
        picture = decode(data, self.recipe.pixels, max_pixels=self.max_pixels, scratch=scratch)
        found = Size(picture.shape[0], picture.shape[1])
        if found != seen.size:
            raise refused("decoder-error", f"the header says {seen.size}, the decoder gives {found}")
        buckets, resample = {placement.bucket for _, placement in wanted}, self.recipe.pixels.resample
        upright = {
            p.bucket: apart(resize_crop(picture, p, resample), picture) for p in placements if p.bucket in buckets
        }
        return [
            np.ascontiguousarray(pixels[:, ::-1]) if key[VARIANT_BYTE] == FLIPPED else pixels
            for key, pixels in ((key, upright[placement.bucket]) for key, placement in wanted)
        ]


@dataclass(slots=True)
class DecodePool:
    """Threads that turn planned samples into outcomes, in about the order in which they are fed.

    ``outcomes`` may carry other things too: whoever reads it has one queue to wait for.
    """

    decoder: Decoder
    num_threads: int
    board: Board | None = None
    """Where each thread says what it decodes; its own where none is given."""
    outcomes: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    _todo: queue.SimpleQueue[Planned | None] = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self, todo: Iterable[Planned] = ()) -> None:
        """Begin, with this."""
        self.feed(todo)
        board = self.board or Board(self.num_threads)
        for number in range(self.num_threads):
            thread = threading.Thread(target=self._run, args=(board, number), name=f"decode-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def feed(self, todo: Iterable[Planned]) -> None:
        """More of the plan."""
        for planned in todo:
            self._todo.put(planned)

    def stop(self) -> None:
        """Take no new sample, wake whoever waits for memory, and wait a while for the samples in hand."""
        self._stop.set()
        self.decoder.budget.close()
        for _ in self._threads:
            self._todo.put(None)
        deadline = time.monotonic() + _LAST_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self, board: Board, number: int) -> None:
        thread_setup()
        give_way()
        scratch = scratch_for(self.decoder.budget.limit, self.num_threads)
        while not self._stop.is_set():
            planned = self._todo.get()
            if planned is None:
                return
            try:
                outcome = self._within_budget(planned, board, FIRST_DECODER + number, scratch)
            except BaseException as error:  # noqa: BLE001 - a dead thread would hang the build: the main loop re-raises
                outcome = error
            if outcome is not None:
                self.outcomes.put(outcome)

    def _decode_bytes(self, planned: Planned) -> int:
        """What decoding a sample takes at its peak, the file among it."""
        try:
            with open_source(self.decoder.root / planned.sample.name) as file:
                each = bytes_per_pixel(file.read(_HEAD_BYTES))
        except (OSError, UnusableSampleError):
            each = _MOST_BYTES  # whoever reads it says what is wrong
        return each * planned.size.area + planned.sample.stat.size

    def _within_budget(
        self, planned: Planned, board: Board, slot: int, scratch: Scratch
    ) -> Looked | Failed | BaseException | None:
        """Look at one sample while holding the bytes it needs; None when the build is ending."""
        budget = self.decoder.budget
        areas = sum(placement.bucket.area for placement in planned.placements)
        cut = _RGB_BYTES * areas * self.decoder.recipe.variants
        reserved = self._decode_bytes(planned) + cut
        if not budget.acquire(reserved):
            return None
        kept = 0
        try:
            with board.doing(slot, DECODING, (planned.index,)):
                outcome = self.decoder.look(planned, scratch)
            if isinstance(outcome, Looked):
                kept = sum(piece.pixels.nbytes for piece in outcome.pieces)
            return outcome
        finally:
            budget.release(reserved - kept)


def bytes_per_pixel(head: bytes) -> int:
    """What decoding a picture holds per pixel at its peak, beside the file; from the first 12 bytes of the file."""
    if head[4:8] == _BOXED:  # AVIF
        return _MOST_BYTES
    found = (size for magic, size in _DECODE_BYTES.items() if head.startswith(magic))
    return next(found, _OTHER_BYTES)


def give_way() -> None:
    """Lower the priority of the calling thread alone, where the system can; elsewhere nothing happens."""
    if sys.platform == "linux":
        number = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, number, min(os.getpriority(os.PRIO_PROCESS, number) + _NICER, 19))


def raise_outcome(outcome: Looked | Failed | BaseException) -> Looked | Failed:
    """An outcome, or the error that ended a decode thread.

    Raises:
        LatentcacheError: As the thread raised it; anything else is our own fault and is raised as it is.
    """
    if isinstance(outcome, BaseException):
        if isinstance(outcome, LatentcacheError):
            raise outcome
        raise RuntimeError("a decode thread failed") from outcome
    return outcome
