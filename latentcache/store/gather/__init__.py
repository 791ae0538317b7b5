"""Read many pieces of files into memory with one release of the interpreter's lock, and scale them there.

The compiled library (``gather.c``, built by ``make native``) reads by position and scales values while the
processor's cache holds them. Without the library Python reads piece by piece, and the caller scales. Both give the
same bytes. ``LATENTCACHE_NATIVE=0`` in the environment turns the library off.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]
#: Device and inode of a file that stands in for an object in a store -> reads the object from a byte on into memory.
STAND_INS: dict[tuple[int, int], Callable[[int, memoryview], int]] = {}
#: Types that the library scales, and their numbers there.
_KINDS = {"float16": 1, "bfloat16": 2, "float32": 3}


class Scaling(NamedTuple):
    """``value * factor + term`` for items of shape (channels, ...), computed in float32 and rounded once."""

    kind: int
    factor: NDArray[np.float32]
    """(channels,), as ``term``."""
    term: NDArray[np.float32]


def compiled(path: Path) -> Any:
    """The compiled function; None: it was not built, is turned off, or does not suit this processor."""
    if os.environ.get("LATENTCACHE_NATIVE") == "0":
        return None
    try:
        library = ctypes.CDLL(str(path))
        if not library.can_scale():
            return None
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        library.gather.argtypes = [number, pointer, pointer, ctypes.c_int, number, number, pointer, pointer]
        library.gather.restype = number
        return library.gather
    except (OSError, AttributeError):  # an older build has other functions
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
    """Return the scaling that the library can do to values of a type; None: the caller has to."""
    kind = _KINDS.get(dtype)
    return None if kind is None else Scaling(kind, np.ascontiguousarray(factor), np.ascontiguousarray(term))


def read_pieces(pieces: NDArray[np.int64], out: NDArray[np.uint8], scaling: Scaling | None = None) -> int:
    """Read pieces of files into memory ``out``, and scale their values there.

    Args:
        pieces: (4, n) descriptor, first byte in the file, bytes, and first byte in ``out`` of each piece.
        out: (m,), in which all pieces must be.
        scaling: Only with the compiled library.

    Returns:
        The number of pieces before the first that did not come whole; n if all did.
    """
    if LIBRARY is not None and not STAND_INS:
        return _call(LIBRARY, pieces, out, scaling, is_there=False)
    memory = out.data
    for number, (descriptor, first, size, at) in enumerate(pieces.T.tolist()):
        try:
            read = read_at(descriptor, first, memory[at : at + size])
        except OSError:
            return number
        if len(read) < size:
            return number
    if scaling is not None:
        scale_pieces(pieces, out, scaling)
    return len(pieces[0])


def scale_pieces(pieces: NDArray[np.int64], out: NDArray[np.uint8], scaling: Scaling) -> None:
    """Scale pieces that are in memory already, with the compiled library. Arguments as :func:`read_pieces`."""
    if LIBRARY is not None:
        _call(LIBRARY, pieces, out, scaling, is_there=True)


def _call(
    gather: Any,
    pieces: NDArray[np.int64],
    out: NDArray[np.uint8],
    scaling: Scaling | None,
    *,
    is_there: bool,
) -> int:
    values: tuple[int, ...] = (0, 0, 0, 0)
    if scaling is not None:
        values = scaling.kind, len(scaling.factor), _address(scaling.factor), _address(scaling.term)
    count: int = gather(pieces.shape[1], _address(pieces), _address(out), is_there, *values)
    return count


def read_at(descriptor: int, offset: int, room: memoryview | int) -> memoryview:
    """Read a file from ``offset`` on, more than the 2 GiB of one call too; gives fewer bytes only at its end."""
    memory = np.empty(room, dtype=np.uint8).data if isinstance(room, int) else room
    done = 0
    if STAND_INS and (read := STAND_INS.get(identity(os.fstat(descriptor)))) is not None:
        return memory[: read(offset, memory)]
    while done < len(memory) and (count := os.preadv(descriptor, [memory[done:]], offset + done)):
        done += count
    return memory[:done]


def identity(status: os.stat_result) -> tuple[int, int]:
    """The key of a file in :data:`STAND_INS`."""
    return status.st_dev, status.st_ino


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
