"""Counts of what was served of each data set are those of the batches, at any place, after a resume, on all ranks."""

import json
import pickle
from collections import Counter

import pytest
from made_tokens import cache_of, texts
from small_cache import build, draw
from torch.utils.data import DataLoader

from latentcache.errors import UsageError
from latentcache.loader.cache import open_cache
from latentcache.loader.cache_mix import combine_caches
from latentcache.loader.iterable import as_iterable
from latentcache.loader.served import Served
from latentcache.loader.token_mix import combine_views

MANY = [[2, *row] for row in texts(60, 30, seed=1)]
FEW = [[3, *row] for row in texts(11, 60, seed=2)]
NAMES = {2: "many", 3: "few"}


def mixed(lengths=None, rows=43):
    views = [cache_of(ids).padded(64, lengths=lengths) for ids in (MANY, FEW)]
    return combine_views(views, weights=[2, 1], rows=rows, names=["many", "few"])


def counted(batches):
    """What batches hold, by their first id and the ones of their masks."""
    samples, tokens = Counter({"many": 0, "few": 0}), Counter({"many": 0, "few": 0})
    for batch in batches:
        fills = batch.get("is_pad_row")
        for place, row in enumerate(batch["input_ids"]):
            if fills is None or not fills[place]:
                name = NAMES[int(row[0])]
                samples[name] += 1
                tokens[name] += int(batch["attention_mask"][place].sum())
    return {name: Served(samples=samples[name], tokens=tokens[name]) for name in ("many", "few")}


def added(*counts):
    return {
        name: Served(samples=sum(one[name].samples for one in counts), tokens=sum(one[name].tokens for one in counts))
        for name in counts[0]
    }


@pytest.mark.parametrize("policy", ["repeat", "drop", "partial", "mask"])
@pytest.mark.parametrize("lengths", [None, [16, 32, 64]])
def test_counts_are_those_of_the_batches(policy, lengths):
    loader = mixed(lengths).loader(batch_size=4, small_buckets=policy, seed=5)
    epochs = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert loader.served(epoch) == counted([])
        had = []
        for batch in loader:
            had.append(batch)
            assert loader.served(epoch) == counted(had)
        epochs.append(counted(had))
        assert loader.served() == added(*epochs)
    assert [loader.served(epoch) for epoch in range(4)] == [*epochs, counted([])]


@pytest.mark.parametrize("after", [(4, 1), (3, 2)])
@pytest.mark.parametrize("lengths", [None, [16, 32, 64]])
def test_counts_go_on_after_a_resume_with_any_sizes_and_are_of_all_ranks(after, lengths):
    loader = mixed(lengths).loader(batch_size=4, seed=5)
    loader.set_epoch(1)
    passing = iter(loader)
    had = [next(passing) for _ in range(6)]
    state = json.loads(json.dumps(loader.state_dict()))
    size, world = after
    ranks = [mixed(lengths).loader(batch_size=size, world_size=world, rank=rank) for rank in range(world)]
    for other in ranks:
        other.load_state_dict(state)
        assert other.served(1) == counted(had)
        assert other.served(0)["many"].samples >= 28
    for step in zip(*map(iter, ranks), strict=True):
        had += step
        assert [other.served(1) for other in ranks] == [counted(had)] * world
    assert pickle.loads(pickle.dumps(ranks[0])).served() == ranks[0].served()


def test_a_state_of_workers_is_counted_too():
    whole = list(mixed().loader(batch_size=4, seed=2))
    stream = as_iterable(mixed().loader(batch_size=4, seed=2, prefetch=0))
    assert len(list(DataLoader(stream, batch_size=None, num_workers=2))) == len(whole)
    loader = mixed().loader(batch_size=4, seed=2)
    passing = iter(loader)
    next(passing)
    state = loader.state_dict()
    other = mixed().loader(batch_size=4)
    as_iterable(other).load_state_dict(state)
    assert other.served() == counted(whole[:1])


def test_without_weights_everything_is_one():
    loader = cache_of(MANY).packed(64).loader(batch_size=4)
    batch = next(iter(loader))
    assert loader.served() == {"all": Served(samples=4, tokens=int(batch["attention_mask"].sum()))}


@pytest.mark.parametrize("epoch", [-1, 0.5, True])
def test_no_such_epoch(epoch):
    with pytest.raises(UsageError, match="epoch"):
        mixed().loader(batch_size=4).served(epoch)


def test_pictures_have_no_tokens(shared, tmp_path):
    draw(tmp_path / "more" / "new.png", seed=99)
    build(tmp_path / "more", tmp_path / "more.latentcache")
    both = combine_caches([open_cache(shared[1]), open_cache(tmp_path / "more.latentcache")], weights=[1, 2])
    loader = both.loader(batch_size=3)
    found = Counter("more" if "new" in name else "cache" for batch in loader for name in batch["names"])
    assert loader.served() == {name: Served(samples=found[name]) for name in ("cache", "more")}
