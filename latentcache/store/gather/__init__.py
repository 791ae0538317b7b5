"""Read many pieces of files into memory with one release of the interpreter's lock, and hash and scale them there.

The compiled library (``gather.c``, built by ``make native``) reads, hashes and scales a piece while the processor's
cache holds it. Without it Linux AIO reads all pieces with one system call, and the caller hashes and scales. Both
give the same bytes. ``LATENTCACHE_NATIVE=0`` in the environment turns the library off.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

Ints = NDArray[np.integer]
#: Types that the library scales, and their numbers there.
_KINDS = {"float16": 1, "bfloat16": 2, "float32": 3}


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """``value * factor + term`` for items of shape (channels, ...), computed in float32 and rounded once."""

    kind: int
    factor: NDArray[np.float32]
    """(channels,)"""
    term: NDArray[np.float32]


def compiled(path: Path | None = None) -> ctypes.CDLL | None:
    """The compiled library; None: it was not built, is turned off, or does not suit this processor."""
    if os.environ.get("LATENTCACHE_NATIVE") == "0":
        return None
    try:
        found = ctypes.CDLL(str(path or Path(__file__).with_name("_gather.so")))
    except OSError:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.gather.argtypes = [number, pointer, pointer, pointer, ctypes.c_int, pointer, pointer, number]
    found.gather.restype = number
    return found if found.can_scale() else None


def _hash_address() -> int | None:
    """xxh3-64 of the packaged library, if it shows its functions."""
    try:
        return ctypes.cast(ctypes.CDLL(xxhash._xxhash.__file__).XXH3_64bits, ctypes.c_void_p).value  # type: ignore[attr-defined]
    except (AttributeError, OSError, TypeError):
        return None


LIBRARY = compiled()
_HASH = _hash_address() if LIBRARY else None


def scaling(dtype: str, factor: NDArray[np.float32], term: NDArray[np.float32]) -> Scaling | None:
    """What :func:`read_together` can do to values of a type; None: the caller has to."""
    kind = _KINDS.get(dtype, 0) if LIBRARY else 0
    return Scaling(kind, np.ascontiguousarray(factor), np.ascontiguousarray(term)) if kind else None


def hashes_of(count: int) -> NDArray[np.uint64] | None:
    """(count,) memory for checksums that :func:`read_together` can make; None: the caller has to."""
    return np.empty(count, dtype=np.uint64) if LIBRARY and _HASH else None


def read_together(
    files: Sequence[int],
    offset: Ints,
    size: Ints,
    out: NDArray[np.uint8],
    at: Ints,
    *,
    hashes: NDArray[np.uint64] | None = None,
    scaling: Scaling | None = None,
) -> bool:
    """Read n pieces of files into memory.

    Args:
        files: (n,) descriptors.
        offset: (n,) first byte of each in its file.
        size: (n,) bytes of each.
        out: (m,) of memory.
        at: (n,) where each belongs in ``out``; all of it must be inside.
        hashes: From :func:`hashes_of`: is given xxh3-64 of the bytes as they are in the file.
        scaling: From :func:`scaling`: done to the values of each piece.

    Returns:
        False if the system has no such call, or a piece did not come whole: the caller reads them one by one.
    """
    base = _address(out)
    if LIBRARY is None:
        return _read_queued(files, offset, size, at + base)
    places = np.empty((4, len(files)), dtype=np.int64)
    places[0], places[1], places[2] = files, offset, size
    np.add(at, base, out=places[3])
    hashing = (None, None) if hashes is None else (_HASH, _address(hashes))
    values: tuple[int, int | None, int | None, int] = (0, None, None, 1)
    if scaling is not None:
        values = scaling.kind, _address(scaling.factor), _address(scaling.term), len(scaling.factor)
    return bool(LIBRARY.gather(len(files), _address(places), *hashing, *values) == len(files))


def _address(array: NDArray[Any]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


#: Numbers of io_setup, io_destroy, io_submit and io_getevents (io_submit(2)), a struct iocb and a struct io_event.
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
_SETUP, _DESTROY, _SUBMIT, _WAIT = map(ctypes.c_long, _CALLS.get(platform.machine(), (-1,) * 4))
_REQUEST = np.dtype(
    {
        "names": ["size", "file", "memory", "bytes", "offset"],
        "formats": ["<u8", "<u4", "<u8", "<u8", "<i8"],
        "offsets": [0, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
_RESULT = np.dtype({"names": ["size", "bytes"], "formats": ["<u8", "<i8"], "offsets": [0, 16], "itemsize": 32})
#: Reads of one call.
_MOST = 256
_call, _call_at_once = ctypes.CDLL(None, use_errno=True).syscall, ctypes.PyDLL(None, use_errno=True).syscall
_call.restype = _call_at_once.restype = ctypes.c_long  # the second keeps the interpreter's lock


class _Queue:
    """A queue of reads of the kernel (Linux AIO). Buffered reads end before ``io_submit`` does; both are waited for.

    Raises:
        OSError: The system has none (more): another system, a sandbox, ``fs.aio-max-nr``.
    """

    def __init__(self) -> None:
        self._context = ctypes.c_ulong()
        if sys.platform != "linux" or _call(_SETUP, ctypes.c_long(_MOST), ctypes.byref(self._context)):
            raise OSError(ctypes.get_errno(), "io_setup")
        self._requests, self._results = np.zeros(_MOST, dtype=_REQUEST), np.zeros(_MOST, dtype=_RESULT)
        self._columns = [self._requests[name] for name in _REQUEST.names or ()]
        self._pointers = self._requests.ctypes.data + 64 * np.arange(_MOST, dtype=np.uint64)
        self._first, self._found = ctypes.c_void_p(self._pointers.ctypes.data), self._results.ctypes.data

    def read(self, files: Sequence[int], offset: Ints, size: Ints, address: Ints) -> bool:
        """True if all of up to ``_MOST`` pieces came whole."""
        count, ended = len(files), 0
        for column, values in zip(self._columns, (size, files, address, size, offset), strict=True):
            column[:count] = values
        begun, wait, least = _call(_SUBMIT, self._context, ctypes.c_long(count), self._first), _call_at_once, 0
        while ended < begun:
            left, place = ctypes.c_long(begun - ended), ctypes.c_void_p(self._found + 32 * ended)
            found = wait(_WAIT, self._context, ctypes.c_long(least), left, place, None)
            wait, least = _call, 1  # a file system that reads on its own after all
            if found < 0 and ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), "io_getevents")
            ended += max(found, 0)
        results = self._results[:count]
        return bool(begun == count and (results["size"] == results["bytes"]).all())

    def __del__(self) -> None:
        if self._context:
            _call(_DESTROY, self._context)


#: Queues that no thread is using.
_idle: list[_Queue] = []
os.register_at_fork(after_in_child=_idle.clear)  # a queue belongs to the process that made it


def _read_queued(files: Sequence[int], offset: Ints, size: Ints, address: Ints) -> bool:
    """256 pieces with one system call."""
    try:
        queue, whole = _idle.pop() if _idle else _Queue(), True
        for first in range(0, len(files), _MOST):
            some = slice(first, first + _MOST)
            whole = whole and queue.read(files[some], offset[some], size[some], address[some])
    except (OSError, IndexError):  # another thread took the last one; a queue that failed is not used again
        return False
    _idle.append(queue)
    return whole
