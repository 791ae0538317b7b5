"""Reads documents of a token cache: one positional read each, from a block that is checked before its first use.

Guarantee: ids that come back are those that were written, or an error names the document, the file and the fix. A
block is held against its key, its checksum and the columns when a process first reads from it; sealed shards do not
change after that. Nothing is mapped and LMDB is not opened, so a file that is cut short cannot end the process, and
the reader is safe across ``fork``, ``spawn``, threads and pickling. Cost: 1 us and one copy a document, and once a
process 256 kB of reading and hashing for each block.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, CorruptEntryError, MissingEntryError, StoreError, UsageError
from latentcache.identity.content import checksum
from latentcache.store.blocks import Block, unpack_block
from latentcache.store.documents import Documents
from latentcache.store.durable import open_file
from latentcache.store.entry import HEADER_BYTES, numpy_dtype, unpack_header
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import TokenGeneration

Ints = NDArray[np.integer]
Read = tuple[int, int, int, int]
"""Shard, place in it, number of bytes, and where they go, all in bytes."""

#: Up to so many pieces plain numbers are quicker than arrays: for 16 padded rows 33 us instead of 52.
_FEW = 64


class TokenReader:
    """The documents of one generation, as a ``TokenStore``. Picklable; opens its files on first use in each process.

    Args:
        layout: The cache.
        generation: Whose documents they are.
    """

    def __init__(self, layout: CacheLayout, generation: TokenGeneration) -> None:
        self.layout, self.generation = layout, generation
        self.documents: Documents = generation.documents
        self.dtype = numpy_dtype(generation.recipe.dtype)
        self._checked = np.zeros(len(generation.blocks), dtype=np.bool_)
        # Where the first id of each block lies in its file.
        self._places = generation.blocks.offset.astype(np.int64) + HEADER_BYTES
        documents = generation.documents
        #: Where the first id of each document lies in its file, and which file that is.
        self._starts = self._places[documents.block] + documents.start.astype(np.int64) * self.dtype.itemsize
        self._shards = generation.blocks.shard[documents.block]
        self._whole_checked = False
        self._files: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._files).atexit = False  # the system does it then

    def ids(self, document: int) -> NDArray[Any]:
        """(n,) ids of one document, read-only.

        Raises:
            CorruptEntryError: Its block fails its check.
            MissingEntryError: Its shard is gone.
            CacheDamagedError: Its shard cannot be read.
        """
        found = np.empty(int(self.documents.length[document]), dtype=self.dtype)
        front = np.zeros(1, dtype=np.int64)
        self.gather(np.array([document]), front, np.array([len(found)]), found, front)
        found.flags.writeable = False
        return found

    def gather(
        self,
        document: NDArray[np.integer],
        start: NDArray[np.integer],
        length: NDArray[np.integer],
        out: NDArray[Any],
        at: NDArray[np.integer],
    ) -> None:
        """Read pieces of documents straight into their places in the caller's memory.

        Args:
            document: (P,) which document each piece is of.
            start: (P,) first token of the piece in its document.
            length: (P,) tokens in the piece; pieces lie inside their documents.
            out: (n,) of the reader's ``dtype``, C-contiguous; what lies between the pieces is left as it is.
            at: (P,) where each piece begins in ``out``.

        Errors as :meth:`ids`.
        """
        if not self._whole_checked:
            self._check_first(self.documents.block[document])
        memory, read, files, width = out.view(np.uint8).data, os.preadv, self._files, self.dtype.itemsize
        pieces = (self._shards.take(document), self._starts.take(document), start, length, at)
        front, why = 0, "the shard ends early"
        try:
            for shard, place, size, front in (_few if len(document) <= _FEW else _many)(*pieces, width):
                file = files.get(shard) or self._descriptor(shard)
                if read(file, (memory[front : front + size],), place) != size:
                    break
            else:
                return
        except OSError as error:
            why = str(error)
        piece = int(np.flatnonzero(at * width == front)[0])
        raise self._corrupt(int(self.documents.block[document[piece]]), why)

    def ready(self, documents: NDArray[np.integer]) -> Documents:
        """Return when these documents of a build that is under way can be read, with columns of just these.

        Args:
            documents: (n,) their numbers.

        Raises:
            MissingEntryError: A record cannot be used after all.
            NotYetEncodedError: It did not come in time.
            UsageError: The build has ended, so all of them can be read.
        """
        generation = self.generation
        if generation.arrivals is None or generation.expected is None:
            raise UsageError("waiting for documents of a finished build", fix="read them")
        generation.arrivals.wait(documents)
        found, offsets = generation.expected.some(documents), generation.blocks.offset
        first = offsets[found.block].astype(np.int64) + HEADER_BYTES
        self._starts[documents] = first + found.start.astype(np.int64) * self.dtype.itemsize
        self._shards[documents] = generation.blocks.shard[found.block]
        return found

    def check(self, block: int) -> Block:
        """Read a whole block and hold it against its key and the columns. Errors as :meth:`ids`."""
        found = self._whole(block)
        self._checked[block] = True
        return found

    def close(self) -> None:
        """Close the files. The reader opens them again when it is asked for more."""
        _close_all(self._files)

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "generation": self.generation}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["layout"], state["generation"])  # type: ignore[misc]

    def _whole(self, block: int) -> Block:
        blocks = self.generation.blocks
        key, file, place = (
            blocks.key[block].tobytes(),
            self._descriptor(int(blocks.shard[block])),
            int(blocks.offset[block]),
        )
        try:
            header = unpack_header(os.pread(file, HEADER_BYTES, place), key)
            if header.recipe_id != self.generation.recipe.recipe_id:
                raise CorruptEntryError("another recipe", why="it was made by another recipe")
            if place + HEADER_BYTES + header.payload_bytes > os.fstat(file).st_size:
                raise CorruptEntryError("cut short", why="the shard ends early")
            payload = os.pread(file, header.payload_bytes, place + HEADER_BYTES)
            if checksum(payload) != header.payload_checksum:
                raise CorruptEntryError("checksum", why=f"payload checksum: expected {header.payload_checksum:016x}")
            found = unpack_block(header, payload)
        except (OSError, StoreError) as error:
            raise self._corrupt(block, getattr(error, "why", "") or str(error)) from error
        if found.ids.dtype != self.dtype or len(found.ids) != blocks.tokens[block]:
            raise self._corrupt(block, f"expected {blocks.tokens[block]} ids of {self.dtype}, found {len(found.ids)}")
        return found

    def _check_first(self, blocks: NDArray[np.int32]) -> None:
        """Check those blocks that this process has not read from yet."""
        if not self._checked[blocks].all():
            for block in np.unique(blocks[~self._checked[blocks]]).tolist():
                self.check(block)
            self._whole_checked = bool(self._checked.all())

    def _descriptor(self, shard: int) -> int:
        """Descriptor of a shard; one inherited by a fork stays valid for positional reads.

        There is no lock, because a fork could inherit it held; two threads that open a shard at once keep one.
        """
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

    def _path(self, shard: int) -> str:
        return str(self.layout.shards / self.generation.shards[shard] / "data.mdb")

    def _corrupt(self, block: int, why: str) -> CorruptEntryError:
        blocks = self.generation.blocks
        holding = np.flatnonzero(self.generation.documents.block == block)
        name = self.documents.where(int(holding[0])) if len(holding) else ""
        more = f" and {len(holding) - 1} more" if len(holding) > 1 else ""
        return CorruptEntryError(
            f"the block of {name}{more} is damaged",
            sample=name,
            key=blocks.key[block].tobytes().hex(),
            where=f"{self._path(int(blocks.shard[block]))}:{int(blocks.offset[block])}",
            why=why,
        )


def _few(shard: Ints, place: Ints, start: Ints, length: Ints, at: Ints, width: int) -> Iterator[Read]:
    """A read for each piece."""
    columns = (column.tolist() for column in (shard, place, start, length, at))
    for file, begin, first, count, front in zip(*columns, strict=True):
        yield file, begin + first * width, count * width, front * width


def _many(shard: Ints, place: Ints, start: Ints, length: Ints, at: Ints, width: int) -> Iterator[Read]:
    """The same, and what lies together in memory and in the file is read at once."""
    places, sizes, fronts = (place + start.astype(np.int64) * width, length.astype(np.int64) * width, at * width)
    follow = (fronts[1:] == fronts[:-1] + sizes[:-1]) & (places[1:] == places[:-1] + sizes[:-1])
    first = np.flatnonzero(np.append(True, ~(follow & (shard[1:] == shard[:-1]))))
    columns = (shard[first], places[first], np.add.reduceat(sizes, first), fronts[first])
    return zip(*(column.tolist() for column in columns), strict=True)


def _close_all(files: dict[int, int]) -> None:
    while files:
        os.close(files.popitem()[1])
