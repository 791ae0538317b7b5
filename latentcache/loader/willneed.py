"""Fetches what comes next from the disk, where the page cache does not hold it yet. docs/adr/0010.

Decides nothing about what is read, only when the disk begins. A read at random places waits for the disk once per
entry; entries that were announced are fetched together, while the batches before them are being read. Guarantee:
nothing here can fail a read or raise a signal. Cost: what is in memory already, one to four reads of one byte per
batch; what is not, one call per 128 KiB. A file system that cannot say what is in memory is asked once in a pass:
what lies in memory itself (tmpfs) is never announced, all else once, in the first pass (overlayfs, NFS).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterable

from latentcache.errors import LatentcacheError
from latentcache.loader.gather import Rows
from latentcache.store.entry import HEADER_BYTES
from latentcache.store.reader import EntryReader

#: Entries of a batch that are looked at; one is, where so many batches in a row were found in memory: a look costs
#: 2 us, and four of them a twentieth of reading a batch of 32 KiB.
_LOOKS = 4
_CALM = 8
#: Kernels fetch no more than this for one piece of advice where a disk has the usual setting of 128 KiB.
_PIECE_BYTES = 128 << 10
_WARM_BYTES = 4 << 20
_HAS_ADVICE = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")

#: Where a look puts what it finds; nobody reads it.
_BYTE = (bytearray(1),)

Place = tuple[int, int]
"""Descriptor of a shard, and where an entry starts in it."""


class WillNeed:
    """Announces the batches of one pass. Threads may share it: at worst a batch is announced twice.

    Args:
        reader: Entries of one generation.
        rows_of: Rows of a step.
        bytes_of: Bytes of a payload, by its row.
        steps: How many there are.
        ahead: Steps that are announced before they are read.
        blind: Announce also where the file system cannot say what is in memory; for a first pass.
    """

    def __init__(
        self,
        reader: EntryReader,
        rows_of: Callable[[int], Rows],
        bytes_of: Callable[[int], int],
        steps: int,
        *,
        ahead: int = 2,
        blind: bool = True,
    ) -> None:
        self._reader, self._rows_of, self._bytes_of = reader, rows_of, bytes_of
        self._steps, self._ahead, self._next, self._calm, self._blind = steps, ahead, 0, 0, blind
        self._assumed: dict[int, bool] = {}

    def before(self, step: int) -> None:
        """Announce what was not announced yet, up to ``ahead`` steps after this one, this one first."""
        last = min(step + self._ahead + 1, self._steps) if _HAS_ADVICE else 0
        for coming in range(max(step, self._next), last):
            self._next = coming + 1
            rows = self._rows_of(coming)
            with contextlib.suppress(OSError, LatentcacheError):  # the read says what is wrong, and of which entry
                if self._calm >= _CALM and self._holds(int(rows[coming % len(rows)]), HEADER_BYTES):
                    continue  # at another place of the batch each time
                length = HEADER_BYTES + self._bytes_of(int(rows[0]))
                if all(self._holds(int(row), length - 1) for row in rows[:: -(-len(rows) // _LOOKS)]):
                    self._calm += 1
                else:
                    self._calm = 0
                    announce(places_of(self._reader, rows), length)

    def _holds(self, row: int, byte: int) -> bool:
        """Whether memory holds a byte of an entry, as far as can be known; one that is still to come counts as held.

        Raises:
            MissingEntryError: Its shard is gone.
            CacheDamagedError: It cannot be opened.
            OSError: It cannot be read.
        """
        columns = self._reader.generation.rows
        shard = int(columns.shard[row])
        if shard < 0:
            return True
        file = self._reader.descriptor(shard)
        if file not in self._assumed:
            found = in_memory(file, int(columns.offset[row]) + byte)
            if found is not None:
                return found
            self._assumed[file] = not self._blind or is_memory(file)
        return self._assumed[file]


def places_of(reader: EntryReader, rows: Rows) -> list[Place]:
    """Where entries lie.

    Raises:
        MissingEntryError: A shard is gone.
        CacheDamagedError: It cannot be opened.
    """
    columns = reader.generation.rows
    pairs = zip(columns.shard.take(rows).tolist(), columns.offset.take(rows).tolist(), strict=True)
    return [(reader.descriptor(shard), start) for shard, start in pairs if shard >= 0]  # -1: still to come


def announce(places: list[Place], length: int) -> None:
    """Have the kernel begin to fetch entries of this length.

    Raises:
        OSError: A file cannot be read.
    """
    for file, start in sorted(places):
        for piece in range(start, start + length, _PIECE_BYTES):
            os.posix_fadvise(file, piece, min(_PIECE_BYTES, start + length - piece), os.POSIX_FADV_WILLNEED)


def in_memory(file: int, place: int) -> bool | None:
    """Whether a byte can be read without waiting for a disk; None where the file system cannot say.

    Raises:
        OSError: It cannot be read at all.
    """
    try:
        os.preadv(file, _BYTE, place, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        if error.errno == errno.EOPNOTSUPP:
            return None
        raise
    return True


def is_memory(file: int) -> bool:
    """Whether a file lies in memory and on no disk (tmpfs): such files and no others have seals (fcntl(2))."""
    try:
        fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def warm(reader: EntryReader, shards: Iterable[int]) -> int:
    """Read shards once from front to end, so that the page cache holds them, in large pages where it can.

    Returns:
        Bytes read.

    Raises:
        MissingEntryError: A shard is gone.
        CacheDamagedError: It cannot be opened or read.
    """
    buffer, read = bytearray(_WARM_BYTES), 0
    for shard in shards:
        read += reader.pass_over(shard, buffer)
    return read
