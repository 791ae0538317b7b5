"""Memory that two processes see: made here, handed over by its descriptor, gone when neither has it mapped any more.

Nothing of it lies under a name in a file system, so nothing is left behind by a process that is killed, and what
``/dev/shm`` holds does not limit it (memfd_create(2), Linux).
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from typing import Any

import numpy as np

from latentcache.loader.ring import Bytes


class SharedMap(mmap.mmap):
    """One piece of such memory."""

    number: int
    """Never the same twice in a process."""
    file: int
    """Its descriptor, open as long as this is."""


def shared_memory(num_bytes: int) -> Bytes:
    """(num_bytes,) of zeros that another process can be handed.

    Raises:
        OSError: The system has no memory, or no descriptors.
    """
    file = os.memfd_create("latentcache", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, num_bytes)
        made = SharedMap(file, num_bytes)
    except BaseException:
        os.close(file)
        raise
    made.number, made.file = next(_NUMBERS), file
    weakref.finalize(made, os.close, file).atexit = False  # the system does it then
    return np.frombuffer(made, dtype=np.uint8)


def map_of(memory: Bytes) -> tuple[SharedMap, int]:
    """Where memory of :func:`shared_memory`, or a part of it, lies: the map, and the byte that it begins at."""
    owner: Any = memory.base if isinstance(memory.base, np.ndarray) else memory
    found: Any = owner.base
    place: Any = found.obj if isinstance(found, memoryview) else found
    return place, memory.ctypes.data - owner.ctypes.data


_NUMBERS = itertools.count()
