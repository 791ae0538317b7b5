"""Buffers are used again only when nothing refers to them, and a device that copies late gets whole batches."""

import gc
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from latentcache.errors import DeviceError, UsageError
from latentcache.loader.memory import BufferPool, Transfer


def address(memory):
    return memory.ctypes.data


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


class LateEvent:
    """The event of a copy that ends when someone waits or the device runs."""

    def __init__(self, source, target, finish):
        self.source, self.target, self.finish, self.done = source, target, finish, False
        self.lock = threading.Lock()  # the reader and the receiver may both wait; a device copies once

    def run(self):
        with self.lock:
            if not self.done:
                for name, value in self.target.items():
                    if isinstance(value, torch.Tensor):
                        value.copy_(self.source[name])
                finished = self.finish(dict(self.target))
                self.target.clear()
                self.target.update(finished)
                self.done = True

    def query(self):
        return self.done

    def synchronize(self):
        self.run()


class LateStream:
    """A device whose copies start after ``copy`` returned."""

    def __init__(self):
        self.joined = []

    def copy(self, batch, finish):
        moved = {
            name: torch.full_like(value, 77) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        return moved, LateEvent(batch, moved, finish)

    def join(self, tensors, event):
        event.run()
        self.joined.append(len(tensors))


def late(loader):
    loader._transfer = Transfer("cpu", stream=LateStream())
    return loader


@pytest.mark.parametrize("ahead", [1, 3, 9])
def test_host_memory_is_held_until_the_copy_has_ended(ahead):
    """Every batch arrives intact, however late the device is and however far the reader is ahead."""
    pool, stream = BufferPool(4), LateStream()
    transfer, waiting = Transfer("cpu", stream=stream), []
    for number in range(30):
        memory = pool.take(4096)
        memory[:] = number
        waiting.append((number, transfer.send({"x": torch.from_numpy(memory), "n": number}, lambda batch: batch)))
        del memory
        if len(waiting) > ahead:
            first, sent = waiting.pop(0)
            batch = transfer.receive(sent)
            assert (batch["x"] == first).all()
            assert batch["n"] == first
    assert set(stream.joined) == {1}
    assert pool.fresh <= ahead + 6  # reused after the copy


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("format", [None, "diffusers-sdxl"])
def test_device_batches_equal_cpu_batches(many, prefetch, format):
    fields = None if format is None else ["latents", "original_size", "crop_top_left", "target_size"]
    options = {"batch_size": 2, "format": format, "prefetch": prefetch, "fields": fields}
    for batch, other in zip(many.loader(**options), late(many.loader(**options)), strict=True):
        assert list(batch) == list(other)
        assert all(torch.equal(value, other[name]) for name, value in batch.items() if torch.is_tensor(value))


def test_workers_are_rejected_with_the_reason(many):
    loader = late(many.loader(batch_size=1))
    batches = DataLoader(
        loader.dataset, sampler=loader.sampler, batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(UsageError, match="in a worker of a DataLoader"):
        list(batches)


@pytest.mark.parametrize("device", ["nonsense", "cpu:x", "meta", 1.5])
def test_an_unknown_device_is_rejected(device):
    with pytest.raises(DeviceError, match="device=") as caught:
        Transfer(device)
    assert caught.value.fix


def test_a_device_that_is_not_there_is_reported_before_anything_is_read(many):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(DeviceError, match="device='cuda': torch cannot use it") as caught:
        many.loader(batch_size=1, device="cuda")
    assert "device='cpu'" in caught.value.fix
