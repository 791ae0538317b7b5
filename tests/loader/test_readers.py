"""Loaders whose batches other processes read: everything as without them, whatever happens to those."""

import gc
import os
import pickle
import select
import signal
import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from small_cache import build, damage_payload, draw

from latentcache.errors import CorruptEntryError, UsageError
from latentcache.loader.cache import open_cache

SHAPES = [(96, 64), (64, 96), (80, 80)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """34 pictures in three buckets."""
    folder = tmp_path_factory.mktemp("readers")
    for number in range(34):
        draw(folder / "data" / f"p{number:02}.png", SHAPES[number % 3], seed=number)
    build(folder / "data", folder / "cache")
    return folder / "cache"


@pytest.fixture
def copied(made, tmp_path):
    subprocess.run(["cp", "-a", made, tmp_path / "cache"], check=True)
    return tmp_path / "cache"


def started(loader):
    """The loader, when its processes can be asked."""
    with loader._readers.taken() as taken:
        assert taken
    for process in loader._readers._processes:
        poll = select.poll()
        poll.register(process.link, select.POLLIN)
        assert poll.poll(60_000)
        assert process.is_ready()
    return loader


def answered(loader):
    return sum(process._answered for process in loader._readers._processes)


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]


def children():
    return {int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii").split()}


@pytest.mark.parametrize(("readers", "prefetch"), [(1, 0), (1, 2), (2, 2), (2, 5), (3, 1)])
def test_batches_are_those_of_a_loader_without(made, readers, prefetch):
    cache = open_cache(made)
    with started(cache.loader(batch_size=3, readers=readers, prefetch=prefetch)) as loader:
        plain = cache.loader(batch_size=3, prefetch=0)
        for epoch in range(3):
            plain.set_epoch(epoch)
            loader.set_epoch(epoch)
            for expected, found in zip(plain, loader, strict=True):
                same(expected, found)
        assert answered(loader) == 3 * len(loader)


def test_types_flips_and_moments_too(made):
    cache = open_cache(made)
    for options in (
        {"dtype": torch.float32},
        {"scaled": False},
        {"format": "diffusers-sdxl"},
        {"small_buckets": "partial"},
    ):
        with started(cache.loader(batch_size=4, readers=2, **options)) as loader:
            for expected, found in zip(cache.loader(batch_size=4, prefetch=0, **options), loader, strict=True):
                same(expected, found)
            assert answered(loader) == len(loader)


def test_every_batch_of_an_epoch_may_be_kept(made):
    cache = open_cache(made)
    with started(cache.loader(batch_size=2, readers=2)) as loader:
        kept = list(loader)
        list(loader)
    for expected, found in zip(cache.loader(batch_size=2, prefetch=0), kept, strict=True):
        same(expected, found)


def test_until_they_are_ready_batches_are_read_here(made):
    cache = open_cache(made)
    with cache.loader(batch_size=3, readers=1) as loader:
        for expected, found in zip(cache.loader(batch_size=3, prefetch=0), loader, strict=True):
            same(expected, found)


@pytest.mark.parametrize("readers", [0, 2])
def test_damage_is_named_at_its_batch(copied, readers):
    name = damage_payload(copied, row=5)
    loader = open_cache(copied).loader(batch_size=2, readers=readers)
    if readers:
        started(loader)
    with pytest.raises(CorruptEntryError) as caught:
        list(loader)
    assert caught.value.sample == name
    loader.close()


def test_damage_is_replaced_as_without(copied):
    damage_payload(copied, row=5)
    cache = open_cache(copied)
    plain = cache.loader(batch_size=2, prefetch=0, on_bad="substitute")
    with started(cache.loader(batch_size=2, readers=2, on_bad="substitute")) as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for expected, found in zip(plain, loader, strict=True):
            same(expected, found)
        assert loader.substituted == plain.substituted != {}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGBUS])
