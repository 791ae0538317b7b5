"""Decode threads: read a file once, hash and decode the same buffer, cut it for every bucket it goes to.

Guarantee: the key is made from the bytes that were decoded; a file that cannot be used becomes a refusal with
its cause and never stops the build; memory is bounded by the byte budget, which is taken before a file is read.
Threads are enough: simplejpeg, Pillow and torch's resize all release the interpreter lock (2 threads and 2
processes had the same throughput and CPU cost).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from latentcache.errors import LatentcacheError, UnusableSampleError
from latentcache.geometry.buckets import BucketTable
from latentcache.geometry.placement import Placement, mirrored
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.identity.key import FLIPPED, VARIANT_BYTE
from latentcache.pipeline.budget import ByteBudget
from latentcache.pipeline.decode import decode
from latentcache.pipeline.headers import picture_size, refused
from latentcache.pipeline.resize import pixel_hash, resize_crop, thread_setup
from latentcache.pipeline.survey import keys_of, placements_for
from latentcache.pipeline.work import Failed, Looked, Piece, Planned, refuse, refused_by
from latentcache.recipe import Recipe
from latentcache.sources.reading import read_source
from latentcache.store.catalog import Catalog

#: Bytes that decoding holds per source pixel at its peak: Pillow's picture, its RGB copy and the array.
_DECODE_BYTES = 8
#: How long the end of a build waits for samples in hand, in seconds; the threads end with the process anyway.
_LAST_S = 3.0
#: RGB, one byte each.
_RGB_BYTES = 3
#: How much decode threads give way to the thread that encodes, which nobody can replace. On two cores beside an
#: encoder of one thread: 0.89 of the encoder's own rate instead of 0.79 (medians of five rounds, better in four).
_NICER = 10


class Claims:
    """Which keys need no work: committed ones, and those that another picture of this run already claimed."""

    def __init__(self, committed: Callable[[bytes], bool]) -> None:
        self._committed = committed
        self._claimed: set[bytes] = set()
        self._lock = threading.Lock()

    def take(self, key: bytes) -> bool:
        """Claim a key; False when nobody needs to make it any more."""
        if self._committed(key):
            return False
        with self._lock:
            if key in self._claimed:
                return False
            self._claimed.add(key)
            return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Everything a decode thread needs to know."""

    root: Path
    recipe: Recipe
    tables: Sequence[BucketTable]
    """Those of the recipe."""
    max_pixels: int
    catalog: Catalog
    claims: Claims
    budget: ByteBudget

    def look(self, planned: Planned) -> Looked | Failed:
        """Read, hash and, where an entry is missing, decode one sample.

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
            pieces = self._pieces(data, sample.name, content, size, placements)
        except UnusableSampleError as error:
            return Failed(index=planned.index, refusal=refused_by(sample, error, stat=memo, content=content))
        except MemoryError:
            detail = f"there is not enough memory to decode {planned.size} pixels"
            refusal = refuse(sample, "out-of-memory", detail, stat=memo, content=content)
            return Failed(index=planned.index, refusal=refusal)
        return Looked(index=planned.index, content=content, memo=memo, size=size, pieces=pieces)

    def _pieces(
        self, data: bytes, name: str, content: bytes, size: Size, placements: Sequence[Placement]
    ) -> tuple[Piece, ...]:
        """Decode once, cut for each placement whose entry is missing, mirror the cut where that one is missing."""
        keys = keys_of(content, placements, self.recipe)
        stored = [*placements, *map(mirrored, placements)][: len(keys)]
        wanted = [(key, placement) for key, placement in zip(keys, stored, strict=True) if self.claims.take(key)]
        if not wanted:
            return ()
        profile = self.recipe.pixels
        picture = decode(data, profile, max_pixels=self.max_pixels)
        found = Size(picture.shape[0], picture.shape[1])
        if found != size:
            raise refused("decoder-error", f"the header says {size}, the decoder gives {found}")
        pieces = []
        cuts = {}
        buckets = {placement.bucket for _, placement in wanted}
        for placement in placements:
            if placement.bucket in buckets:
                cuts[placement.bucket] = resize_crop(picture, placement, profile.resample)
        for key, placement in wanted:
            pixels = cuts[placement.bucket]
            if key[VARIANT_BYTE] == FLIPPED:
                pixels = np.ascontiguousarray(pixels[:, ::-1])
            pixels_hash = pixel_hash(pixels)
            pieces.append(
                Piece(
                    name=name,
                    key=key,
                    pixels=pixels,
                    pixel_hash=pixels_hash,
                    placement=placement,
                    original_size=size,
                    content=content,
                    twin=self.catalog.with_pixels(pixels_hash, placement.bucket, self.recipe.key_part),
                )
            )
        return tuple(pieces)


@dataclass(slots=True)
class DecodePool:
    """Threads that turn planned samples into outcomes, in about the order of the plan."""

    decoder: Decoder
    num_threads: int
    outcomes: queue.SimpleQueue[Looked | Failed | BaseException] = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self, todo: Sequence[Planned]) -> None:
        """Begin with the plan."""
        work = iter(todo)
        lock = threading.Lock()
        for number in range(self.num_threads):
            thread = threading.Thread(target=self._run, args=(work, lock), name=f"decode-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Take no new sample, wake whoever waits for memory, and wait a while for the samples in hand."""
        self._stop.set()
        self.decoder.budget.close()
        deadline = time.monotonic() + _LAST_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self, work: Iterator[Planned], lock: threading.Lock) -> None:
        thread_setup()
        give_way()
        while not self._stop.is_set():
            with lock:
                planned = next(work, None)
            if planned is None:
                return
            try:
                outcome = self._within_budget(planned)
            except BaseException as error:  # noqa: BLE001 - a dead thread would hang the build: the main loop re-raises
                outcome = error
            if outcome is not None:
                self.outcomes.put(outcome)

    def _within_budget(self, planned: Planned) -> Looked | Failed | BaseException | None:
        """Look at one sample while holding the bytes it needs; None when the build is ending."""
        budget = self.decoder.budget
        areas = sum(placement.bucket.area for placement in planned.placements)
        cut = _RGB_BYTES * areas * self.decoder.recipe.variants
        reserved = _DECODE_BYTES * planned.size.area + cut
        if not budget.acquire(reserved):
            return None
        kept = 0
        try:
            outcome = self.decoder.look(planned)
            if isinstance(outcome, Looked):
                kept = sum(piece.pixels.nbytes for piece in outcome.pieces)
            return outcome
        finally:
            budget.release(reserved - kept)


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
