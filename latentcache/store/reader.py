"""Reads entries of a generation into memory of the caller, checking every one.

Guarantee: what comes back is what was written, for the key that was asked for, or an error that names sample,
shard and fix. Nothing is mapped and LMDB is not opened: positional reads from a sealed shard cannot raise
SIGBUS when a file is cut short, need no lock, and are safe across ``fork``, threads and pickling.
Cost: one ``preadv`` and one xxh3 pass per entry.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, MissingEntryError
from latentcache.identity.content import checksum
from latentcache.store.durable import open_file
from latentcache.store.entry import HEADER_BYTES, EntryHeader, numpy_dtype, unpack_header
from latentcache.store.generation import Generation
from latentcache.store.layout import CacheLayout


class EntryReader:
    """Random access to the rows of one generation. Picklable; opens its files on first use in each process.

    A reader that is forgotten closes its files, so that none is left open by those who never close.
    """

    def __init__(self, layout: CacheLayout, generation: Generation) -> None:
        self.layout, self.generation = layout, generation
        self._files: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._files).atexit = False  # the system does it then

    def ready(self, rows: Sequence[int] | NDArray[np.integer]) -> None:
        """Return when these rows can be read: at once, unless the build that makes them is still under way.

        Raises:
            MissingEntryError: A sample cannot be used after all.
            NotYetEncodedError: It did not come in time.
        """
        if self.generation.arrivals is not None:
            self.generation.arrivals.wait(rows)

    def header(self, row: int) -> EntryHeader:
        """The header of one row.

        Raises:
            CorruptEntryError: It fails its check.
            MissingEntryError: Its shard is gone.
        """
        return self._header(row, self._read(row, [bytearray(HEADER_BYTES)])[0])

    def read(self, row: int) -> tuple[EntryHeader, NDArray[Any]]:
        """Header and payload of one row, the payload as a new array of the header's shape.

        Raises:
            CorruptEntryError: Header, shape or payload fails its check.
            MissingEntryError: Its shard is gone.
        """
        header = self.header(row)
        size = os.fstat(self.descriptor(int(self.generation.rows.shard[row]))).st_size
        if int(self.generation.rows.offset[row]) + HEADER_BYTES + header.payload_bytes > size:
            raise self._corrupt(row, f"the shard ends early: {size} bytes")
        payload = np.empty(header.shape, dtype=numpy_dtype(header.dtype))
        self.read_into(row, payload)
        return header, payload

    def read_into(self, row: int, out: NDArray[Any]) -> EntryHeader:
        """Read one row's payload into ``out``, which must have its exact shape and type.

        Raises:
            CorruptEntryError: Header, shape or payload fails its check.
            MissingEntryError: Its shard is gone.
        """
        payload: memoryview = out.reshape(-1).view(np.uint8).data
        head = self._read(row, [bytearray(HEADER_BYTES), payload])[0]
        header = self._header(row, head)
        if header.shape != out.shape or numpy_dtype(header.dtype) != out.dtype:
            found = f"{header.dtype} {list(header.shape)}"
            raise self._corrupt(row, f"shape: expected {out.dtype} {list(out.shape)}, found {found}")
        if checksum(payload) != header.payload_checksum:
            raise self._corrupt(row, f"payload checksum: expected {header.payload_checksum:016x}")
        return header

    def descriptor(self, shard: int) -> int:
        """Descriptor of a shard, opened on first use; one inherited by a fork stays valid for positional reads.

        There is no lock, because a fork could inherit it held; two threads that open a shard at once keep one.

        Raises:
            MissingEntryError: The shard is gone.
            CacheDamagedError: It cannot be opened.
        """
        if shard < 0:
            raise MissingEntryError("an entry is still to come", where=str(self.layout.root))
        if shard not in self._files:
            path = self._path(shard)
            try:
                opened = open_file(path)
            except FileNotFoundError:
                raise MissingEntryError("a shard of this cache is gone", where=path) from None
            except OSError as error:
                raise CacheDamagedError("a shard cannot be read", where=path, why=str(error)) from error
            if self._files.setdefault(shard, opened) != opened:
                os.close(opened)
        return self._files[shard]

    def pass_over(self, shard: int, buffer: bytearray) -> int:
        """Read a shard from front to end into memory that is used again and again; returns its bytes.

        Raises:
            MissingEntryError: The shard is gone.
            CacheDamagedError: It cannot be opened, or not be read to its end.
        """
        file, place = self.descriptor(shard), 0
        try:
            while found := os.preadv(file, (buffer,), place):
                place += found
        except OSError as error:
            raise CacheDamagedError("a shard cannot be read", where=self._path(shard), why=str(error)) from error
        return place

    def sample_name(self, row: int) -> str:
        """Name of the sample a row belongs to."""
        return str(self.generation.samples.names[int(self.generation.rows.sample[row])])

    def close(self) -> None:
        """Close the files. The reader opens them again when it is asked for more."""
        _close_all(self._files)

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "generation": self.generation}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["layout"], state["generation"])  # type: ignore[misc]

    def _read(self, row: int, buffers: list[Any]) -> list[Any]:
        shard = int(self.generation.rows.shard[row])
        wanted = sum(len(buffer) for buffer in buffers)
        try:
            found = os.preadv(self.descriptor(shard), buffers, int(self.generation.rows.offset[row]))
        except OSError as error:
            raise self._corrupt(row, str(error)) from error
        if found != wanted:
            raise self._corrupt(row, f"the shard ends early: expected {wanted} bytes, found {found}")
        return buffers

    def _header(self, row: int, data: bytearray) -> EntryHeader:
        try:
            return unpack_header(bytes(data), self.generation.rows.key[row].tobytes())
        except CorruptEntryError as error:
            raise self._corrupt(row, error.why) from error

    def _path(self, shard: int) -> str:
        return str(self.layout.shards / self.generation.shards[shard] / "data.mdb")

    def _corrupt(self, row: int, why: str) -> CorruptEntryError:
        name = self.sample_name(row)
        return CorruptEntryError(
            f"the entry of {name} is damaged",
            sample=name,
            key=self.generation.rows.key[row].tobytes().hex(),
            where=f"{self._path(int(self.generation.rows.shard[row]))}:{int(self.generation.rows.offset[row])}",
            why=why,
        )


def _close_all(files: dict[int, int]) -> None:
    while files:
        os.close(files.popitem()[1])
