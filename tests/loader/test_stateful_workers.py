"""A loader given as it is to torchdata's ``StatefulDataLoader``: it goes on exactly, with and without workers."""

import copy

import pytest
from made_tokens import cache_of, texts
from small_cache import of_three_sizes
from torchdata.stateful_dataloader import StatefulDataLoader

from latentcache.loader.cache import open_cache

WAYS = [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Seventeen pictures in three buckets: six batches of three."""
    return of_three_sizes(tmp_path_factory.mktemp("stateful"), 17)


@pytest.fixture(params=["pictures", "tokens"])
def loading(request, root):
    """What makes a loader, and how to know its batches."""
    if request.param == "pictures":
        return open_cache(root).loader, lambda batches: [batch["keys"] for batch in batches]
    loader = cache_of(texts(17, 60)).padded(64, lengths=[16, 32, 64]).loader
    return loader, lambda batches: [batch["input_ids"].tolist() for batch in batches]


def expected(loading, epoch):
    make, known = loading
    loader = make(batch_size=3, seed=1)
    loader.set_epoch(epoch)
    return known(loader)


def interrupted(loading, epoch, done, more):
    """The first batches of an epoch, and what a checkpoint would hold."""
    make, known = loading
    loader = make(batch_size=3, seed=1)
    batches = StatefulDataLoader(loader, batch_size=None, **more)
    loader.set_epoch(epoch)
    passing = iter(batches)
    head = known(next(passing) for _ in range(done))
    return head, copy.deepcopy(batches.state_dict())


@pytest.mark.parametrize("more", WAYS, ids=str)
@pytest.mark.parametrize("done", [1, 3, 5])
def test_it_goes_on_in_the_middle_of_an_epoch(loading, more, done):
    make, known = loading
    head, state = interrupted(loading, 2, done, more)
    loader = make(batch_size=3, seed=1)
    again = StatefulDataLoader(loader, batch_size=None, **more)
    again.load_state_dict(state)
    loader.set_epoch(2)
    assert head + known(again) == expected(loading, 2)
    for epoch in (3, 2):
        loader.set_epoch(epoch)
        assert known(again) == expected(loading, epoch)


@pytest.mark.parametrize("more", WAYS, ids=str)
def test_after_a_resumed_epoch_that_nobody_names_a_pass_repeats_it(loading, more):
    make, known = loading
    head, state = interrupted(loading, 2, 2, more)
    loader = make(batch_size=3, seed=1)
    again = StatefulDataLoader(loader, batch_size=None, **more)
    again.load_state_dict(state)
    assert head + known(again) == expected(loading, 2)
    assert known(again) == expected(loading, 2)
    loader.set_epoch(0)
    assert known(again) == expected(loading, 0)


@pytest.mark.parametrize("more", WAYS[1:2], ids=str)
def test_an_epoch_that_was_named_before_workers_resume_comes_after_the_resumed_one(loading, more):
    make, known = loading
    head, state = interrupted(loading, 0, 2, more)
    loader = make(batch_size=3, seed=1)
    again = StatefulDataLoader(loader, batch_size=None, **more)
    again.load_state_dict(state)
    loader.set_epoch(3)
    assert head + known(again) == expected(loading, 0)
    assert known(again) == expected(loading, 3)
