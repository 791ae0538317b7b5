"""Delivery on a device, held against a device that is late: it copies only when it is asked whether it has."""

import pickle
import threading

import pytest
import torch
from torch.utils.data import DataLoader

from latentcache.errors import DeviceError, UsageError
from latentcache.loader.cache import open_cache
from latentcache.loader.transfer import ALIGNMENT, CudaLane, Staging, Transfer


class LateMark:
    """Of a copy that ends when somebody waits for it, or when the device is let run."""

    def __init__(self, sources, targets):
        self.sources, self.targets, self.done, self.waited = sources, targets, False, False
        self.lock = threading.Lock()  # the reader and the receiver may both wait; a device copies once

    def run(self):
        with self.lock:
            if not self.done:
                for source, target in zip(self.sources, self.targets, strict=True):
                    target.copy_(source)
                self.done = True

    def query(self):
        return self.done

    def synchronize(self):
        self.waited = True
        self.run()


class LateLane:
    """A device whose copies have not begun when ``copy`` returns."""

    def __init__(self):
        self.memory, self.marks, self.joined = [], [], []

    def locked(self, num_bytes):
        self.memory.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.memory[-1]

    def copy(self, tensors):
        moved = [torch.full_like(tensor, 77) for tensor in tensors]
        self.marks.append(LateMark(tensors, moved))
        return moved, self.marks[-1]

    def join(self, tensors, mark):
        mark.run()
        self.joined.append(len(tensors))


def batch_of(number, side=8):
    shape = (2, 4, side, side)
    latents = torch.full(shape, float(number), dtype=torch.float16)
    return {"latents": latents, "names": [f"{number}"], "original_size": torch.full((2, 2), number)}


def is_whole(batch, number):
    expected = batch_of(number, batch["latents"].shape[-1])
    tensors = all(torch.equal(batch[name], expected[name]) for name in ("latents", "original_size"))
    return tensors and batch["names"] == expected["names"]


def test_on_the_cpu_a_batch_is_handed_out_as_it_was_made():
    transfer, batch = Transfer("cpu"), batch_of(3)
    assert not transfer.active
    received = transfer.receive(transfer.send(batch))
    assert received is batch


@pytest.mark.parametrize("ahead", [1, 2, 3, 7])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_slot_is_not_written_while_it_is_copied_from(ahead, slots):
    """However late the device is and however far the reader is ahead, every batch arrives as it was sent."""
    lane = LateLane()
    transfer, waiting = Transfer("cpu", slots=slots, lane=lane), []
    for number in range(20):
        waiting.append((number, transfer.send(batch_of(number))))
        if len(waiting) > ahead:
            first, sent = waiting.pop(0)
            assert is_whole(transfer.receive(sent), first)
    assert all(is_whole(transfer.receive(sent), number) for number, sent in waiting)
    assert len(lane.memory) <= slots
    assert any(mark.waited for mark in lane.marks) == (ahead >= slots)


def test_what_is_dropped_on_the_way_harms_nobody():
    lane = LateLane()
    transfer = Transfer("cpu", slots=2, lane=lane)
    for number in range(9):
        transfer.send(batch_of(number))
    assert is_whole(transfer.receive(transfer.send(batch_of(9))), 9)


def test_all_that_is_handed_out_is_joined_and_a_larger_batch_gets_more_memory():
    lane = LateLane()
    transfer = Transfer("cpu", slots=2, lane=lane)
    for number, side in enumerate([8, 16, 4, 32, 8]):
        assert is_whole(transfer.receive(transfer.send(batch_of(number, side))), number)
    assert lane.joined == [2] * 5
    assert [len(memory) for memory in lane.memory] == sorted(len(memory) for memory in lane.memory)


def test_tensors_of_any_type_and_layout_lie_on_boundaries():
    tensors = [
        torch.arange(7, dtype=torch.int64),
        torch.arange(12, dtype=torch.float32).reshape(3, 4).T,
        torch.tensor(5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.arange(5, dtype=torch.uint8),
    ]
    staged, slot = Staging(1).take(tensors, LateLane())
    for before, behind in zip(tensors, staged, strict=True):
        assert torch.equal(before, behind)
        assert not behind.numel() or (behind.data_ptr() - slot.memory.data_ptr()) % ALIGNMENT == 0


def test_a_copy_in_another_process_has_memory_of_its_own():
    transfer = Transfer("cpu", slots=5)
    copy = pickle.loads(pickle.dumps(transfer))
    assert (copy.device, copy._staging.slots, copy.active) == (transfer.device, 5, False)


@pytest.mark.parametrize("device", ["nonsense", "cpu:x", "meta", 1.5])
def test_no_kind_of_device(device):
    with pytest.raises(UsageError) as caught:
        Transfer(device)
    assert caught.value.fix


def test_a_device_that_is_not_there_is_said_before_anything_is_read(shared):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(DeviceError, match="torch cannot use the device cuda") as caught:
        open_cache(shared[1]).loader(batch_size=1, device="cuda")
    assert "device='cpu'" in caught.value.fix
    assert caught.value.exit_code == 3


def test_a_lane_to_a_gpu_has_what_a_transfer_asks_for():
    """The lane itself is tested on a GPU: tests/gpu/test_gpu_loader.py."""
    assert {"locked", "copy", "join"} <= set(vars(CudaLane))


# through the loader


def late(loader):
    loader._transfer = Transfer("cpu", slots=2, lane=LateLane())
    return loader


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("format", [None, "diffusers-sdxl", "diffusers-flux"])
def test_an_epoch_arrives_as_it_would_without(shared, prefetch, format):
    options = {"batch_size": 2, "format": format, "prefetch": prefetch}
    expected = list(open_cache(shared[1]).loader(**options))
    loader = late(open_cache(shared[1]).loader(**options))
    for found in (list(loader), [loader[step] for step in range(len(loader))]):
        for one, other in zip(expected, found, strict=True):
            assert list(one) == list(other)
            for name, value in one.items():
                assert torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]


def test_batches_under_way_are_not_progress(shared):
    loader = late(open_cache(shared[1]).loader(batch_size=1, prefetch=2))
    passing = iter(loader)
    next(passing)
    assert loader.remaining() == len(loader) - 1


def test_workers_are_refused_with_the_reason(shared):
    loader = late(open_cache(shared[1]).loader(batch_size=1))
    batches = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(UsageError, match="in a worker of a DataLoader"):
        list(batches)
