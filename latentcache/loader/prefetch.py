"""Reads ahead: a few threads make the next batches side by side, and the disk begins with what memory lacks.

Guarantee: the same results in the same order as without threads. An error is raised at the result it belongs to. At
most ``depth`` results wait. The threads end when the iterator is exhausted, closed or forgotten.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from latentcache.errors import UsageError
from latentcache.store.reader import ByteRange

#: Threads that read: one moves 0.7 of what ``memcpy`` moves, because it copies out of the system's page cache.
_THREADS = 2
#: Byte ranges of a batch that are looked at.
_LOOKS = 2
#: Kernels fetch no more than this for one piece of advice where a disk has the usual setting of 128 KiB.
_PIECE_BYTES = 128 << 10
_HAS_ADVICE = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")
_BYTE = (bytearray(1),)

Made = TypeVar("Made")


def read_ahead(works: Iterable[Callable[[], Made]], depth: int, *, in_order: bool = False) -> Generator[Made]:
    """The result of each work, made ahead of the caller.

    ``depth`` results may wait; 0 makes each when it is asked for. ``in_order`` makes one at a time.

    Raises:
        UsageError: A forked process goes on with an iteration of its parent.
    """
    if depth == 0:
        for work in works:
            yield work()
        return
    left, process = iter(works), os.getpid()
    pool = ThreadPoolExecutor(1 if in_order else _THREADS, "latentcache-read-ahead")
    waiting: deque[Future[Made]] = deque()
    try:
        waiting.extend(pool.submit(work) for work in islice(left, depth))
        while waiting:
            waiting.extend(pool.submit(work) for work in islice(left, 1))
            yield waiting.popleft().result()  # nothing here holds it meanwhile
            if process != os.getpid():
                raise UsageError(
                    "an iteration of a loader goes on in a forked process",
                    why="its reading threads are in the parent process",
                    fix="call iter(loader) in this process",
                )
    finally:
        if not sys.is_finalizing() and process == os.getpid():  # at exit the threads have ended already
            pool.shutdown(wait=False, cancel_futures=True)  # no join here, which may be anywhere


def read_soon(ranges: Sequence[ByteRange]) -> None:
    """Have the kernel fetch the bytes of a batch, all at once, if one of some ranges is not in memory.

    Decides nothing about what is read; nothing here can fail a read.
    """
    looks = ranges[:: -(-len(ranges) // _LOOKS) or 1]
    with contextlib.suppress(OSError):  # the read says what is wrong, and of which entry
        if _HAS_ADVICE and not all(is_cached(file, at + max(size - 1, 0)) for file, at, size in looks):
            announce(ranges)


def announce(ranges: Sequence[ByteRange]) -> None:
    """Have the kernel begin to fetch bytes. OSError if a file cannot be read."""
    for file, start, length in sorted(ranges):
        for piece in range(start, start + length, _PIECE_BYTES):
            os.posix_fadvise(file, piece, min(_PIECE_BYTES, start + length - piece), os.POSIX_FADV_WILLNEED)


def is_cached(file: int, offset: int) -> bool:
    """True if a byte can be read without waiting for a disk; False also if the file system cannot say."""
    try:
        os.preadv(file, _BYTE, offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            return False
        raise
    return True
