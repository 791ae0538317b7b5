"""LLaMA-Factory: epochs are wrong in streaming mode, because the length is unknown.

Here order is arithmetic over entries that are known, so ``len`` is exact before anything is read, on every rank, for
every policy. The tests fail where a length is an estimate (entries divided by the batch size): buckets that do not
divide make it wrong.
"""

import pytest
from small_cache import of_three_sizes

from latentcache import open_cache

pytestmark = pytest.mark.filterwarnings("ignore:bucket .* in an epoch to fill a batch")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Thirteen images in buckets of five, four and four."""
    return of_three_sizes(tmp_path_factory.mktemp("length"), 13)


@pytest.mark.parametrize("policy", ["repeat", "drop", "partial"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_the_length_is_what_comes(cache, batch_size, world_size, policy):
    opened = open_cache(cache)
    report = opened.plan(batch_size=batch_size, world_size=world_size, remainder=policy)
    if not report.steps:
        return
    words = {"batch_size": batch_size, "world_size": world_size, "remainder": policy}
    for rank in range(world_size):
        loader = opened.loader(rank=rank, **words)
        assert len(loader) == report.steps
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            assert sum(1 for _ in loader) == len(loader)


def test_an_estimate_would_be_wrong(cache):
    """13 entries in batches of 3 are not 5 steps: three buckets round up on their own."""
    assert -(-13 // 3) == 5
    assert len(open_cache(cache).loader(batch_size=3)) == 6
    assert len(open_cache(cache).loader(batch_size=3, remainder="drop")) == 3


def test_an_epoch_serves_every_entry_and_a_second_one_begins_where_the_first_ends(cache):
    loader = open_cache(cache).loader(batch_size=1)
    for epoch in range(3):
        loader.set_epoch(epoch)
        names = [name for batch in loader for name in batch["names"]]
        assert sorted(names) == [f"{number:02}.png" for number in range(13)]
