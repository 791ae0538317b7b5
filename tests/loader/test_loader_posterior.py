"""A cache of moments: every draw by (seed, epoch, key), whoever reads it, and the mean on request."""

import numpy as np
import pytest
import torch
from small_cache import build
from torch.utils.data import DataLoader

from latentcache.errors import UsageError
from latentcache.identity.noise import gaussian
from latentcache.loader.cache import open_cache
from latentcache.loader.cache_mix import combine_caches
from latentcache.loader.iterable import as_iterable
from latentcache.loader.posterior import checked_draw, draw, mean_of
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader

KEYS = np.arange(96, dtype=np.uint8).reshape(3, 32)


@pytest.fixture(scope="module")
def moments(shared, tmp_path_factory):
    """A cache of moments of four pictures, and one of their modes."""
    folder = tmp_path_factory.mktemp("moments")
    build(shared[0], folder / "moments", latents="moments")
    build(shared[0], folder / "mode")
    return folder


def served(loader, epoch=0):
    """key -> latents of an epoch."""
    loader.set_epoch(epoch)
    return {key: item for batch in loader for key, item in zip(batch["keys"], batch["latents"], strict=True)}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_draw_is_mean_and_spread_times_noise(dtype):
    made = torch.randn((3, 8, 4, 6), generator=torch.Generator().manual_seed(1)).to(dtype)
    kept = made.clone()
    found = draw(made, KEYS, seed=5, epoch=2)
    for key, item, one in zip(KEYS, made.double(), found, strict=True):
        noise = torch.from_numpy(gaussian(96, b"read", 5, 2, key.tobytes())).double().view(4, 4, 6)
        expected = item[:4] + (item[4:] / 2).exp() * noise
        torch.testing.assert_close(one.double(), expected, atol=1e-5, rtol=1e-5)
    assert found.dtype == torch.float32
    assert torch.equal(made, kept)


def test_a_draw_does_not_look_at_its_neighbours():
    made = torch.randn((3, 32, 63, 65))
    whole = draw(made, KEYS, seed=0, epoch=0)
    for order in ([1], [2, 0]):
        assert torch.equal(draw(made[order], KEYS[order], seed=0, epoch=0), whole[order])


def test_the_mean_owns_its_memory():
    made = torch.randn((2, 8, 4, 4))
    found = mean_of(made)
    assert torch.equal(found, made[:, :4])
    assert found.untyped_storage().nbytes() == found.numel() * 4


def test_seed_epoch_and_key_decide_and_nothing_else(moments):
    cache = open_cache(moments / "moments")
    first = served(cache.loader(batch_size=1, seed=3), 1)
    assert same(first, served(cache.loader(batch_size=2, seed=3, prefetch=0), 1))
    assert same(first, served(cache.loader(batch_size=3, seed=3, mapped=True, small_buckets="partial"), 1))
    ranks = [served(cache.loader(batch_size=1, seed=3, rank=rank, world_size=2), 1) for rank in range(2)]
    assert same(first, ranks[0] | ranks[1])
    for other in (cache.loader(batch_size=1, seed=4), cache.loader(batch_size=1, seed=3)):
        found = served(other, 1 if other.seed == 4 else 2)
        assert found.keys() == first.keys()
        assert not any(torch.equal(found[key], first[key]) for key in first)


def test_another_pass_over_an_epoch_draws_the_same(moments):
    loader = open_cache(moments / "moments").loader(batch_size=2)
    assert same(served(loader, 0), served(loader, 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_draw_what_the_loader_draws(moments, workers):
    loader = open_cache(moments / "moments").loader(batch_size=1, seed=3)
    expected = served(loader, 2)
    for dataset in (loader, as_iterable(loader)):
        batches = DataLoader(dataset, batch_size=None, num_workers=workers)
        assert same(expected, {batch["keys"][0]: batch["latents"][0] for batch in batches})


@pytest.mark.parametrize("seed", [3, 77])
def test_a_resume_draws_the_rest_by_the_seed_of_the_checkpoint(moments, seed):
    cache = open_cache(moments / "moments")
    expected = served(cache.loader(batch_size=1, seed=3), 5)
    loader = cache.loader(batch_size=1, seed=3)
    loader.set_epoch(5)
    next(iter(loader))
    other = cache.loader(batch_size=1, seed=seed, rank=0, world_size=1)
    other.load_state_dict(loader.state_dict())
    assert other.seed == 3
    rest = {key: item for batch in other for key, item in zip(batch["keys"], batch["latents"], strict=True)}
    assert len(rest) == 3
    assert all(torch.equal(item, expected[key]) for key, item in rest.items())


def test_a_pass_keeps_its_draws_when_another_seed_is_loaded_while_it_is_read(moments):
    cache = open_cache(moments / "moments")
    loader = cache.loader(batch_size=1, seed=3, prefetch=0)
    expected = served(loader)
    batches = iter(loader)
    found = [next(batches)]
    loader.load_state_dict(cache.loader(batch_size=1, seed=4).state_dict())
    found += batches
    assert all(torch.equal(batch["latents"][0], expected[batch["keys"][0]]) for batch in found)


def test_an_epoch_keeps_its_draws_when_the_next_is_set_while_it_is_read(moments):
    loader = open_cache(moments / "moments").loader(batch_size=1, seed=3, prefetch=0)
    expected = served(loader, 0)
    batches = iter(loader)
    first = next(batches)
    loader.set_epoch(1)
    found = [first, *batches]
    assert all(torch.equal(batch["latents"][0], expected[batch["keys"][0]]) for batch in found)


def test_the_mode_of_moments_is_the_mode(moments):
    mode = served(open_cache(moments / "mode").loader(batch_size=2))
    mean = served(open_cache(moments / "moments").loader(batch_size=2, latents="mode"))
    by_content = {key[16:48]: item for key, item in mode.items()}
    assert len(mean) == 4
    assert all(torch.equal(item, by_content[key[16:48]]) for key, item in mean.items())


def test_normalisation_comes_after_the_draw(moments):
    cache = open_cache(moments / "moments")
    raw = cache.loader(batch_size=1, dtype=torch.float32, scaled=False)
    generation = cache.generation
    row = int(raw.position.whole().batch(0)[0])
    _, stored = EntryReader(CacheLayout(moments / "moments"), generation).read(row)
    key = generation.rows.key[[row]]
    expected = draw(torch.from_numpy(stored[None]), key, seed=0, epoch=0)
    assert torch.equal(next(iter(raw))["latents"], expected)


def test_batches_have_the_channels_of_a_latent(moments):
    batch = next(iter(open_cache(moments / "moments").loader(batch_size=1)))
    assert batch["latents"].shape[1] == 4
    assert batch["latents"].dtype == torch.float16


def test_what_cannot_be_given_is_refused(moments, tmp_path, shared):
    with pytest.raises(UsageError) as caught:
        open_cache(moments / "mode").loader(batch_size=1, latents="sample")
    assert caught.value.slug == "no-moments"
    assert "--latents moments" in caught.value.fix
    with pytest.raises(UsageError, match="latents='mean'"):
        open_cache(moments / "moments").loader(batch_size=1, latents="mean")
    with pytest.raises(UsageError, match="latents of two kinds"):
        combine_caches([open_cache(moments / "mode"), open_cache(moments / "moments")])


def test_what_is_stored_is_served_as_it_is():
    assert checked_draw(None, "mode") is None
    assert checked_draw("mode", "mode") is None
    assert checked_draw("sample", "sample") is None
    assert checked_draw(None, "moments") == "sample"
