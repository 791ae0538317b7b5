"""What a worker is doing at this moment, in memory that it shares with its build and that outlives it.

A worker writes the stage and the samples of a step here before it takes it, which costs 2 µs and no system call.
When it dies, or does not move, the build reads here what it was about. Guarantee: a step that has begun is on the
board, whatever kills the process in it. Linux: an anonymous file in memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

#: Stages, as numbers on the board.
IDLE, DECODING, ENCODING, OPENING = range(4)
#: Slot of the device loop, and the first of the decode threads'.
DEVICE, FIRST_DECODER = 0, 1
#: Samples that a slot has room for; a batch is smaller. Those beyond would not be suspected.
_ROOM = 1024
_STEP, _STAGE, _COUNT, _ITEMS = 0, 1, 2, 3
_WIDTH = _ITEMS + _ROOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """One step that has begun and not ended."""

    slot: int
    stage: int
    step: int
    """Goes up with every step of this slot, so two looks tell whether it has moved."""
    items: tuple[int, ...]
    """Indices of samples."""


class Board:
    """One row of numbers for each thread that takes steps, and a heartbeat.

    Args:
        num_decoders: Decode threads.
        descriptor: File to share; memory of this process alone where there is none.
    """

    def __init__(self, num_decoders: int, descriptor: int | None = None) -> None:
        rows = 1 + FIRST_DECODER + num_decoders
        if descriptor is None:
            self._rows = np.zeros((rows, _WIDTH), dtype=np.int64)
            return
        size = 8 * rows * _WIDTH
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._rows = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.int64).reshape(rows, _WIDTH)

    @contextmanager
    def doing(self, slot: int, stage: int, items: Sequence[int] = ()) -> Iterator[None]:
        """Say what this thread does in the block."""
        row = self._rows[1 + slot]
        count = min(len(items), _ROOM)
        row[_ITEMS : _ITEMS + count] = items[:count]
        row[_COUNT] = count
        row[_STEP] += 1
        row[_STAGE] = stage
        try:
            yield
        finally:
            row[_STAGE] = IDLE

    def beat(self) -> None:
        """Say that the process is alive."""
        self._rows[0, _STEP] += 1

    @property
    def beats(self) -> int:
        """How often it has said so."""
        return int(self._rows[0, _STEP])

    def steps(self) -> list[Doing]:
        """All steps that have begun and not ended."""
        found = []
        for slot, row in enumerate(self._rows[1:]):
            if row[_STAGE] != IDLE:
                items = tuple(row[_ITEMS : _ITEMS + int(row[_COUNT])].tolist())
                found.append(Doing(slot=slot, stage=int(row[_STAGE]), step=int(row[_STEP]), items=items))
        return found


def shared_descriptor() -> int:
    """A file in memory for a board that two processes share; closed by the caller."""
    return os.memfd_create("latentcache-board", os.MFD_CLOEXEC)
