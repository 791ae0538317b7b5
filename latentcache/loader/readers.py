"""Processes that read batches for this one, into memory that both see. docs/adr/0031.

A training step that holds the interpreter's lock keeps threads of its process from reading; it does not keep other
processes. Guarantee: the same batches as without them. Whatever such a process does not find whole, and whatever is
asked of one that is not ready or has died, is read in this process, which names the sample; so an error, a signal or
a missing process costs time and nothing else. Memory that a process may still write to is in nobody else's hands: it
is held here until the answer has come. After a fork neither side uses memory of before, and the child has none of
this. One pass uses them at a time. Cost: 0.2 s until they are ready, 40 MB each, and one message per batch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import select
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.loader.gather import Rows
from latentcache.loader.reader_process import ENTRY_BYTES, MEMORIES, REQUEST, WHOLE
from latentcache.loader.ring import BatchRing
from latentcache.loader.shared import SharedMap, map_of, shared_memory
from latentcache.store.entry import MAX_DIMENSIONS, numpy_dtype
from latentcache.store.reader import EntryReader

Batch = NDArray[Any]
#: What a packet of the default size of a socket holds; a batch of more entries is read here.
_MOST_BYTES = 180 << 10
#: Without work it ends when it is told to; with work after the batch it is at.
_END_S = 5.0
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from latentcache.loader.reader_process import serve; serve(int(sys.argv[1]))"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A batch that was asked for."""

    batch: Batch
    process: _Process
    ticket: int


class Readers:
    """So many processes that read entries of one generation. Picklable: a copy starts its own.

    Args:
        reader: The entries.
        count: How many processes.
        slots: Batches whose memory is kept.

    Raises:
        UsageError: A negative number, or this system has no memory of that kind, or the build of the cache is under
            way: who waits for an entry would keep those behind it waiting.
    """

    def __init__(self, reader: EntryReader, count: int, *, slots: int) -> None:
        if count < 0:
            raise UsageError(f"readers={count}", why="that many processes cannot be", fix="0 or more")
        if count and not hasattr(os, "memfd_create"):
            raise UsageError(f"readers={count}", why="this system has no memory files (memfd)", fix="readers=0")
        if count and reader.generation.arrivals is not None:
            why = "the build of this cache is under way"
            raise UsageError(f"readers={count}", why=why, fix="readers=0, or wait for the end of the build")
        self._reader, self._count, self._slots = reader, count, slots
        self._processes: list[_Process] = []
        self._ring = BatchRing(slots, memory=shared_memory)
        self._busy, self._turn = threading.Lock(), itertools.count()
        _EVERY.add(self)

    @contextlib.contextmanager
    def taken(self) -> Iterator[bool]:
        """Whether a pass may use them; they are started if need be. At the end nobody writes to any memory."""
        if not self._count or not self._busy.acquire(blocking=False):
            yield False
            return
        held = self._busy
        try:
            if not self._processes:
                paths = [self._reader.path(shard) for shard in range(len(self._reader.generation.shards))]
                self._processes = [_Process(paths) for _ in range(self._count)]
                weakref.finalize(self, _end_all, self._processes, os.getpid())
            yield True
        finally:
            for process in self._processes:  # none in a child that was forked off meanwhile
                process.drain()
            held.release()

    def ask(self, chosen: Rows, shape: tuple[int, ...], dtype: str) -> Asked | None:
        """Have a batch read; None where it is to be read here.

        Args:
            chosen: B rows of the generation.
            shape: Of one payload.
            dtype: Storage type, as in the recipe.
        """
        rows = np.asarray(chosen)
        if not self._processes or len(shape) > MAX_DIMENSIONS or len(rows) * ENTRY_BYTES > _MOST_BYTES:
            return None
        process = self._processes[next(self._turn) % len(self._processes)]
        if not process.is_ready():
            return None
        columns, kind = self._reader.generation.rows, numpy_dtype(dtype)
        payload_bytes = math.prod(shape) * kind.itemsize
        memory, name = self._ring.take(len(rows) * payload_bytes), dtype.encode()
        place, start = map_of(memory)
        sizes = (place.number, len(place), start, payload_bytes, len(rows), len(name), len(shape))
        message = b"".join(
            (
                REQUEST.pack(*sizes, *shape, *[0] * (MAX_DIMENSIONS - len(shape))),
                name,
                columns.shard.take(rows).astype("<i4", copy=False).tobytes(),
                columns.offset.take(rows).astype("<u8", copy=False).tobytes(),
                columns.key.take(rows, axis=0).tobytes(),
            )
        )
        batch = memory.view(kind).reshape(len(rows), *shape)
        ticket = process.ask(message, place, batch)
        return None if ticket is None else Asked(batch, process, ticket)

    def answer(self, asked: Asked) -> Batch | None:
        """(B, *shape), every entry checked; None where it is to be read here."""
        return asked.batch if asked.process.answer(asked.ticket) else None

    def close(self) -> None:
        """End the processes; the next pass starts them again. Twice is once."""
        processes, self._processes = self._processes, []
        _end_all(processes, os.getpid())

    def over(self, reader: EntryReader) -> Readers:
        """The same for another reader; nothing of it is started yet."""
        return Readers(reader, self._count, slots=self._slots)

    def forget(self, *, in_child: bool) -> None:
        """After a fork: memory of before is used by nobody again, and a child has no processes."""
        self._ring = BatchRing(self._slots, memory=shared_memory)
        if in_child:
            for process in self._processes:
                process.leave()
            self._processes, self._busy = [], threading.Lock()

    def __reduce__(self) -> tuple[Callable[..., Readers], tuple[EntryReader, int, int]]:
        return _again, (self._reader, self._count, self._slots)


