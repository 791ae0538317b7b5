"""Gathers the payloads of a batch into one piece of memory, every entry checked. docs/adr/0008.

Guarantee: header, key, shape and payload checksum of every entry are checked on every read; what comes back owns
its memory and is used again only when nobody refers to it. Anything unexpected sends the batch to the reader of
single entries, which names the sample, or finds it whole after all. By default by positional reads, which no
damaged file can turn into a signal. ``mapped`` copies from a map instead: quicker, but a file that is cut short,
or a block that cannot be read, *during* a copy ends the process (SIGBUS); before a batch it is an error as usual.
Cost: one ``preadv`` (or two copies) and one xxh3 pass per entry; headers are checked together.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import MissingEntryError
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.loader.ring import BatchRing
from latentcache.store.entry import HEADER_BYTES, numpy_dtype
from latentcache.store.headers import headers_hold, keyed_headers, payload_checksums
from latentcache.store.reader import EntryReader


class BatchGather:
    """Batches of one generation. Picklable; safe across fork and between threads.

    Args:
        reader: Entries of one generation.
        slots: Batches whose memory is kept for use again.
        mapped: Copy from a map of each shard instead of reading.
    """

    def __init__(self, reader: EntryReader, *, slots: int = 4, mapped: bool = False) -> None:
        self._reader, self._slots, self._mapped = reader, slots, mapped
        self._ring = BatchRing(slots)
        self._maps: dict[int, memoryview] = {}

    def gather(self, rows: Sequence[int], shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Payloads of the given rows.

        Args:
            rows: B rows of the generation.
            shape: Of one payload.
            dtype: Storage type, as in the recipe.

        Returns:
            (B, *shape) in memory of its own; bfloat16 as uint16.

        Raises:
            CorruptEntryError: An entry fails its check; it is named with its shard and the fix.
            MissingEntryError: A shard is gone.
            CacheDamagedError: A shard cannot be opened.
        """
        kind = numpy_dtype(dtype)
        flat = self._ring.take(len(rows) * math.prod(shape) * kind.itemsize)
        batch = flat.view(kind).reshape(len(rows), *shape)
        if not self._gather_quickly(rows, flat, shape, dtype):
            for position, row in enumerate(rows):
                self._read_one(row, batch[position])
        return batch

    def over(self, reader: EntryReader) -> BatchGather:
        """The same for another reader; nothing of it is open yet."""
        return BatchGather(reader, slots=self._slots, mapped=self._mapped)

    def __getstate__(self) -> dict[str, Any]:
        return {"reader": self._reader, "slots": self._slots, "mapped": self._mapped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["reader"], slots=state["slots"], mapped=state["mapped"])  # type: ignore[misc]

    def _gather_quickly(
        self, rows: Sequence[int], flat: NDArray[np.uint8], shape: tuple[int, ...], dtype: str
    ) -> bool:
        """Whether all entries were found whole."""
        columns = self._reader.generation.rows
        chosen = np.asarray(rows)
        keyed = keyed_headers(columns.key[chosen])
        shards, offsets = columns.shard[chosen].tolist(), columns.offset[chosen].tolist()
        heads = _slices(keyed.reshape(-1).data, len(rows), skip=KEY_BYTES)
        payloads = _slices(flat.data, len(rows))
        try:
            copy = self._copy if self._mapped else self._read
            found = copy(shards, offsets, heads, payloads)
        except (OSError, MissingEntryError):
            return False
        return found == payload_checksums(keyed) and headers_hold(keyed, shape, dtype)

    def _read(
        self, shards: list[int], offsets: list[int], heads: list[memoryview], payloads: list[memoryview]
    ) -> list[int]:
        """Checksums of the payloads that were read; fewer of them where an entry is short."""
        files = {shard: self._reader.descriptor(shard) for shard in set(shards)}
        wanted, found = HEADER_BYTES + len(payloads[0]), []
        for shard, offset, head, payload in zip(shards, offsets, heads, payloads, strict=True):
            if os.preadv(files[shard], (head, payload), offset) != wanted:
                break
            found.append(checksum(payload))  # at once: it is in the processor's cache now
        return found

    def _copy(
        self, shards: list[int], offsets: list[int], heads: list[memoryview], payloads: list[memoryview]
    ) -> list[int]:
        """As :meth:`_read`, from the maps."""
        maps = {shard: self._map(shard) for shard in set(shards)}
        length, found = len(payloads[0]), []
        for shard, offset, head, payload in zip(shards, offsets, heads, payloads, strict=True):
            view, start = maps[shard], offset + HEADER_BYTES
            if start + length > len(view):
                break
            head[:] = view[offset:start]
            payload[:] = view[start : start + length]
            found.append(checksum(payload))
        return found

    def _map(self, shard: int) -> memoryview:
        """The map of a shard whose file is still as long as it was; nothing of it where it is not."""
        file = self._reader.descriptor(shard)
        size = os.fstat(file).st_size
        if shard not in self._maps:
            if not size:
                return memoryview(b"")
            made = mmap.mmap(file, size, prot=mmap.PROT_READ)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                made.madvise(mmap.MADV_HUGEPAGE)
            self._maps.setdefault(shard, memoryview(made))
        view = self._maps[shard]
        return view if size >= len(view) else memoryview(b"")

    def _read_one(self, row: int, out: NDArray[Any]) -> None:
        try:
            self._reader.read_into(row, out)
        except MissingEntryError as error:
            name = self._reader.sample_name(row)
            raise MissingEntryError(f"the entry of {name} is gone", where=error.where, why=error.what) from error


def _slices(data: memoryview, count: int, *, skip: int = 0) -> list[memoryview]:
    """``count`` equal parts of a buffer, each without its first ``skip`` bytes."""
    size = len(data) // count
    return [data[start + skip : start + size] for start in range(0, count * size, size)]
