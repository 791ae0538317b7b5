"""Reads items of one field straight into the caller's memory, with the places of all items at hand.

Guarantee: what comes is what ``EntryReader`` gives. A read that ends early, or that the system refuses, is left to
it: it names the sample, the shard and the fix. Cost: one ``preadv`` per item; 12 bytes of memory per item.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import Snapshot

Ints = NDArray[np.integer]
Checksum = Literal["first", "always"]
Place = tuple[int, int, int]
"""Descriptor of a shard, first byte, number of bytes."""


class Items:
    """The items of one field. Picklable; opens files on first use in each process; they close when it is forgotten.

    Args:
        snapshot: Where they are.
        field: Name of the field.
        checksum: ``first`` or ``always``.
    """

    def __init__(self, snapshot: Snapshot, field: str, checksum: Checksum) -> None:
        self.snapshot, self.field, self.checksum = snapshot, field, checksum
        self._reader = EntryReader(snapshot.paths, snapshot, checksum=checksum)
        rows = snapshot.fields[field]
        self._packed, self._moves = rows.packing == "block", snapshot.pending is not None
        self._places: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None
        self._proven, self._all_proven = np.zeros(len(rows), dtype=np.bool_), False

    def gather(
        self, rows: Ints, out: NDArray[np.uint8], at: Ints, size: Any, *, start: Ints | None = None, width: int = 1
    ) -> None:
        """Read items, or parts of them, into their places.

        Args:
            rows: (n,) rows of the field.
            out: Memory of bytes; bytes between the items are left as they are.
            at: (n,) byte of ``out`` at which each begins.
            size: Bytes of each: a number, or (n,).
            start: (n,) first element that is wanted of each; by default the items are read whole.
            width: Bytes of an element.

        Raises:
            CorruptEntryError: An entry fails its check; it is named with its shard and the fix.
            MissingEntryError: A shard is gone.
        """
        reader, field = self._reader, self.field
        length = None if start is None else size // width
        if self._moves:
            reader.gather(field, rows, out, at, start=start, length=length)
            return
        new = self.checksum == "always" or not (self._all_proven or self._proven.take(rows).all())
        if new and (self._packed or start is not None):
            reader.prove(field, rows)
            self._remember(rows)
        shard, offset = self._placed()
        places = offset.take(rows) if start is None else offset.take(rows) + start * np.int64(width)
        memory, fronts = out.data, at.tolist()
        sizes = [size] * len(fronts) if isinstance(size, int) else size.tolist()
        buffers = [memory[front : front + count] for front, count in zip(fronts, sizes, strict=True)]
        shards, read = shard.take(rows).tolist(), os.preadv
        try:
            files = {number: reader.descriptor(number) for number in set(shards)}
            for number, place, count, buffer in zip(shards, places.tolist(), sizes, buffers, strict=True):
                if read(files[number], (buffer,), place) != count:
                    break
            else:
                if new and not self._packed and start is None:
                    reader.check(field, rows, buffers)
                    self._remember(rows)
                return
        except OSError:
            pass
        reader.gather(field, rows, out, at, start=start, length=length)

    @property
    def reader(self) -> EntryReader:
        """What proves and names entries."""
        return self._reader

    def places(self, rows: Ints) -> list[Place]:
        """Where items are, for reading ahead.

        Raises:
            MissingEntryError: A shard is gone.
        """
        found, reader = self._reader.segments(self.field, rows), self._reader
        parts = zip(found.shard.tolist(), found.offset.tolist(), found.bytes.tolist(), strict=True)
        return [(reader.descriptor(shard), start, size) for shard, start, size in parts if shard >= 0]

    def fresh(self) -> Items:
        """The same items with files of its own; the places are shared."""
        other = Items(self.snapshot, self.field, self.checksum)
        other._places = self._places
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return Items, (self.snapshot, self.field, self.checksum)

    def _remember(self, rows: Ints) -> None:
        """These items were proven in this process."""
        self._proven[rows] = True
        self._all_proven = bool(self._proven[0] and self._proven[-1] and self._proven.all())

    def _placed(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Shard and first byte of all items."""
        if self._places is None:
            found = self._reader.segments(self.field, np.arange(len(self.snapshot.fields[self.field])))
            self._places = found.shard, found.offset
        return self._places
