"""Read many pieces of files into memory with one release of the interpreter's lock, and hash and scale them there.

The compiled library (``gather.c``, built by ``make native``) copies a piece from the mapped file, and hashes and
scales it while the processor's cache holds it. A thread of its own, which never takes the interpreter's lock, does so
ahead. An unreadable page of a map is an error of its piece; the process goes on. Without the library the
caller reads, hashes and scales piece by piece. Both give the same bytes.
``LATENTCACHE_NATIVE=0`` in the environment turns the library off.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

Ints = NDArray[np.integer]
#: Types that the library scales, and their numbers there.
_KINDS = {"float16": 1, "bfloat16": 2, "float32": 3}
#: Copies into memory of this size go past the processor's cache: 1.3 times as fast at 64 MiB, 0.7 to 1 at 16 MiB.
#: Scaled values do not: 1 at 64 MiB, 0.7 to 0.9 at 16 MiB and less.
_PAST_BYTES = 32 << 20
#: Memory up to this size is read by who wants it: help is 0.99 times as fast at 128 KiB, 1.28 times at 256 KiB.
_ALONE_BYTES = 128 << 10


class Scaling(NamedTuple):
    """``value * factor + term`` for items of shape (channels, ...), computed in float32 and rounded once."""

    kind: int
    factor: NDArray[np.float32]
    """(channels,), as ``term``."""
    term: NDArray[np.float32]


class _Job(ctypes.Structure):
    """``struct job`` of the library."""

    _fields_: ClassVar = [
        (name, ctypes.c_int64)
        for name in (*("count", "places", "stride", "out", "past", "hash", "hashes", "kind", "factor", "term"),
                     *("channels", "next", "failed", "helped", "later"))
    ]  # fmt: skip


class Library:
    """The compiled library."""

    def __init__(self, path: Path) -> None:
        loaded, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        if not loaded.can_scale():
            raise OSError("this processor is too old")
        self.begin, self.finish, self.stop = quick.begin, loaded.finish, loaded.stop
        self.begin.argtypes = [ctypes.c_void_p]  # keeps the interpreter's lock: it is soon back
        self.finish.argtypes, self.finish.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int64
        self.hash = _hash_address()
        atexit.register(self.stop)


def compiled(path: Path) -> Library | None:
    """The compiled library; None: it was not built, is turned off, or does not suit this processor."""
    if os.environ.get("LATENTCACHE_NATIVE") == "0":
        return None
    try:
        return Library(path)
    except (OSError, AttributeError):  # an older build has other functions
        return None


def _hash_address() -> int | None:
    """xxh3-64 of the packaged library, if it shows its functions.

    The one that suits the processor is 2.5 times as fast as the other where there is AVX2.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]
        found = getattr(library, "XXH3_64bits_dispatch", None) or library.XXH3_64bits
        return ctypes.cast(found, ctypes.c_void_p).value
    return None


_PATH = Path(__file__).with_name("_gather.so")
LIBRARY = compiled(_PATH)


class ReaderKind(NamedTuple):
    """The code that reads batches in this process."""

    kind: str
    """``compiled``, or ``python``, which is about a third as fast."""
    why: str = ""
    """Why the compiled library is not used."""
    fix: str = ""
    """How to get the compiled library."""


def reader_kind() -> ReaderKind:
    """Tell whether batches are read by the compiled library; if not, why, and how to get it."""
    if LIBRARY is not None:
        return ReaderKind("compiled")
    if os.environ.get("LATENTCACHE_NATIVE") == "0":
        return ReaderKind("python", "LATENTCACHE_NATIVE=0 turns the compiled reader off", "unset LATENTCACHE_NATIVE")
    is_checkout = (_PATH.parents[3] / "hatch_build.py").is_file()
    install = "make native" if is_checkout else "pip install --force-reinstall --no-deps --no-cache-dir latentcache"
    if not _PATH.exists():
        return ReaderKind("python", "the reader is not compiled", f"{install}, with a C compiler such as gcc")
    return ReaderKind("python", "the compiled reader does not suit this machine or version", install)


def scaling(dtype: str, factor: NDArray[np.float32], term: NDArray[np.float32]) -> Scaling | None:
    """Return the scaling that a :class:`Reading` can do to values of a type; None: the caller has to."""
    kind = _KINDS.get(dtype, 0) if LIBRARY and LIBRARY.hash else 0
    return Scaling(kind, np.ascontiguousarray(factor), np.ascontiguousarray(term)) if kind else None