def test_a_process_that_dies_is_said_and_does_no_harm(made, how):
    cache = open_cache(made)
    loader = started(cache.loader(batch_size=2, readers=2))
    iterator = iter(loader)
    found = [next(iterator), next(iterator)]
    os.kill(loader._readers._processes[0]._process.pid, how)
    time.sleep(0.1)
    with pytest.warns(UserWarning, match=f"a process that read for the loader died .signal {int(how)}."):
        found += [*iterator, *loader]  # and the next epoch
    expected = [*cache.loader(batch_size=2, prefetch=0)] * 2
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        same(one, other)
    loader.close()


def test_a_pass_that_ends_early_leaves_nothing_under_way(made):
    cache = open_cache(made)
    with started(cache.loader(batch_size=2, readers=2, prefetch=3)) as loader:
        for _ in range(5):
            for number, _ in enumerate(loader):
                if number == 2:
                    break
            gc.collect()
        assert all(not process._held and not process._found for process in loader._readers._processes)
        for expected, found in zip(cache.loader(batch_size=2, prefetch=0), loader, strict=True):
            same(expected, found)


def test_two_passes_at_once(made):
    cache = open_cache(made)
    with started(cache.loader(batch_size=2, readers=1)) as loader:
        for one, other in zip(loader, loader, strict=True):
            same(one, other)


def test_a_checkpoint_counts_what_was_delivered(made):
    cache = open_cache(made)
    with started(cache.loader(batch_size=2, readers=2, prefetch=4)) as loader:
        iterator = iter(loader)
        done = [next(iterator) for _ in range(3)]
        state = loader.state_dict()
        resumed = cache.loader(batch_size=2, readers=2)
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert len(done) + len(rest) == len(loader)
        for expected, found in zip(cache.loader(batch_size=2, prefetch=0), done + rest, strict=True):
            same(expected, found)
        resumed.close()


def test_a_child_forked_in_the_middle_goes_on_without_and_touches_nothing(made):
    cache = open_cache(made)
    with started(cache.loader(batch_size=2, readers=2, prefetch=2)) as loader:
        expected = list(cache.loader(batch_size=2, prefetch=0))
        iterator = iter(loader)
        first = next(iterator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            status = 1
            try:
                for one, other in zip(expected[1:], list(iterator), strict=True):
                    same(one, other)
                time.sleep(0.3)
                same(expected[0], first)  # the parent has gone on and left it alone
                status = 0
            finally:
                os._exit(status)
        for one, other in zip(expected, [first, *iterator], strict=True):
            same(one, other)
        first = None
        for _ in range(3):
            list(loader)
        assert os.waitpid(child, 0)[1] == 0
        assert answered(loader) >= 3 * len(loader)


def test_it_is_pickled_without_its_processes(made):
    with started(open_cache(made).loader(batch_size=2, readers=1)) as loader:
        copy = pickle.loads(pickle.dumps(loader))
        assert copy._readers._processes == []
        for one, other in zip(loader, copy, strict=True):
            same(one, other)
        copy.close()


def test_no_process_outlives_its_loader(made):
    before = children()
    cache = open_cache(made)
    loader = started(cache.loader(batch_size=2, readers=2))
    assert len(children() - before) == 2
    loader.close()
    loader.close()
    assert children() == before
    list(loader)  # starts them again
    del loader
    gc.collect()
    assert children() == before


def test_what_cannot_be_is_refused(made, monkeypatch):
    cache = open_cache(made)
    with pytest.raises(UsageError, match="readers=-1"):
        cache.loader(batch_size=2, readers=-1)
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UsageError, match="memfd"):
        cache.loader(batch_size=2, readers=1)
    assert len(list(cache.loader(batch_size=2))) > 0


def test_batches_of_many_entries_are_read_here(made):
    cache = open_cache(made).repeated(300)
    with started(cache.loader(batch_size=4500, readers=1, small_buckets="partial")) as loader:
        counts = [len(batch["names"]) for batch in loader]
    assert sum(counts) == len(cache)
    assert np.max(counts) <= 4500
