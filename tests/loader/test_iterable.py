"""Whole batches in turn: any number of workers serves the loader's batches in its order, and resumes exactly."""

import copy
import json
import multiprocessing
import pickle

import numpy as np
import pytest
from small_cache import of_three_sizes
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from latentcache.errors import UsageError
from latentcache.loader.cache import open_cache
from latentcache.loader.iterable import IterableBatches, as_iterable


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Seventeen pictures in three buckets: six batches of three."""
    return open_cache(of_three_sizes(tmp_path_factory.mktemp("iterable"), 17))


def keys(batches):
    return [batch["keys"] for batch in batches]


def expected(opened, epoch, **options):
    loader = opened.loader(**{"batch_size": 3, "seed": 1} | options)
    loader.set_epoch(epoch)
    return keys(loader)


def test_it_is_an_iterable_data_set_with_a_length(opened):
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    assert isinstance(data, IterableDataset)
    assert len(data) == len(keys(data))
    assert keys(data) == expected(opened, 0)  # a second pass repeats the epoch


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("batch_size", [3, 4])
def test_any_number_of_workers_serves_the_same_batches_in_the_same_order(opened, workers, batch_size):
    data = as_iterable(opened.loader(batch_size=batch_size, seed=1))
    batches = DataLoader(data, batch_size=None, num_workers=workers)
    for epoch in (0, 1):
        data.set_epoch(epoch)
        got = list(batches)
        assert len(got) == len(batches) == len(data)
        assert keys(got) == expected(opened, epoch, batch_size=batch_size)


def test_more_workers_than_batches(opened):
    data = as_iterable(opened.loader(batch_size=16, seed=1))
    assert len(data) == 3
    assert keys(DataLoader(data, batch_size=None, num_workers=4)) == expected(opened, 0, batch_size=16)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_that_stay_see_the_next_epoch(opened, method):
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    more = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    batches = DataLoader(data, batch_size=None, **more)
    for epoch in (0, 3):
        data.set_epoch(epoch)
        assert keys(batches) == expected(opened, epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_refused_changes_nothing(opened, workers):
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    data.set_epoch(2)
    passing = iter(data)
    head = keys([next(passing)])
    data.load_state_dict(data.state_dict())
    for epoch in (-1, 1.7, "x", None, True, 2**63, 2**70):
        with pytest.raises(UsageError, match="epoch") as caught:
            data.set_epoch(epoch)
        assert "whole numbers" in str(caught.value) or "64 bits" in str(caught.value)
    assert head + keys(DataLoader(data, batch_size=None, num_workers=workers)) == expected(opened, 2)
    data.set_epoch(np.int64(3))
    assert keys(DataLoader(data, batch_size=None, num_workers=workers)) == expected(opened, 3)


def test_the_last_epoch_that_workers_can_be_told_of(opened):
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    data.set_epoch(2**63 - 1)
    assert keys(data) == expected(opened, 2**63 - 1)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))], ids=["copy", "pickle"]
)
def test_workers_of_a_copy_hear_of_its_epochs_and_not_of_the_other_ones(opened, copied):
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    data.set_epoch(1)
    other = copied(data)
    batches = DataLoader(other, batch_size=None, num_workers=2, persistent_workers=True)
    assert keys(batches) == expected(opened, 1)
    data.set_epoch(5)
    other.set_epoch(2)
    assert keys(batches) == expected(opened, 2)


def test_an_epoch_that_is_set_while_workers_begin_a_pass_is_no_mixture(opened, monkeypatch):
    """The second worker begins late, and after ``set_epoch``: it must not serve its share of another epoch."""
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    begun, go = multiprocessing.Event(), multiprocessing.Event()
    monkeypatch.setattr(IterableBatches, "__iter__", late(IterableBatches.__iter__, begun, go))
    passing = iter(DataLoader(data, batch_size=None, num_workers=2))
    assert begun.wait(60)
    data.set_epoch(1)
    go.set()
    with pytest.raises(UsageError, match=r"is of epoch (1 here and of 0|0 here and of 1) in another"):
        list(passing)


def late(begin, begun, go):
    """``begin`` as it is for the first worker, and after a sign for the second."""

    def wait_and_begin(self):
        if get_worker_info().id == 1:
            assert go.wait(60)
            return begin(self)
        batches = begin(self)
        begun.set()
        return batches

    return wait_and_begin


@pytest.mark.parametrize("more", [{}, {"persistent_workers": True}], ids=str)
def test_a_position_that_does_not_count_what_workers_serve_is_not_saved(opened, more):
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    before = data.state_dict()
    batches = DataLoader(data, batch_size=None, num_workers=2, **more)
    passing = iter(batches)
    next(passing)
    for _ in range(2):
        with pytest.raises(UsageError, match="does not count what worker processes served") as caught:
            data.state_dict()
    assert caught.value.slug == "served-by-workers"
    assert "StatefulDataLoader" in caught.value.fix
    list(passing)
    data.set_epoch(0)  # it is that one already: a place in it would be named again
    with pytest.raises(UsageError, match="worker processes"):
        data.state_dict()
    data.set_epoch(1)
    assert data.state_dict() == before | {"epoch": 1}
    keys(batches)
    data.load_state_dict(before)
    assert data.state_dict() == before
    keys(batches)
    next(iter(data))
    assert data.state_dict()["legs"] == [[3, 1, 1]]


def stateful(opened, workers, **options):
    data = as_iterable(opened.loader(batch_size=3, seed=1, **options))
    return data, StatefulDataLoader(data, batch_size=None, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 2, 4, 5, 6])
def test_a_stateful_data_loader_goes_on_exactly(opened, workers, done):
    """For every place in the epoch: the rest of it, then the next one whole."""
    data, batches = stateful(opened, workers)
    data.set_epoch(2)
    passing = iter(batches)
    head = keys(next(passing) for _ in range(done))
    state = copy.deepcopy(batches.state_dict())
    del passing
    fresh, again = stateful(opened, workers)
    again.load_state_dict(state)
    fresh.set_epoch(2)
    assert head + keys(again) == expected(opened, 2)
    fresh.set_epoch(3)
    assert keys(again) == expected(opened, 3)


@pytest.mark.parametrize("more", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_after_a_resumed_epoch_that_nobody_names_a_pass_repeats_it(opened, more):
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    batches = StatefulDataLoader(data, batch_size=None, **more)
    data.set_epoch(2)
    passing = iter(batches)
    head = keys(next(passing) for _ in range(2))
    state = copy.deepcopy(batches.state_dict())
    del passing
    fresh = as_iterable(opened.loader(batch_size=3, seed=1))
    again = StatefulDataLoader(fresh, batch_size=None, **more)
    again.load_state_dict(state)
    assert head + keys(again) == expected(opened, 2)
    assert keys(again) == expected(opened, 2)
    fresh.set_epoch(0)
    assert keys(again) == expected(opened, 0)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_was_named_before_workers_resume_comes_after_the_resumed_one(opened, persistent):
    _, batches = stateful(opened, 2)
    passing = iter(batches)
    head = keys([next(passing)])
    state = copy.deepcopy(batches.state_dict())
    del passing
    fresh = as_iterable(opened.loader(batch_size=3, seed=1))
    again = StatefulDataLoader(fresh, batch_size=None, num_workers=2, persistent_workers=persistent)
    again.load_state_dict(state)
    fresh.set_epoch(3)
    assert head + keys(again) == expected(opened, 0)
    assert keys(again) == expected(opened, 3)


def test_a_checkpoint_in_the_second_epoch_of_workers_that_stay(opened):
    """A worker that has served nothing of the new epoch must not save its place in the old one."""
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    batches = StatefulDataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    keys(batches)
    data.set_epoch(1)
    passing = iter(batches)
    head = keys([next(passing)])
    state = batches.state_dict()
    fresh, again = stateful(opened, 2)
    again.load_state_dict(state)
    fresh.set_epoch(1)
    assert head + keys(again) == expected(opened, 1)


def test_it_takes_the_checkpoint_of_a_plain_loader_and_gives_it_one(opened):
    loader = opened.loader(batch_size=3, seed=1)
    passing = iter(loader)
    head = keys(next(passing) for _ in range(2))
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    data.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    passing = iter(data)
    head += keys(next(passing) for _ in range(2))
    last = opened.loader(batch_size=3, seed=1)
    last.load_state_dict(data.state_dict())
    assert head + keys(last) == expected(opened, 0)
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    data.load_state_dict(loader.state_dict())
    assert head[:2] + keys(DataLoader(data, batch_size=None, num_workers=2)) == expected(opened, 0)


def test_another_world_size_loses_nothing(opened):
    """One rank with two workers was stopped; two ranks go on, with the position of the plain loader."""
    loader = opened.loader(batch_size=2, seed=1, small_buckets="partial")
    passing = iter(loader)
    served = [key for batch in (next(passing) for _ in range(3)) for key in batch["keys"]]
    for rank in range(2):
        data = as_iterable(opened.loader(batch_size=2, rank=rank, world_size=2, small_buckets="partial"))
        data.load_state_dict(loader.state_dict())
        served += [key for batch in DataLoader(data, batch_size=None, num_workers=2) for key in batch["keys"]]
    assert set(served) == {row.tobytes().hex() for row in opened.generation.rows.key}
    assert len(served) - len(set(served)) <= 3  # equal shares of a short bucket


def test_it_can_be_pickled(opened):
    data = as_iterable(opened.loader(batch_size=3, seed=1))
    data.set_epoch(4)
    assert keys(pickle.loads(pickle.dumps(data))) == expected(opened, 4)
