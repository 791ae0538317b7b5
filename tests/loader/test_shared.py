import gc
import mmap
import os

import numpy as np
import pytest

from latentcache.loader.ring import BatchRing
from latentcache.loader.shared import map_of, shared_memory


def test_what_another_map_writes_is_seen():
    memory = shared_memory(10_000)
    assert not memory.any()
    found, start = map_of(memory[100:200])
    with mmap.mmap(found.file, 10_000) as other:
        other[start : start + 3] = b"abc"
    assert (start, memory[100:104].tobytes()) == (100, b"abc\0")
    assert map_of(shared_memory(1)[:])[0].number != found.number


def test_its_descriptor_is_closed_with_it():
    memory = shared_memory(4096)
    part = memory[10:20]
    file = map_of(part)[0].file
    del memory
    gc.collect()
    os.fstat(file)  # the part holds it
    del part
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(file)


def test_a_ring_of_it_uses_memory_again_only_when_nobody_refers_to_it():
    ring = BatchRing(2, memory=shared_memory)
    first = ring.take(1000)
    number = map_of(first)[0].number
    held = first.view(np.uint16).reshape(10, 50)[3:]
    del first
    assert map_of(ring.take(1000))[0].number != number
    del held
    taken = [ring.take(1000) for _ in range(2)]
    assert number in {map_of(one)[0].number for one in taken}
