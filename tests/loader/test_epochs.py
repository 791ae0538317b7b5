"""The words that loaders of pictures and of tokens share are the same ones."""

import json

import numpy as np
import pytest
import torch
from made_tokens import cache_of, texts
from small_cache import build

from latentcache import CacheLoader, open_cache
from latentcache.errors import UsageError
from latentcache.loader.epochs import Epochs
from latentcache.loader.token_loader import TokenLoader

WORDS = ["sampler", "position", "steps", "epoch_at", "epoch", "set_epoch", "remaining", "__len__"]


@pytest.fixture(scope="module", params=["pictures", "tokens"])
def loading(request, shared, tmp_path_factory):
    """What makes a loader."""
    if request.param == "tokens":
        return cache_of(texts(13)).padded(64).loader
    cache = tmp_path_factory.mktemp("epochs") / "cache"
    build(shared[0], cache)
    return open_cache(cache).loader


def test_one_implementation_for_both():
    for kind in (CacheLoader, TokenLoader):
        assert issubclass(kind, Epochs)
        assert [word for word in WORDS if word in vars(kind)] == []


def test_epochs_of_seven_batches():
    loader = cache_of(texts(13)).padded(64).loader(batch_size=2)
    assert (len(loader), loader.remaining(), loader.epoch) == (7, 7, 0)
    assert [loader.steps(2, accum) for accum in (1, 3, 4, 8, 20)] == [14, 6, 4, 2, 2]
    assert loader.steps(1.5, 2) == 6
    assert [loader.epoch_at(step, 3) for step in (1, 2, 3, 4)] == [3 / 7, 6 / 7, 1, 1 + 3 / 7]
    loader.set_epoch(4)
    assert loader.epoch == 4
    passing = iter(loader)
    next(passing)
    assert loader.remaining() == 6


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.uint8])
def test_numbers_of_numpy_are_numbers(loading, kind):
    words = {"batch_size": 1, "world_size": 2, "rank": 1, "prefetch": 1, "seed": 5}
    plain, loader = loading(**words), loading(**{name: kind(value) for name, value in words.items()})
    places = [one.position.whole().rows.tolist() for one in (plain, loader)]
    assert places[0] == places[1]
    assert len(list(loader)) == len(loader)
    next(iter(loader)), next(iter(plain))
    assert json.loads(json.dumps(loader.state_dict())) == plain.state_dict()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(({"seed": seed}, "seed=") for seed in (1.5, None, "1", True, torch.tensor(3))),
        *(({"rank": rank}, "rank .* of 2") for rank in (0.5, -1, 2, True, "0", None)),
        *(({"prefetch": prefetch}, "prefetch=") for prefetch in (1.5, -1, True, None, "2")),
        *(({"batch_size": size}, "batch size") for size in (1.5, None, torch.tensor(3))),
    ],
)
def test_what_is_no_number_is_refused_in_words(loading, words, said):
    with pytest.raises(UsageError, match=said) as caught:
        loading(**{"batch_size": 1, "world_size": 2} | words)
    assert caught.value.fix


@pytest.mark.parametrize("words", [(2, 0), (2, -1), (2, 1.5), (-1,), (float("nan"),), (float("inf"),)])
def test_steps_that_cannot_be_are_refused_in_words(words):
    loader = cache_of(texts(13)).padded(64).loader(batch_size=2)
    with pytest.raises(UsageError, match=r"epochs|grad_accum"):
        loader.steps(*words)
    assert (loader.steps(0), loader.steps(np.float32(0.5), np.int64(2))) == (0, 2)


@pytest.mark.parametrize("words", [(3, 0), (3, 1.5), (-1,), (1.5,), (None,)])
def test_an_epoch_of_no_step_is_refused_in_words(words):
    loader = cache_of(texts(13)).padded(64).loader(batch_size=2)
    with pytest.raises(UsageError, match=r"step|grad_accum"):
        loader.epoch_at(*words)
    assert loader.epoch_at(0) == 0
