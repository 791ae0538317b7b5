"""Mirror images in training: one of the two an epoch, by (seed, epoch, content), whoever reads."""

import numpy as np
import pytest
import torch
from small_cache import build, draw, draw_four
from torch.utils.data import DataLoader

from latentcache.errors import UsageError
from latentcache.loader.cache import open_cache
from latentcache.loader.cache_mix import combine_caches
from latentcache.loader.flips import checked_flip, turned
from latentcache.store.generation import load_generation


@pytest.fixture(scope="module")
def flipped(tmp_path_factory):
    """Four pictures at two resolutions, with and without mirror images."""
    folder = tmp_path_factory.mktemp("flipped")
    two = {"resolutions": (64, 96)}
    build(draw_four(folder / "data"), folder / "cache", flip=True, **two)
    build(folder / "data", folder / "plain", **two)
    return folder


def served(loader, epoch):
    """key -> (latents, top left of the crop)."""
    loader.set_epoch(epoch)
    found = {}
    for batch in loader:
        for key, item, crop in zip(batch["keys"], batch["latents"], batch["crop_top_left"].tolist(), strict=True):
            found[key] = item, crop
    return found


def variants(loader, epoch):
    """(content, bucket) -> variant."""
    return {(key[16:48], key[8:16]): int(key[2:4]) for key in served(loader, epoch)}


def random_keys(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (2 * count, 32), dtype=np.uint8)


def test_about_half_of_the_pictures_are_mirrored_in_each_epoch():
    keys = random_keys(4000)
    for epoch in range(5):
        part = np.array(turned(np.arange(4000), keys, seed=0, epoch=epoch)) >= 4000
        assert abs(part.mean() - 0.5) < 0.04


def test_seeds_and_epochs_choose_independently():
    keys, rows = random_keys(4000), list(range(4000))
    one, other, third = (
        np.array(turned(rows, keys, seed=seed, epoch=epoch)) >= 4000 for seed, epoch in ((0, 0), (0, 1), (1, 0))
    )
    assert abs((one == other).mean() - 0.5) < 0.04
    assert abs((one == third).mean() - 0.5) < 0.04


def test_a_choice_does_not_look_at_its_neighbours():
    keys = random_keys(50)
    whole = turned(np.arange(50), keys, seed=3, epoch=1).tolist()
    assert [turned(np.array([row]), keys, seed=3, epoch=1)[0] for row in range(50)] == whole


def test_every_picture_is_served_once_an_epoch_and_both_ways_in_time(flipped):
    cache = open_cache(flipped / "cache")
    plain = open_cache(flipped / "plain")
    assert len(cache) == len(plain) == 8
    assert cache.plan(batch_size=2) == plain.plan(batch_size=2)
    loader = cache.loader(batch_size=1, seed=1)
    seen = [variants(loader, epoch) for epoch in range(12)]
    assert all(len(found) == 8 for found in seen)
    assert all({found[name] for found in seen} == {0, 1} for name in seen[0])
    by_content = [{name[0]: variant for name, variant in found.items()} for found in seen]
    assert all(
        found[name] == contents[name[0]] for found, contents in zip(seen, by_content, strict=True) for name in found
    )


def test_ranks_workers_batch_sizes_and_resumes_choose_alike(flipped):
    cache = open_cache(flipped / "cache")
    expected = served(cache.loader(batch_size=1, seed=1), 3).keys()
    assert served(cache.loader(batch_size=2, seed=1, small_buckets="partial", prefetch=0), 3).keys() == expected
    assert served(cache.loader(batch_size=3, seed=1, mapped=True), 3).keys() == expected
    ranks = [served(cache.loader(batch_size=1, seed=1, rank=rank, world_size=2), 3).keys() for rank in range(2)]
    assert ranks[0] | ranks[1] == expected
    loader = cache.loader(batch_size=1, seed=1)
    loader.set_epoch(3)
    workers = DataLoader(loader, batch_size=None, num_workers=2)
    assert {batch["keys"][0] for batch in workers} == expected
    done = next(iter(loader))["keys"]
    other = cache.loader(batch_size=1, seed=1)
    other.load_state_dict(loader.state_dict())
    assert {*done, *(batch["keys"][0] for batch in other)} == expected


