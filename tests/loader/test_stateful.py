"""torchdata's StatefulDataLoader resumes exactly, with and without workers."""

import copy

import pytest
from made_caches import documents, opened, texts
from torchdata.stateful_dataloader import StatefulDataLoader

WAYS = [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.fixture(params=["samples", "rows"])
def make(request, many, tmp_path):
    if request.param == "samples":
        return many.loader, lambda batches: [batch["names"] for batch in batches]
    view = opened(documents(tmp_path / "t", texts(17, 60))).rows(pad=64)
    return view.loader, lambda batches: [batch["input_ids"].tolist() for batch in batches]


def way_of(loader, more):
    """A StatefulDataLoader over the sampler, or over the loader."""
    return stateful(loader, more) if more is not None else StatefulDataLoader(loader, batch_size=None)


@pytest.mark.parametrize("more", [None, *WAYS], ids=str)
def test_after_a_finished_epoch_it_serves_the_next_one(make, more):
    loader_of, known = make
    loader, other, expected = (loader_of(batch_size=3, seed=1) for _ in range(3))
    batches, again = way_of(loader, more), way_of(other, more)
    loader.set_epoch(1)
    list(batches)
    state = copy.deepcopy(batches.state_dict())
    expected.set_epoch(2)
    again.load_state_dict(copy.deepcopy(state))
    assert known(again) == known(expected)
    assert other.epoch == 2
    batches.load_state_dict(state)  # into the loader that made it
    assert known(batches) == known(expected)
    assert loader.epoch == 2


def test_a_loader_that_loads_a_checkpoint_after_an_epoch_was_named(many):
    loader, other = many.loader(batch_size=3), many.loader(batch_size=3)
    loader.set_epoch(4)
    list(loader)
    other.set_epoch(0)
    with pytest.warns(UserWarning, match="end of epoch 4: epoch 5 is served, not 0"):
        other.load_state_dict(loader.state_dict())
    assert other.epoch == 5
    other.set_epoch(0)
    assert other.epoch == 0


@pytest.mark.parametrize("more", WAYS[:2], ids=str)
def test_a_named_epoch_that_does_not_follow_the_checkpoint_is_said(many, more):
    loader, other = many.loader(batch_size=3), many.loader(batch_size=3)
    batches, again = way_of(loader, more), way_of(other, more)
    loader.set_epoch(4)
    list(batches)
    again.load_state_dict(copy.deepcopy(batches.state_dict()))
    other.set_epoch(0)
    with pytest.warns(UserWarning, match="end of epoch 4: epoch 5 is served, not 0"):
        names = [batch["names"] for batch in again]
    loader.set_epoch(5)
    assert names == [batch["names"] for batch in loader]


def stateful(loader, more):
    return StatefulDataLoader(loader.dataset, sampler=loader.sampler, batch_size=None, **more)


@pytest.mark.parametrize("more", WAYS, ids=str)
@pytest.mark.parametrize("done", [1, 4])
def test_a_stateful_data_loader_resumes_inside_an_epoch(make, more, done):
    loader_of, known = make
    whole = loader_of(batch_size=3, seed=1)
    whole.set_epoch(2)
    expected = known(whole)
    loader = loader_of(batch_size=3, seed=1)
    batches = stateful(loader, more)
    loader.set_epoch(2)
    iterator = iter(batches)
    head = known(next(iterator) for _ in range(done))
    state = copy.deepcopy(batches.state_dict())
    del iterator
    other = loader_of(batch_size=3, seed=1)
    again = stateful(other, more)
    again.load_state_dict(state)
    assert head + known(again) == expected
    assert known(again) == expected  # an epoch without set_epoch is repeated
    other.set_epoch(3)
    whole.set_epoch(3)
    assert known(again) == known(whole)
