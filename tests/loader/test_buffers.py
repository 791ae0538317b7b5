"""Buffers of batches are reused only when nothing refers to them."""

import gc
import threading

import numpy as np
import pytest
import torch

from latentcache.loader.buffers import BufferPool, size_class


def address(memory):
    return memory.ctypes.data


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 5000, 1 << 20, (1 << 20) + 1, 3_333_333])
def test_a_size_class_wastes_an_eighth_at_most(num_bytes):
    size = size_class(num_bytes)
    assert num_bytes <= size <= max(num_bytes * 9 / 8 + 1, 4096, num_bytes + 4096)
    assert size_class(size) == size


#: Kinds of references to memory.
KEEPERS = {
    "a view": lambda memory: memory[10:20].reshape(2, 5),
    "a tensor": lambda memory: torch.from_numpy(memory.view(np.int16))[3:7],
    "numpy of a tensor": lambda memory: torch.from_numpy(memory).view(2, -1)[1].numpy(),
    "a storage": lambda memory: torch.from_numpy(memory).untyped_storage(),
    "asarray": lambda memory: np.asarray(memory)[::2],
    "a memoryview": lambda memory: memory[5:].data,
}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_referenced_memory_is_never_reused(keep):
    pool = BufferPool(4)
    memory = pool.take(4000)
    memory[:] = 7
    pointer, kept = address(memory), keep(memory)
    del memory
    gc.collect()
    other = pool.take(4000)
    other[:] = 9
    assert address(other) != pointer
    del kept
    assert address(pool.take(4000)) == pointer


def test_other_sizes_reuse_memory_within_limits():
    pool = BufferPool(4)
    del (large := [pool.take(1 << 20)])[:]
    assert large == []
    pool.take(400_000)
    assert pool.fresh == 1
    pool.take(100_000)  # a tenth of the size would waste the rest
    assert pool.fresh == 2


def test_the_pool_keeps_a_limited_number_of_buffers():
    pool = BufferPool(4)
    for batches, fresh in ((12, 12), (12, 12), (13, 13), (13, 14)):
        held = [pool.take(3000) for _ in range(batches)]
        assert pool.fresh == fresh
        held.clear()


def test_threads_never_get_the_same_memory():
    pool, wrong = BufferPool(8), []

    def work(number):
        for _ in range(300):
            memory = pool.take(3000)
            memory[:] = number
            if not (memory == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.fresh <= 16
