"""Gathers the payloads of a batch into one piece of memory, every entry checked. docs/adr/0008, docs/adr/0010.

Guarantee: shape, type and checksum of every payload are checked on every read; its header and its key, which say
what they must be, when a process first reads the entry. What comes back owns its memory and is used again only
when nobody refers to it. Anything unexpected sends the batch to the reader of single entries, which names the
sample, or finds it whole after all. By default by positional reads, which no damaged file can turn into a signal.
``mapped`` copies from a map instead: quicker, but a file that is cut short, or a block that cannot be read,
*during* a copy ends the process (SIGBUS); before a batch it is an error as usual.
Cost: one ``preadv`` (or one copy) and one xxh3 pass per entry; 10 bytes of memory per entry of the generation.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import MissingEntryError
from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.loader.ring import BatchRing, parts_of
from latentcache.store.entry import HEADER_BYTES, numpy_dtype
from latentcache.store.headers import SeenHeaders, headers_hold, keyed_headers, payload_checksums
from latentcache.store.reader import EntryReader

Rows = Sequence[int] | NDArray[np.integer]
Found = TypeVar("Found")


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
        self._seen = SeenHeaders(len(reader.generation.rows.shard))
        self._maps: dict[int, memoryview] = {}

    def gather(self, rows: Rows, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
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
        kind, count = numpy_dtype(dtype), len(rows)
        flat, payloads = self._ring.take_in_parts(count * math.prod(shape) * kind.itemsize, count)
        batch = flat.view(kind).reshape(count, *shape)
        if not self._gather_quickly(np.asarray(rows), payloads, shape, dtype):
            for position, row in enumerate(rows):
                self._read_one(int(row), batch[position])
        return batch

    def memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """(num_bytes,) of memory for a batch: used again when nobody refers to it any more."""
        return self._ring.take(num_bytes)

    def over(self, reader: EntryReader) -> BatchGather:
        """The same for another reader; nothing of it is open yet."""
        return BatchGather(reader, slots=self._slots, mapped=self._mapped)

    def __getstate__(self) -> dict[str, Any]:
        return {"reader": self._reader, "slots": self._slots, "mapped": self._mapped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["reader"], slots=state["slots"], mapped=state["mapped"])  # type: ignore[misc]

    def _gather_quickly(
        self, rows: NDArray[Any], payloads: list[memoryview], shape: tuple[int, ...], dtype: str
    ) -> bool:
        """Whether all entries were found whole."""
        columns = self._reader.generation.rows
        shards, offsets = columns.shard.take(rows).tolist(), columns.offset.take(rows).tolist()
        copy = self._copy if self._mapped else self._read
        try:
            expected = self._seen.checksums(rows, shape, dtype)
            if expected is None:
                return self._gather_with_headers(rows, shards, offsets, payloads, shape, dtype)
            found = copy(shards, offsets, payloads)
        except (OSError, MissingEntryError):
            return False
        return found == expected

    def _gather_with_headers(
        self,
        rows: NDArray[Any],
        shards: list[int],
        offsets: list[int],
        payloads: list[memoryview],
        shape: tuple[int, ...],
        dtype: str,
    ) -> bool:
        """The same where an entry was not read before: its header is read with it, and believed from then on."""
        keyed = keyed_headers(self._reader.generation.rows.key.take(rows, axis=0))
        heads = parts_of(keyed.reshape(-1).data, len(rows), skip=KEY_BYTES)
        copy = self._copy_both if self._mapped else self._read_both
        found, expected = copy(shards, offsets, heads, payloads), payload_checksums(keyed)
        if found != expected or not headers_hold(keyed, shape, dtype):
            return False
        self._seen.remember(rows, shape, dtype, expected)
        return True

    def _read(self, shards: list[int], offsets: list[int], payloads: list[memoryview]) -> list[int]:
        """Checksums of the payloads that were read; fewer of them where an entry is short."""
        wanted, read, check, header = len(payloads[0]), os.preadv, checksum, HEADER_BYTES
        return [
            check(payload)  # each at once: it is in the processor's cache now
            for file, offset, payload in zip(self._files(shards), offsets, payloads, strict=True)
            if read(file, (payload,), offset + header) == wanted
        ]

    def _read_both(
        self, shards: list[int], offsets: list[int], heads: list[memoryview], payloads: list[memoryview]
    ) -> list[int]:
        """As :meth:`_read`, headers too."""
        wanted, found = HEADER_BYTES + len(payloads[0]), []
        for file, offset, head, payload in zip(self._files(shards), offsets, heads, payloads, strict=True):
            if os.preadv(file, (head, payload), offset) != wanted:
                break
            found.append(checksum(payload))
        return found

    def _copy(self, shards: list[int], offsets: list[int], payloads: list[memoryview]) -> list[int]:
        """As :meth:`_read`, from the maps."""
        skip, end, check, found = HEADER_BYTES, HEADER_BYTES + len(payloads[0]), checksum, []
        for view, offset, payload in zip(self._views(shards), offsets, payloads, strict=True):
            if offset + end > len(view):
                break
            payload[:] = view[offset + skip : offset + end]
            found.append(check(payload))
        return found

    def _copy_both(
        self, shards: list[int], offsets: list[int], heads: list[memoryview], payloads: list[memoryview]
    ) -> list[int]:
        """As :meth:`_copy`, headers too."""
        for view, offset, head in zip(self._views(shards), offsets, heads, strict=True):
            if offset + HEADER_BYTES > len(view):
                return []
            head[:] = view[offset : offset + HEADER_BYTES]
        return self._copy(shards, offsets, payloads)

    def _files(self, shards: list[int]) -> list[int]:
        """A descriptor for each."""
        return _for_each(self._reader.descriptor, shards)

    def _views(self, shards: list[int]) -> list[memoryview]:
        """A map for each."""
        return _for_each(self._map, shards)

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


def _for_each(find: Callable[[int], Found], shards: list[int]) -> list[Found]:
    """What is found for each shard, which is asked for once."""
    found = {shard: find(shard) for shard in set(shards)}
    return list(found.values()) * len(shards) if len(found) == 1 else [found[shard] for shard in shards]