def test_a_mirrored_picture_is_its_latent_mirrored_with_the_crop_of_the_mirrored_picture(flipped):
    cache = open_cache(flipped / "cache")
    straight = served(cache.loader(batch_size=1, flip=False), 0)
    assert all(key[2:4] == "00" for key in straight)
    found = {key: value for epoch in range(6) for key, value in served(cache.loader(batch_size=1), epoch).items()}
    turned_keys = [key for key in found if key[2:4] == "01"]
    assert len(turned_keys) == 8
    generation = load_generation(flipped / "cache")
    rows = {key.tobytes().hex(): row for row, key in enumerate(generation.rows.key)}
    for key in turned_keys:
        latent, (top, left) = found[key]
        plain, (plain_top, plain_left) = straight["0100" + key[4:]]
        torch.testing.assert_close(latent, plain.flip(-1), atol=1e-3, rtol=0)  # block means are symmetric
        width = int(generation.rows.resize[rows[key], 1]) - 8 * latent.shape[2]
        assert (top, left) == (plain_top, width - plain_left)
        assert generation.rows.crop[rows[key]].tolist() == [top, left]


def test_a_split_keeps_a_picture_and_its_mirror_image_together(flipped):
    for share in (0.3, 0.6):
        parts = open_cache(flipped / "cache").split(share)
        contents = [
            {key[16:48] for epoch in range(6) for key in served(part.loader(batch_size=1), epoch)}
            if len(part)
            else set()
            for part in parts
        ]
        assert not contents[0] & contents[1]
        assert len(contents[0] | contents[1]) == 4


def test_repeats_and_several_caches(flipped, tmp_path):
    draw(tmp_path / "more" / "m.png", (96, 64), seed=9)
    build(tmp_path / "more", tmp_path / "other", resolutions=(64, 96))
    both = combine_caches([open_cache(tmp_path / "other"), open_cache(flipped / "cache")]).repeated(2)
    assert len(both) == 20
    loader = both.loader(batch_size=1, seed=1)
    keys = [batch["keys"][0] for epoch in range(4) for batch in (loader.set_epoch(epoch), *loader)[1:]]
    assert len(keys) == 80
    assert {key[2:4] for key in keys} == {"00", "01"}
    single = {key.tobytes().hex()[16:48] for key in open_cache(tmp_path / "other").generation.rows.key}
    assert {key[2:4] for key in keys if key[16:48] in single} == {"00"}


def test_a_checkpoint_from_before_the_mirror_images_goes_on(flipped):
    before = open_cache(flipped / "plain").loader(batch_size=1)
    next(iter(before))
    after = open_cache(flipped / "cache").loader(batch_size=1)
    after.load_state_dict(before.state_dict())
    assert len(list(after)) == 7


def test_moments_of_a_mirror_image_have_a_draw_of_their_own(flipped, tmp_path):
    build(flipped / "data", tmp_path / "cache", flip=True, latents="moments")
    cache = open_cache(tmp_path / "cache")
    found = {key for epoch in range(8) for key in served(cache.loader(batch_size=1), epoch)}
    assert len(found) == 8
    assert len(served(cache.loader(batch_size=1, latents="mode", flip=False), 0)) == 4


def test_flips_that_are_not_stored_are_refused(flipped):
    cache = open_cache(flipped / "plain")
    with pytest.raises(UsageError) as caught:
        cache.loader(batch_size=1, flip=True)
    assert caught.value.slug == "no-flips"
    assert "--flip" in caught.value.fix
    assert not checked_flip(None, cache.generation.rows)
    assert checked_flip(True, open_cache(flipped / "cache").generation.rows)


def test_a_resume_mirrors_by_the_seed_of_the_checkpoint(flipped):
    cache = open_cache(flipped / "cache")
    for epoch in range(4):  # eight pictures: some turn otherwise in one of these epochs
        expected = served(cache.loader(batch_size=1, seed=1), epoch)
        loader = cache.loader(batch_size=1, seed=1)
        loader.set_epoch(epoch)
        next(iter(loader))
        other = cache.loader(batch_size=1, seed=77)
        other.load_state_dict(loader.state_dict())
        rest = served(other, epoch)
        assert len(rest) == len(expected) - 1
        assert rest.keys() < expected.keys()
        assert all(torch.equal(item, expected[key][0]) for key, (item, _) in rest.items())
