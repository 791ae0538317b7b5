"""Tells the kernel which entries come next, where the page cache does not hold them yet.

Decides nothing about what is read, only when the disk begins. A read at random places waits for the disk once per
entry; entries that were announced are fetched together, while the batch before them is being read. Guarantee:
advice cannot fail a read, and what is in memory already is asked for with a few reads of one byte per batch.
Cost: a microsecond for each of these; where the cache is cold, one call per 128 KiB to come.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import LatentcacheError
from latentcache.store.entry import HEADER_BYTES
from latentcache.store.reader import EntryReader

#: Entries of a batch that are looked at.
_LOOKS = 4
#: Kernels fetch no more than this for one piece of advice where a disk has the usual setting of 128 KiB.
_PIECE_BYTES = 128 << 10
_HAS_ADVICE = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")


class WillNeed:
    """Announces the batches of one pass. One thread uses it.

    Args:
        reader: Entries of one generation.
        rows_of: Rows of a step.
        bytes_of: Bytes of a payload, by its row.
        steps: How many there are.
        ahead: Steps that are announced before they are read.
    """

    def __init__(
        self,
        reader: EntryReader,
        rows_of: Callable[[int], NDArray[np.integer]],
        bytes_of: Callable[[int], int],
        steps: int,
        ahead: int = 2,
    ) -> None:
        self._reader, self._rows_of, self._bytes_of = reader, rows_of, bytes_of
        self._steps, self._ahead, self._next = steps, ahead, 0

    def before(self, step: int) -> None:
        """Announce what was not announced yet, up to ``ahead`` steps after this one, this one first."""
        last = min(step + self._ahead + 1, self._steps) if _HAS_ADVICE else 0
        for coming in range(max(step, self._next), last):
            self._next = coming + 1
            rows = self._rows_of(coming)
            announce(self._reader, rows, self._bytes_of(int(rows[0])))


def announce(reader: EntryReader, rows: NDArray[np.integer], payload_bytes: int) -> bool:
    """Have the kernel fetch these entries if some of them are not in memory; whether it was told to.

    Args:
        reader: Entries of one generation.
        rows: The entries.
        payload_bytes: Of each.
    """
    columns, length = reader.generation.rows, HEADER_BYTES + payload_bytes
    try:
        places = [
            (reader.descriptor(shard), offset)
            for shard, offset in zip(columns.shard.take(rows).tolist(), columns.offset.take(rows).tolist(), strict=True)
        ]
        if all(_in_memory(file, offset + length - 1) for file, offset in places[:: -(-len(places) // _LOOKS)]):
            return False
        for file, offset in sorted(places):
            for start in range(offset, offset + length, _PIECE_BYTES):
                os.posix_fadvise(file, start, min(_PIECE_BYTES, offset + length - start), os.POSIX_FADV_WILLNEED)
    except (OSError, LatentcacheError):
        return False  # the read says what is wrong, and of which entry
    return True


def _in_memory(file: int, place: int) -> bool:
    """Whether a byte can be read without waiting for a disk; a file system that cannot say counts as no."""
    try:
        os.preadv(file, (bytearray(1),), place, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            return False
        raise
    return True
