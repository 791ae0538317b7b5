"""The words that loaders of pictures and of tokens share are the same ones."""

from made_tokens import cache_of, texts

from latentcache import CacheLoader
from latentcache.loader.epochs import Epochs
from latentcache.loader.token_loader import TokenLoader

WORDS = ["sampler", "position", "steps", "epoch_at", "epoch", "set_epoch", "remaining", "__len__"]


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
