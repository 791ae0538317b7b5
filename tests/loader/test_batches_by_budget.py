"""Loaders whose batches follow a budget, over real caches."""

import json
import pickle

import pytest
import torch
from made_caches import documents, images, opened, texts

from latentcache import combine
from latentcache.errors import UsageError


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """21 images of 4,096 to 32,768 pixels."""
    shapes = [(64, 64), (64, 128), (128, 256)]
    return images(tmp_path_factory.mktemp("sizes") / "cache", [shapes[number % 3] for number in range(21)])


def test_the_number_of_samples_follows_the_bucket(sizes):
    loader = opened(sizes).loader(batch_pixels=65_536)
    batches = list(loader)
    assert len(batches) == len(loader)
    assert {tuple(batch["latents"].shape) for batch in batches} == {(16, 4, 8, 8), (8, 4, 8, 16), (2, 4, 16, 32)}
    assert len({name for batch in batches for name in batch["names"]}) == 21
    assert "batches of up to 65,536 pixels of all ranks" in repr(loader)


def test_ranks_have_equal_batches_and_another_number_of_ranks_goes_on(sizes):
    options = {"batch_pixels": 4 * 32_768, "multiple_of": 4, "remainder": "partial"}
    alone = opened(sizes).loader(**options)
    iteration = iter(alone)
    seen = [sorted(batch["names"]) for _, batch in zip(range(2), iteration, strict=False)]
    state = json.loads(json.dumps(alone.state_dict()))
    ranks = [opened(sizes).loader(**options, rank=rank, world_size=4) for rank in range(4)]
    for loader in ranks:
        loader.load_state_dict(state)
    rest = [list(loader) for loader in ranks]
    for step in zip(*rest, strict=True):
        assert len({batch["latents"].shape for batch in step}) == 1
    together = [sorted(name for batch in step for name in batch["names"]) for step in zip(*rest, strict=True)]
    assert seen + together == [sorted(batch["names"]) for batch in opened(sizes).loader(**options)]


def test_rows_of_tokens_have_a_budget_of_tokens(tmp_path):
    rows = opened(documents(tmp_path / "t", texts(40, 60))).rows(pack=64)
    loader = rows.loader(batch_tokens=64 * 6, world_size=2, rank=0)
    assert {batch["input_ids"].shape for batch in loader} == {(3, 64)}
    assert rows.plan(batch_tokens=64 * 6, world_size=2).steps == len(loader)
    with pytest.raises(UsageError, match="the samples have no pixels"):
        rows.loader(batch_pixels=100)


def test_weights_of_the_mean_loss_make_every_sample_count_once(sizes):
    """As the page says: the mean of a batch times its samples over their average."""
    loader = opened(sizes).loader(batch_pixels=65_536, remainder="partial")
    total, values = 0.0, []
    for batch in loader:
        losses = batch["latents"].float().flatten(1).square().mean(dim=1)
        total += float(losses.mean()) * len(losses) / loader.report.samples_per_batch
        values.append(losses)
    assert total / len(loader) == pytest.approx(float(torch.cat(values).mean()), rel=1e-5)


def test_each_cache_has_a_batch_size(sizes, tmp_path):
    few = opened(images(tmp_path / "few", [(64, 64)] * 3, seed=5, names=["a.png", "b.png", "c.png"]))
    both = combine([opened(sizes), few])
    loader = pickle.loads(pickle.dumps(both.loader(batch_size=[4, 1])))
    for batch in loader:
        mine = {len(name) == 5 for name in batch["names"]}
        assert (mine, len(batch["names"])) in [({True}, 1), ({False}, 4)]
    assert len(loader) == 3 * 2 + 3
    weighted = combine([opened(sizes), few], weights=[1, 1]).loader(batch_size=[4, 1])
    served = [name for batch in weighted for name in batch["names"]]
    assert sum(len(name) == 5 for name in served) == 21
    again = combine([opened(sizes), few]).loader(batch_size=[4, 1])
    state = loader.state_dict()
    again.load_state_dict(state)
    with pytest.raises(UsageError, match="1 values for 2 sources"):
        both.loader(batch_size=[4])


def test_workers_of_a_data_loader_make_the_batches_of_a_source(sizes, tmp_path):
    both = combine([opened(sizes), opened(images(tmp_path / "few", [(64, 64)] * 3, seed=5))])
    loader = both.loader(batch_size=[4, 1])
    batches = torch.utils.data.DataLoader(loader.dataset, sampler=loader.sampler, batch_size=None, num_workers=1)
    assert [batch["names"] for batch in batches] == [batch["names"] for batch in loader]
