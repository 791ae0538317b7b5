"""Whoever would deal the batches of one rank out to all ranks again is refused; accelerate itself: tests/trainers."""

import accelerate  # noqa: F401
import pytest
import torch
from made_tokens import cache_of, texts
from small_cache import build, draw_four

from latentcache.errors import UsageError
from latentcache.loader.cache import open_cache
from latentcache.loader.iterable import as_iterable


class DataLoaderShard:
    """Stands for the classes of accelerate, which name the epoch first and then ask for batches."""

    def read(self, data):
        return next(iter(data))

    def name_epoch(self, data):
        data.set_epoch(1)


class IterableDatasetShard(DataLoaderShard):
    pass


class DataLoaderDispatcher(DataLoaderShard):
    pass


@pytest.fixture(scope="module", params=["pictures", "tokens"])
def loading(request, tmp_path_factory):
    if request.param == "tokens":
        return cache_of(texts(13)).padded(64).loader
    folder = tmp_path_factory.mktemp("splitters")
    build(draw_four(folder / "data"), folder / "cache")
    return open_cache(folder / "cache").loader


@pytest.mark.parametrize("splitter", [DataLoaderShard, IterableDatasetShard, DataLoaderDispatcher])
def test_a_second_split_is_refused_with_the_reason(loading, splitter):
    for made in (lambda loader: loader, as_iterable):
        with pytest.raises(UsageError, match="one rank") as caught:
            splitter().name_epoch(made(loading(batch_size=1, rank=1, world_size=2)))
        assert caught.value.slug == "sharded-twice"
        assert "keep its DataLoader out of accelerator.prepare" in caught.value.fix
    with pytest.raises(UsageError, match="one rank"):
        splitter().read(as_iterable(loading(batch_size=1, rank=1, world_size=2)))


@pytest.mark.parametrize("splitter", [DataLoaderShard, IterableDatasetShard, DataLoaderDispatcher])
def test_a_loader_of_all_ranks_may_be_split(loading, splitter):
    alone = as_iterable(loading(batch_size=1))
    splitter().name_epoch(alone)
    assert all(torch.is_tensor(one) for one in splitter().read(alone).values() if not isinstance(one, list))


def test_nobody_else_is_refused(loading):
    loader = loading(batch_size=1, rank=1, world_size=2)
    loader.set_epoch(1)
    assert next(iter(as_iterable(loader)))
