"""A trainer beside a build: it opens a snapshot by its number, and a checkpoint finds its own again."""

import gc
import warnings

import pytest
import torch
from made_caches import images, opened
from small_tokens import build, texts, write_texts

from latentcache import open_cache
from latentcache.errors import CacheNotFoundError, PlanError, UsageError
from latentcache.store.paths import CachePaths
from latentcache.store.publish import remove_snapshot

SHAPES = [(64, 96), (96, 64), (80, 80)]


def names_of(batches):
    return [name for batch in batches for name in batch["names"]]


@pytest.fixture
def two(tmp_path):
    """A cache with a snapshot of 8 images and one of 12."""
    for count in (8, 12):
        images(tmp_path / "cache", [SHAPES[number % 3] for number in range(count)])
    return tmp_path / "cache"


def interrupted(cache, **more):
    """The state after one batch of an epoch, and the names of the others."""
    loader = opened(cache, snapshot=1).loader(batch_size=2, seed=3, **more)
    batches = iter(loader)
    next(batches)
    return loader.state_dict(), names_of(batches)


def test_a_snapshot_is_opened_by_its_number(two):
    assert len(opened(two)) == 12
    assert len(opened(two, snapshot=1)) == 8
    with pytest.raises(CacheNotFoundError, match=r"snapshot 7 of .* is gone"):
        open_cache(two, snapshot=7)
    with pytest.raises(UsageError, match="snapshot"):
        open_cache(two, snapshot=0)
    with pytest.raises(CacheNotFoundError, match="no cache"):
        open_cache(two / "none", snapshot=1)


def test_a_checkpoint_opens_its_snapshot_again(two):
    state, rest = interrupted(two)
    assert state["snapshot"] == 1
    loader = opened(two).loader(batch_size=2, seed=3)
    loader.load_state_dict(state)
    assert names_of(loader) == rest
    assert loader.state_dict()["snapshot"] == 1
    loader.load_state_dict(opened(two).loader(batch_size=2, seed=3).state_dict())
    assert len(names_of(loader)) == 12


def test_a_checkpoint_whose_snapshot_is_gone(two):
    state, _ = interrupted(two)
    gc.collect()
    assert remove_snapshot(CachePaths(two), 1)
    with pytest.raises(PlanError, match="snapshot 1, which is gone") as caught:
        opened(two).loader(batch_size=2, seed=3).load_state_dict(state)
    assert caught.value.slug == "resume-mismatch"


def test_samples_that_were_chosen_are_chosen_again(two):
    training, _ = opened(two, snapshot=1).split(0.3)
    state = training.loader(batch_size=1).state_dict()
    later, _ = opened(two).split(0.3)
    with pytest.raises(PlanError, match="belongs to another cache") as caught:
        later.loader(batch_size=1).load_state_dict(state)
    assert "snapshot=1" in caught.value.fix


def test_rows_of_a_snapshot(tmp_path):
    data, cache = tmp_path / "t.jsonl", tmp_path / "cache"
    for count in (20, 30):
        build(write_texts(data, texts(count, 400)), cache)
    loader = open_cache(cache, snapshot=1).rows(pack=128).loader(batch_size=2)
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), [batch["input_ids"].clone() for batch in batches]
    later = open_cache(cache).rows(pack=128).loader(batch_size=2)
    later.load_state_dict(state)
    assert all(torch.equal(batch["input_ids"], other) for batch, other in zip(later, rest, strict=True))


def test_a_snapshot_of_a_build_that_goes_on_is_named(tmp_path):
    images(tmp_path / "cache", [SHAPES[0]] * 3, building=10)
    with pytest.warns(UserWarning, match=r"snapshot 1 of .* has 3 of 10 samples"):
        open_cache(tmp_path / "cache")
    images(tmp_path / "cache", [SHAPES[0]] * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_cache(tmp_path / "cache")
