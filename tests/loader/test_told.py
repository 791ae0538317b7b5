"""A loader given to a ``DataLoader`` as it is: workers that stay serve the epoch that was set, or say why not."""

import copy
import itertools
import multiprocessing
import pickle

import pytest
import torch
from loader_children import ranks_of_one_loader
from made_tokens import cache_of, texts
from small_cache import of_three_sizes
from torch.utils.data import DataLoader, RandomSampler, get_worker_info

from latentcache.errors import UsageError
from latentcache.loader.cache import open_cache
from latentcache.loader.iterable import as_iterable
from latentcache.loader.told import Told

STAY = {"batch_size": None, "num_workers": 2, "persistent_workers": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Seventeen pictures in three buckets: six batches of three."""
    return of_three_sizes(tmp_path_factory.mktemp("told"), 17)


@pytest.fixture(params=["pictures", "tokens", "tokens of several lengths"])
def loading(request, root):
    """What makes a loader, and how to know its batches."""
    if request.param == "pictures":
        return open_cache(root).loader, lambda batches: [batch["keys"] for batch in batches]
    lengths = [16, 32, 64] if request.param != "tokens" else None
    loader = cache_of(texts(20, 60)).padded(64, lengths=lengths).loader
    return loader, lambda batches: [batch["input_ids"].tolist() for batch in batches]


def expected(loading, epoch, seed=1):
    make, known = loading
    loader = make(batch_size=3, seed=seed)
    loader.set_epoch(epoch)
    return known(loader)


def test_workers_that_stay_serve_the_epoch_that_was_set(loading):
    make, known = loading
    loader = make(batch_size=3, seed=1)
    batches = DataLoader(loader, **STAY)
    for epoch in (0, 1, 1, 5, 0):
        loader.set_epoch(epoch)
        assert known(batches) == expected(loading, epoch)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_so_do_those_that_are_no_forks(root, method):
    loading = open_cache(root).loader, lambda batches: [batch["keys"] for batch in batches]
    loader = loading[0](batch_size=3, seed=1)
    batches = DataLoader(loader, **STAY, multiprocessing_context=method)
    for epoch in (0, 2):
        loader.set_epoch(epoch)
        assert loading[1](batches) == expected(loading, epoch)


def test_what_is_set_in_the_middle_of_a_pass_changes_none_of_its_batches(loading):
    make, known = loading
    loader = make(batch_size=2, seed=1)
    whole = known(loader)
    for more in (STAY, STAY | {"persistent_workers": False}, STAY | {"prefetch_factor": 1}):
        loader.set_epoch(0)
        batches = DataLoader(loader, **more)
        passing = iter(batches)
        head = known([next(passing), next(passing)])  # one of each worker: both have begun
        loader.set_epoch(1)
        assert head + known(passing) == whole
        fresh = make(batch_size=2, seed=1)
        fresh.set_epoch(1)
        assert known(batches) == known(fresh)


@pytest.mark.parametrize("form", [lambda loader: loader, as_iterable])
def test_passes_of_one_seed_of_torch_are_passes_of_their_own(loading, form):
    """Workers are known by the seed that torch draws for them, and a program may seed it alike before every epoch."""
    make, known = loading
    batches = form(loader := make(batch_size=3, seed=1))
    for epoch in (0, 1, 2):
        torch.manual_seed(42)
        batches.set_epoch(epoch)
        assert known(DataLoader(batches, batch_size=None, num_workers=2)) == expected(loading, epoch)
    assert loader.epoch == 2


def test_a_pass_that_was_broken_off_is_followed_by_a_whole_one(loading):
    make, known = loading
    loader = make(batch_size=3, seed=1)
    batches = DataLoader(loader, **STAY)
    for epoch in (0, 1, 2):
        loader.set_epoch(epoch)
        known(itertools.islice(batches, epoch))
        loader.set_epoch(epoch + 4)
        assert known(batches) == expected(loading, epoch + 4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_workers_of_a_copy_hear_of_its_epochs_and_not_of_the_other_ones(loading, copied):
    make, known = loading
    loader = make(batch_size=3, seed=1)
    other = copied(loader)
    batches = DataLoader(other, **STAY)
    assert known(batches) == expected(loading, 0)
    loader.set_epoch(5)
    other.set_epoch(2)
    assert known(batches) == expected(loading, 2)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_rank_that_was_given_a_loader_tells_its_own_workers(root, method):
    loader = open_cache(root).loader(batch_size=3, seed=1)
    told = as_iterable(open_cache(root).loader(batch_size=3, seed=1))
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=ranks_of_one_loader, args=(loader, told, results))
    child.start()
    for served in (loader, told):
        served.set_epoch(7)  # the child's workers must not hear of it
    passes = results.get(timeout=120)
    child.join(60)
    loading = open_cache(root).loader, lambda batches: [batch["keys"] for batch in batches]
    assert passes == [expected(loading, epoch) for epoch in (3, 4)] * 2


def late(take, begun, go):
    """``loader[step]`` as it is for the first worker, and after a sign for the second."""

    def wait_and_take(self, step):
        if get_worker_info().id == 1:
            assert go.wait(60)
            return take(self, step)
        batch = take(self, step)
        begun.set()
        return batch

    return wait_and_take


@pytest.mark.parametrize("batch_size", [3, 17])
def test_one_pass_is_never_of_two_epochs(root, monkeypatch, batch_size):
    """The second worker takes its first step after ``set_epoch``, the first one its last before it."""
    loader = open_cache(root).loader(batch_size=batch_size, seed=1, small_buckets="repeat")
    begun, go = multiprocessing.Event(), multiprocessing.Event()
    monkeypatch.setattr(type(loader), "__getitem__", late(type(loader).__getitem__, begun, go))
    passing = iter(batches := DataLoader(loader, **STAY))
    assert begun.wait(60)
    loader.set_epoch(1)
    go.set()
    with pytest.raises(UsageError, match="is of epoch 1 here and of 0 in another"):
        list(passing)
    loading = open_cache(root).loader, lambda batches: [batch["keys"] for batch in batches]
    if batch_size == 3:
        assert loading[1](batches) == expected(loading, 1)


def test_an_order_of_a_samplers_own_is_served_and_no_other_epoch_of_it(loading):
    make, known = loading
    loader = make(batch_size=1, seed=1)
    batches = DataLoader(loader, **STAY, sampler=RandomSampler(loader))
    assert sorted(known(batches), key=str) == sorted(known(loader), key=str)
    loader.set_epoch(1)
    with pytest.raises(UsageError, match="an order of a sampler's own") as caught:
        list(batches)
    assert "as_iterable" in str(caught.value)
    anew = DataLoader(loader, batch_size=None, num_workers=2, sampler=RandomSampler(loader))
    assert sorted(known(anew), key=str) == sorted(known(loader), key=str)


def test_what_workers_cannot_be_told_is_an_error(loading):
    make, known = loading
    loader, other = make(batch_size=3, seed=1), make(batch_size=3, seed=2)
    batches = DataLoader(loader, **STAY)
    known(batches)
    loader.set_epoch(2**63)
    with pytest.raises(UsageError, match="64 bits"):
        list(batches)
    assert known(DataLoader(loader, batch_size=None, num_workers=2)) == expected(loading, 2**63)
    other.set_epoch(4)
    batches = DataLoader(loader, **STAY)
    loader.set_epoch(0)
    known(batches)
    loader.load_state_dict(other.state_dict())
    with pytest.raises(UsageError, match="a checkpoint of another seed"):
        list(batches)
    assert known(DataLoader(loader, batch_size=None, num_workers=2)) == expected(loading, 4, seed=2)


def test_a_checkpoint_of_the_same_seed_tells_its_epoch(loading):
    make, known = loading
    loader, other = make(batch_size=3, seed=1), make(batch_size=3, seed=1)
    batches = DataLoader(loader, **STAY)
    assert known(batches) == expected(loading, 0)
    other.set_epoch(4)
    loader.load_state_dict(other.state_dict())
    assert known(batches) == expected(loading, 4)


def test_a_position_that_workers_have_nothing_to_do_with_is_saved(loading):
    make, known = loading
    loader = make(batch_size=3, seed=1)
    before = loader.state_dict()
    batches = DataLoader(loader, batch_size=None, num_workers=2)
    known(batches)
    with pytest.raises(UsageError, match="does not count what worker processes served"):
        loader.state_dict()
    loader.set_epoch(1)
    assert loader.state_dict() == before | {"epoch": 1}
    known(batches)
    next(iter(loader))
    assert loader.state_dict()["legs"] == [[3, 1, 1]]


def test_without_workers_nothing_is_heard():
    told = Told()
    told.say(3, moved=True)
    assert told.hear(0, 5) == 5
    assert not told.served_by_workers