class File:
    """A file that is open for reading. Who opened it closes it; pieces that are being read keep the map.

    With ``mapped=False`` it is read by position also if the compiled library is there.
    """

    def __init__(self, descriptor: int, *, mapped: bool = True) -> None:
        self.descriptor, self._map = descriptor, np.zeros(0, dtype=np.uint8)
        if mapped and LIBRARY is not None:
            with contextlib.suppress(OSError, ValueError):  # no room, no maps here, or an empty file
                self._map = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), dtype=np.uint8)
        self.about = descriptor, _address(self._map), len(self._map)


class Pieces:
    """n pieces of files, which are open until everything is read.

    ``which`` (n,) is the position of the file that holds each, or of the one that holds all. ``offset`` (n,) is its
    first byte there, ``size`` (n,) its bytes, ``at`` (n,) its place in the memory that it is read into.
    """

    def __init__(self, files: Sequence[File], which: Ints | int, offset: Ints, size: Ints, at: Ints) -> None:
        self._files, self.columns = files, np.empty((5, len(offset)), dtype=np.int64)
        about = np.array([file.about for file in files] or [(0, 0, 0)], dtype=np.int64)
        descriptor, address, mapped = about.T[:, which]
        inside = offset + size <= mapped  # a file that grows has more than its map
        values = descriptor, offset, size, at, (address + offset) * inside
        for column, given in zip(self.columns, values, strict=True):
            column[:] = given
        self.address = _address(self.columns)


class Reading:
    """Pieces from ``first`` to before ``last`` on their way into memory ``out`` (m,), in which all must be.

    ``hashed`` asks for :attr:`hashes`; ``scaling`` is done to the values of each piece.
    """

    hashes: NDArray[np.uint64] | None = None
    """(n,) xxh3-64 of the bytes as they are in the file; None: the caller has to make them."""
    _begun = 0
    """The process that has begun; 0: none."""

    def __init__(
        self,
        pieces: Pieces,
        out: NDArray[np.uint8],
        first: int,
        last: int,
        *,
        hashed: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        self._library = LIBRARY
        self._kept = pieces, out, scaling
        if self._library is None:
            return
        columns = pieces.columns
        past = len(out) >= _PAST_BYTES
        self._job = _Job(last - first, pieces.address + 8 * first, columns.shape[1], _address(out), past)
        if hashed and self._library.hash:
            self.hashes = np.empty(last - first, dtype=np.uint64)
            self._job.hash, self._job.hashes = self._library.hash, _address(self.hashes)
        if scaling is not None:
            self._job.kind, self._job.channels = scaling.kind, len(scaling.factor)
            self._job.factor, self._job.term = _address(scaling.factor), _address(scaling.term)

    def begin(self) -> None:
        """Have the compiled library begin, if it is there and it is worth it, and return at once."""
        if self._library is not None and len(self._kept[1]) > _ALONE_BYTES:
            self._begun = os.getpid()
            self._library.begin(ctypes.addressof(self._job))

    def finish(self) -> bool:
        """Read what is left, and wait for the rest.

        Returns:
            False if there is no library, or a piece did not come whole: the caller reads them one by one.
        """
        if self._library is None:
            return False
        if self._begun not in (0, os.getpid()):  # the thread that has begun is in the parent of this process
            self._job.next = self._job.failed = self._job.helped = 0
        self._begun = 0
        failed: int = self._library.finish(ctypes.addressof(self._job), 1)
        return failed == 0

    def __del__(self, pid: Any = os.getpid, address: Any = ctypes.addressof) -> None:  # modules may be gone already
        if self._begun == pid() and self._library is not None:  # memory and files are not free before
            self._library.finish(address(self._job), 0)


def read_at(descriptor: int, offset: int, room: memoryview | int) -> memoryview:
    """Read a file from ``offset`` on, more than the 2 GiB of one call too; gives fewer bytes only at its end."""
    memory, done = np.empty(room, dtype=np.uint8).data if isinstance(room, int) else room, 0
    while done < len(memory) and (found := os.preadv(descriptor, [memory[done:]], offset + done)):
        done += found
    return memory[:done]


def reading(file: File, offset: Ints, size: Ints, out: NDArray[np.uint8], at: Ints, **more: Any) -> Reading:
    """All of these pieces of a file; arguments as :class:`Pieces` and :class:`Reading`."""
    return Reading(Pieces([file], 0, offset, size, at), out, 0, len(offset), **more)


def _address(array: NDArray[Any]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found