class _Process:
    """One process, asked in turn. What it may write to is held until it has answered."""

    def __init__(self, paths: list[str]) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for this process, which decides
            )
        self._ready, self._alive = False, True
        self._asked, self._answered = 0, 0
        self._held: deque[Batch] = deque()
        self._found: dict[int, bool] = {}
        self._mapped: deque[int] = deque(maxlen=MEMORIES)
        listed = json.dumps(paths).encode()
        try:
            self.link.send(len(listed).to_bytes(8, "little"))
            for start in range(0, len(listed), _MOST_BYTES):
                self.link.send(listed[start : start + _MOST_BYTES])
        except OSError:
            self._lost()

    def is_ready(self) -> bool:
        """Whether it can be asked; it says so once, when it has started."""
        if not self._ready and self._alive:
            poll = select.poll()
            poll.register(self.link, select.POLLIN)
            if poll.poll(0):
                self._ready = bool(self._receive())
        return self._ready and self._alive

    def ask(self, message: bytes, memory: SharedMap, batch: Batch) -> int | None:
        """The ticket of a request; None where it has died."""
        try:
            if memory.number in self._mapped:
                self.link.send(message)
            else:
                socket.send_fds(self.link, [message], [memory.file])
                self._mapped.append(memory.number)
        except OSError:
            self._lost()
            return None
        self._held.append(batch)
        self._asked += 1
        return self._asked

    def answer(self, ticket: int) -> bool:
        """Whether the batch of a ticket lies in its memory, whole."""
        while self._answered < ticket and self._alive:
            said = self._receive()
            if said:
                self._answered += 1
                self._held.popleft()
                self._found[self._answered] = said == WHOLE
        return self._found.pop(ticket, False)

    def drain(self) -> None:
        """Wait until it writes to nothing any more."""
        self.answer(self._asked)
        self._found.clear()

    def leave(self) -> None:
        """In a child: it is another's, and what it was asked for is that one's to use."""
        self.link.close()
        self._alive = False
        self._held.clear()
        self._found.clear()

    def end(self) -> None:
        """Have it end."""
        self._alive = False
        self.link.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # the other end is open still in a process that was forked off
            self._process.kill()
            self._process.wait()
        self._held.clear()

    def _receive(self) -> bytes:
        """What it says next; nothing where it has died."""
        try:
            said = self.link.recv(1)
        except OSError:
            said = b""
        if not said:
            self._lost()
        return said

    def _lost(self) -> None:
        self._alive = False
        self._process.kill()  # it has ended, or cannot be spoken to: it writes nowhere from now on
        status = self._process.wait()
        self._held.clear()
        warnings.warn(
            f"a process that read for the loader died ({_how(status)}); its batches are read in this one",
            stacklevel=2,
        )


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"


def _again(reader: EntryReader, count: int, slots: int) -> Readers:
    return Readers(reader, count, slots=slots)


def _end_all(processes: list[_Process], pid: int) -> None:
    if os.getpid() == pid:
        for process in processes:
            process.end()


def _forked(*, in_child: bool) -> None:
    for readers in list(_EVERY):
        readers.forget(in_child=in_child)


_EVERY: weakref.WeakSet[Readers] = weakref.WeakSet()
os.register_at_fork(after_in_parent=lambda: _forked(in_child=False), after_in_child=lambda: _forked(in_child=True))
