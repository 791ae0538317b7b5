import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latentcache.loader.ring import IN_PAGE, BatchRing


def taken(ring, count=64):
    """A tensor as a loader makes one, and where its memory begins."""
    array = ring.take(2 * count).view(np.float16).reshape(2, count // 2)
    return torch.from_numpy(array)


def test_memory_is_used_again_once_nobody_holds_it():
    ring = BatchRing(3)
    places = set()
    for _ in range(20):
        tensor = taken(ring)
        places.add(tensor.data_ptr())
        del tensor
    assert len(places) == 1


HOLDERS = {
    "tensor": lambda tensor: tensor,
    "row": lambda tensor: tensor[1],
    "view of another type": lambda tensor: tensor.view(torch.bfloat16),
    "array": lambda tensor: tensor.numpy(),
    "storage": lambda tensor: tensor.untyped_storage(),
    "detached": lambda tensor: tensor.detach(),
    "iterator": lambda tensor: iter(tensor),
    "dlpack": lambda tensor: torch.from_dlpack(tensor),
    "buffer": lambda tensor: memoryview(tensor.numpy()),
    "graph": lambda tensor: (torch.ones(2, 32, dtype=torch.float16, requires_grad=True) * tensor).grad_fn,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_something_refers_to_is_never_handed_out(holder):
    ring = BatchRing(2)
    tensor = taken(ring)
    place = tensor.data_ptr()
    kept = HOLDERS[holder](tensor)
    del tensor
    for _ in range(5):
        assert taken(ring).data_ptr() != place
    del kept


def test_all_that_is_kept_stays_as_it_is():
    ring = BatchRing(2)
    kept = [taken(ring).fill_(number) for number in range(30)]
    assert [tensor.unique().tolist() for tensor in kept] == [[number] for number in range(30)]


def test_who_holds_one_batch_goes_between_two_slots_though_there_are_more():
    ring = BatchRing(5)
    several = [taken(ring) for _ in range(4)]
    del several
    held, places = taken(ring), set()
    for _ in range(9):
        held = taken(ring)
        places.add(held.data_ptr())
    assert len(places) == 2


def test_a_slot_much_larger_than_needed_is_left_for_larger_batches():
    ring = BatchRing(4)
    place = ring.take(1000).ctypes.data
    assert ring.take(400).ctypes.data != place
    assert ring.take(600).ctypes.data == place


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(1, 5))
def test_sizes_and_boundaries(sizes, slots):
    ring = BatchRing(slots)
    for size in sizes:
        memory = ring.take(size)
        assert (memory.shape, memory.dtype) == ((size,), np.uint8)
        assert memory.ctypes.data % 4096 == IN_PAGE
        assert memory.flags.writeable


def test_threads_never_share_a_slot():
    ring, wrong = BatchRing(3), []

    def work(number):
        for _ in range(2000):
            memory = ring.take(256)
            memory[:] = number
            if not (memory == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_tensor_can_be_sent_on():
    ring = BatchRing(2)
    copy = pickle.loads(pickle.dumps(taken(ring).fill_(3)))
    taken(ring).fill_(4)
    assert copy.unique().tolist() == [3]


def test_parts_lie_in_the_memory_and_are_made_once_for_a_slot():
    ring = BatchRing(2)
    memory, parts = ring.take_in_parts(100, 4)
    for number, part in enumerate(parts):
        part[:] = bytes([number] * 25)
    assert memory.reshape(4, 25).tolist() == [[number] * 25 for number in range(4)]
    place = memory.ctypes.data
    del memory
    again, same = ring.take_in_parts(100, 4)
    assert again.ctypes.data == place
    assert all(new is old for new, old in zip(same, parts, strict=True))
    del again
    other, halves = ring.take_in_parts(80, 2)
    assert (other.ctypes.data, [len(part) for part in halves]) == (place, [40, 40])
