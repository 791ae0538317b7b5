"""The way to a device and back, held against a device that is late: it copies only when somebody waits for it."""

import numpy as np
import pytest
import torch

from latentcache.encoders.describe import describe_model
from latentcache.encoders.lane import SLABS, PlainLane, Ring, Stopwatch
from latentcache.encoders.vae import VaeEncoder
from latentcache.errors import DeviceError

CPU = torch.device("cpu")


class LateMark:
    """Of copies that have not begun when it is made."""

    def __init__(self, pairs=(), error=None):
        self.pairs, self.error, self.reached, self.waits = list(pairs), error, False, 0

    def query(self):
        return self.reached

    def synchronize(self):
        self.waits += 1
        if self.error is not None:
            raise self.error
        with torch.inference_mode():
            for source, target in self.pairs:
                target.copy_(source)
        self.pairs, self.reached = [], True


class LateLane:
    """Results come down when they are waited for, and a slab is in use until then."""

    def __init__(self, error=None):
        self.memory, self.ups, self.downs, self.error = [], [], [], error

    def locked(self, num_bytes):
        self.memory.append(torch.full((num_bytes,), 77, dtype=torch.uint8))
        return self.memory[-1]

    def up(self, slab):
        assert all(mark.reached for other, mark in self.ups if other == slab.data_ptr()), "written while copied from"
        mark = LateMark()
        self.ups.append((slab.data_ptr(), mark))
        return slab.clone(), mark

    def down(self, pairs):
        assert all(target.data_ptr() not in self.in_use() for _, target in pairs), "two results in one place"
        self.downs.append(LateMark([(source.clone(), target) for source, target in pairs], self.error))
        return self.downs[-1]

    def in_use(self):
        return {target.data_ptr() for mark in self.downs for _, target in mark.pairs}


@pytest.fixture
def late(tiny):
    def make(name="AutoencoderKL", lane=None, **options):
        described = describe_model(str(tiny(name)), storage_dtype=options.pop("storage_dtype", "float32"), **options)
        return VaeEncoder(described, CPU, lane=lane or LateLane())

    return make


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_every_batch_comes_back_as_it_was_sent(late, pictures, storage, ahead):
    encoder, lane = late("AutoencoderTiny", storage_dtype=storage), None
    lane = encoder._lane
    plain = VaeEncoder(encoder._description, CPU)
    batches = [np.roll(pictures, number, axis=2)[: 1 + number % 3] for number in range(6)]
    waiting, found = [], []
    for batch in batches:
        waiting.append(encoder.submit(list(batch)))
        assert not waiting[-1].done()
        if len(waiting) == ahead:
            found.append(waiting.pop(0).result())
    found += [pending.result() for pending in waiting]
    for batch, encoded in zip(batches, found, strict=True):
        np.testing.assert_array_equal(encoded.latents, plain.encode(batch).latents)
        assert encoded.finite.all()
        assert encoded.device_s > 0
    assert all(mark.waits == 1 for mark in lane.downs)


def test_results_own_their_memory(late, pictures):
    encoder = late("AutoencoderTiny")
    first = encoder.encode(pictures)
    kept = first.latents.copy()
    encoder.encode(pictures[:, ::-1])
    np.testing.assert_array_equal(first.latents, kept)


def test_pictures_are_not_needed_after_they_were_submitted(late, pictures):
    encoder = late("AutoencoderTiny")
    mine = pictures.copy()
    pending = encoder.submit(list(mine))
    mine[:] = 0
    np.testing.assert_array_equal(pending.result().latents, late("AutoencoderTiny").encode(pictures).latents)


def test_a_device_that_fails_later_says_so_with_the_result(late, pictures):
    encoder = late("AutoencoderTiny", LateLane(error=torch.AcceleratorError("CUDA error: an illegal address")))
    pending = encoder.submit(list(pictures))
    with pytest.raises(DeviceError, match="failed on 3 pictures of 64x96") as caught:
        pending.result()
    assert caught.value.__context__ is None


def test_a_mark_that_cannot_be_asked_leaves_the_error_to_the_result(late, pictures):
    class Broken(LateMark):
        def query(self):
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    encoder = late("AutoencoderTiny")
    pending = encoder.submit(list(pictures))
    pending.mark = Broken(error=torch.AcceleratorError("CUDA error: unspecified launch failure"))
    assert pending.done()
    with pytest.raises(DeviceError, match="failed on"):
        pending.result()


def test_memory_is_bounded_and_used_again():
    lane = LateLane()
    ring = Ring(lane, slots=3)
    marks = []
    for size in [100, 90, 80, 70, 60, 50]:
        slot = ring.take(size)
        marks.append(LateMark())
        ring.give_back(slot, marks[-1])
    assert len(lane.memory) == 3
    assert [mark.waits for mark in marks] == [1, 1, 1, 0, 0, 0]


def test_a_slot_that_is_too_small_is_replaced():
    lane = LateLane()
    ring = Ring(lane, slots=1)
    ring.give_back(ring.take(10))
    assert ring.take(20).memory.nbytes == 20
    ring.clear()
    assert ring.slots == 1
    assert SLABS == 3


def test_parts_of_a_slot_have_their_own_type():
    slot = Ring(PlainLane(CPU)).take(20)
    slot.view((2, 2), torch.float32)[:] = 1.5
    slot.view((4,), torch.bool, 16)[:] = True
    assert slot.memory[:16].view(torch.float32).tolist() == [1.5] * 4
    assert slot.memory[16:].tolist() == [1] * 4


def test_a_stopwatch_counts_to_its_stop():
    watch = Stopwatch(CPU)
    watch.stop()
    seconds = watch.seconds()
    assert 0 <= seconds == watch.seconds()


def test_pixels_are_channels_last_without_a_move(tiny, pictures):
    seen = []
    encoder = VaeEncoder(describe_model(str(tiny("AutoencoderKL"))), CPU)
    (module,) = encoder._modules.values()
    module.encoder.conv_in.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    encoder.encode(pictures)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert (seen[0].min().item(), seen[0].max().item()) == (-1.0, 1.0)
