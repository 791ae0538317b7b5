"""A process that reads and checks batches for a training process, into memory that both of them see. docs/adr/0031.

Decides nothing: a message says which entries of which shards go where, the answer is one byte, whether all of them
were found whole. It copies from maps of the shards, which is the quickest way there is; a shard that is cut short
during a copy ends this process (SIGBUS) and not the one that trains, which then reads the batch itself and names the
sample. Guarantee: an answer of 1 says that header, key, shape, type and checksum of every entry were held against
what lies in the shared memory now. Ends when the other end of its socket is closed. Cost: 0.2 s and 40 MB.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import struct
import sys
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from latentcache.identity.content import checksum
from latentcache.identity.key import KEY_BYTES
from latentcache.loader.ring import parts_of
from latentcache.store.durable import open_file
from latentcache.store.entry import HEADER_BYTES, MAX_DIMENSIONS
from latentcache.store.headers import headers_hold, keyed_headers, payload_checksums

#: Number and bytes of the shared memory, where in it, payload bytes, entries, length of the type's name, dimensions,
#: shape; the name of the type follows, then shard (i4), offset (u8) and key of the entries, column by column.
REQUEST = struct.Struct(f"<QQQQIII{MAX_DIMENSIONS}I")
#: What an entry takes in a request.
ENTRY_BYTES = 4 + 8 + KEY_BYTES
READY, WHOLE, NOT_WHOLE = b"r", b"1", b"0"
#: Pieces of shared memory that stay mapped, those that were sent last; who asks counts along and sends each once.
MEMORIES = 32
_MOST_BYTES = 1 << 20


class ReaderProcess:
    """What a message is answered by.

    Args:
        shards: Paths of the data files of the shards.
    """

    def __init__(self, shards: Sequence[str]) -> None:
        self._shards = shards
        self._maps: dict[int, tuple[int, memoryview]] = {}
        self._memories: OrderedDict[int, memoryview] = OrderedDict()

    def remember(self, message: bytes, file: int) -> None:
        """Map the shared memory that a request names.

        Args:
            message: As :data:`REQUEST` says.
            file: Descriptor of the memory; it is closed.
        """
        number, size, *_ = REQUEST.unpack_from(message)
        try:
            self._memories[number] = memoryview(mmap.mmap(file, size))
        finally:
            os.close(file)
        if len(self._memories) > MEMORIES:
            self._memories.popitem(last=False)

    def answer(self, message: bytes) -> bool:
        """Whether the entries of one request were found whole, and lie in the memory now.

        Args:
            message: As :data:`REQUEST` says.

        Raises:
            OSError: A shard cannot be opened or mapped.
        """
        number, _, start, payload_bytes, count, name_bytes, dimensions, *shape = REQUEST.unpack_from(message)
        memory = self._memories[number][start : start + count * payload_bytes]
        dtype = message[REQUEST.size : REQUEST.size + name_bytes].decode("ascii")
        columns = memoryview(message)[REQUEST.size + name_bytes :]
        shards = np.frombuffer(columns, "<i4", count).tolist()
        offsets = np.frombuffer(columns, "<u8", count, 4 * count).tolist()
        keyed = keyed_headers(np.frombuffer(columns, np.uint8, count * KEY_BYTES, 12 * count).reshape(-1, KEY_BYTES))
        heads = parts_of(keyed.reshape(-1).data, count, skip=KEY_BYTES)
        views = {shard: self._view(shard) for shard in set(shards)}
        found = []
        for shard, offset, head, payload in zip(shards, offsets, heads, parts_of(memory, count), strict=True):
            view, first = views[shard], offset + HEADER_BYTES
            if first + payload_bytes > len(view):
                return False
            head[:] = view[offset:first]
            payload[:] = view[first : first + payload_bytes]
            found.append(checksum(payload))  # at once: it is in the processor's cache now
        return found == payload_checksums(keyed) and headers_hold(keyed, tuple(shape[:dimensions]), dtype)

    def _view(self, shard: int) -> memoryview:
        """The map of a shard whose file is still as long as it was; nothing of it where it is not."""
        if shard not in self._maps:
            file = open_file(self._shards[shard])
            made = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                made.madvise(mmap.MADV_HUGEPAGE)
            self._maps[shard] = file, memoryview(made)
        file, view = self._maps[shard]
        return view if os.fstat(file).st_size >= len(view) else memoryview(b"")


def serve(file: int) -> None:
    """Answer messages until the other end is closed.

    Args:
        file: Descriptor of a socket of packets; the first one is the JSON list of the paths of shards.
    """
    with socket.socket(fileno=file) as link, contextlib.suppress(ConnectionError):  # whoever asked is gone
        size = int.from_bytes(link.recv(8), "little")
        reader = ReaderProcess(json.loads(b"".join(_pieces(link, size))))
        link.send(READY)
        while True:
            message, files, _, _ = socket.recv_fds(link, _MOST_BYTES, 1)
            if not message:
                return
            try:
                for passed in files:
                    reader.remember(message, passed)
                whole = reader.answer(message)
            except (OSError, ValueError):  # gone, empty or unreadable: who asked finds out which
                whole = False
            link.send(WHOLE if whole else NOT_WHOLE)


def _pieces(link: socket.socket, size: int) -> Sequence[bytes]:
    """So many bytes, however they were cut."""
    found: list[bytes] = []
    while size > 0 and (piece := link.recv(_MOST_BYTES)):
        found.append(piece)
        size -= len(piece)
    return found


if __name__ == "__main__":
    serve(int(sys.argv[1]))
