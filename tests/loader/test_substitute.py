"""A bad entry is replaced by one of its bucket, the same one in every repetition, and never in silence."""

import pickle
import shutil
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from small_cache import build, damage_payload, draw
from torch.utils.data import DataLoader

from latentcache.errors import CacheDamagedError, CorruptEntryError, MissingEntryError, UsageError
from latentcache.loader.cache import open_cache
from latentcache.loader.cache_mix import combine_caches
from latentcache.loader.iterable import as_iterable
from latentcache.loader.picture_entries import ReplaceablePictures
from latentcache.loader.substitute import Substitutes
from latentcache.store.reader import EntryReader

WARNED = "ignore:the entry of"
SHAPES = [(96, 64), (64, 96), (80, 80)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A cache of 18 pictures, six in each of three buckets."""
    folder = tmp_path_factory.mktemp("substitute")
    for number in range(18):
        draw(folder / "data" / f"p{number:02}.png", SHAPES[number % 3], seed=number)
        (folder / "data" / f"p{number:02}.txt").write_text(f"caption {number}")
    build(folder / "data", folder / "cache")
    return folder / "cache"


@pytest.fixture
def hurt(whole, tmp_path):
    """A copy of it with one damaged entry; (cache, its sample)."""
    shutil.copytree(whole, tmp_path / "cache")
    return tmp_path / "cache", damage_payload(tmp_path / "cache", row=4)


def substituting(cache, **options):
    return open_cache(cache).loader(**{"batch_size": 3, "on_bad": "substitute"} | options)


def served(loader):
    return [name for batch in loader for name in batch["names"]]


def test_the_default_is_an_error(hurt):
    with pytest.raises(CorruptEntryError, match="damaged"):
        list(open_cache(hurt[0]).loader(batch_size=4))
    assert open_cache(hurt[0]).loader(batch_size=4).substituted == {}


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"mapped": True}, {"dtype": torch.float32}], ids=str)
def test_another_entry_of_the_bucket_takes_its_place_with_all_that_belongs_to_it(whole, hurt, options):
    cache, bad = hurt
    expected = {
        name: (
            batch["keys"][i],
            batch["captions"][i],
            batch["original_size"][i].tolist(),
            batch["latents"][i].float(),
        )
        for batch in open_cache(whole).loader(batch_size=1)
        for i, name in enumerate(batch["names"])
    }
    loader = substituting(cache, **options)
    with pytest.warns(UserWarning, match=bad) as said:
        batches = list(loader)
    assert len(batches) == len(loader)
    assert loader.substituted == {bad: 1}
    assert len(said) == 1
    text = str(said[0].message)
    assert "in place of" in text
    assert "payload checksum" in text
    assert "latentcache verify --full" in text
    for batch in batches:
        for i, name in enumerate(batch["names"]):
            key, caption, size, latents = expected[name]
            assert (batch["keys"][i], batch["captions"][i], batch["original_size"][i].tolist()) == (
                key,
                caption,
                size,
            )
            assert torch.equal(batch["latents"][i].float(), latents)
    assert bad not in served(batches)


@pytest.mark.filterwarnings(WARNED)
def test_repeating_and_resuming_give_the_same_and_epochs_and_seeds_do_not(hurt):
    cache, _ = hurt
    order = [served(substituting(cache)) for _ in range(2)]
    assert order[0] == order[1]
    loader = substituting(cache)
    assert served(loader) == served(loader) == order[0]
    for done in range(len(loader)):
        passing = iter(loader)
        head = served(next(passing) for _ in range(done))
        resumed = substituting(cache, seed=99)  # the seed of the checkpoint counts
        resumed.load_state_dict(loader.state_dict())
        assert head + served(resumed) == order[0]
    chosen = set()
    for seed in range(5):
        for epoch in range(5):
            loader = substituting(cache, seed=seed)
            loader.set_epoch(epoch)
            times = Counter(served(loader))
            chosen |= {name for name, count in times.items() if count > 1}
    assert len(chosen) >= 4  # of five others in the bucket


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.parametrize("seed", range(4))
def test_the_choice_does_not_depend_on_what_was_found_before(hurt, seed):
    """Several bad entries, met in other orders: by a fresh loader, by one that knows them, and from the end."""
    cache, _ = hurt
    for row in (1, 9, 13):
        damage_payload(cache, row=row)
    options = {"seed": seed, "max_substitutes": 4}
    fresh, known = substituting(cache, **options), substituting(cache, **options)
    for epoch in (3, 1, 0):
        known.set_epoch(epoch)
        list(known)
    assert served(known) == served(fresh)
    assert len(known.substituted) == 4
    backwards = substituting(cache, **options)
    steps = [backwards[step]["names"] for step in reversed(range(len(backwards)))]
    assert [name for names in reversed(steps) for name in names] == served(fresh)


@pytest.mark.filterwarnings(WARNED)
def test_the_choice_is_the_same_on_any_number_of_ranks(whole, hurt):
    cache, bad = hurt
    stand_ins = set()
    for batch_size, world_size in ((6, 1), (3, 2), (2, 3), (1, 6)):
        for rank in range(world_size):
            options = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
            before = served(open_cache(whole).loader(**options))
            after = served(substituting(cache, **options))
            stand_ins |= {b for a, b in zip(before, after, strict=True) if a == bad}
            assert all(a == b for a, b in zip(before, after, strict=True) if a != bad)
    assert len(stand_ins) == 1


def test_each_sample_is_said_once_and_counted_each_time(hurt):
    cache, bad = hurt
    loader = substituting(cache)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for epoch in range(3):
            loader.set_epoch(epoch)
            list(loader)
    assert len(said) == 1
    assert loader.substituted == {bad: 3}
    with pytest.raises(TypeError):
        loader.substituted[bad] = 0


@pytest.mark.filterwarnings(WARNED)
def test_a_single_batch_by_its_step_has_the_same_stand_in(hurt):
    loader = substituting(hurt[0])
    loader.set_epoch(2)
    assert [loader[step]["names"] for step in range(len(loader))] == [batch["names"] for batch in loader]


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.parametrize("form", [lambda loader: loader, as_iterable], ids=["map", "iterable"])
def test_workers_serve_the_same_and_count_for_themselves(hurt, form):
    expected = served(substituting(hurt[0]))
    loader = substituting(hurt[0])
    assert served(DataLoader(form(loader), batch_size=None, num_workers=2)) == expected
    assert loader.substituted == {}


@pytest.mark.filterwarnings(WARNED)
def test_it_can_be_pickled(hurt):
    loader = substituting(hurt[0])
    expected = served(loader)
    assert served(pickle.loads(pickle.dumps(loader))) == expected


# too much


@pytest.mark.filterwarnings(WARNED)
def test_more_than_the_limit_is_an_error_with_the_fix(hurt):
    cache, first = hurt
    second = damage_payload(cache, row=11)
    with pytest.raises(CacheDamagedError, match="more than 1 of 18 samples") as caught:
        list(substituting(cache))
    assert "latentcache verify --full" in caught.value.fix
    assert "max_substitutes=1" in caught.value.why
    loader = substituting(cache, max_substitutes=2)
    list(loader)
    assert loader.substituted == {first: 1, second: 1}
    with pytest.raises(CacheDamagedError, match="more than 0"):
        list(substituting(cache, max_substitutes=0))


def test_a_bucket_without_a_whole_entry_is_an_error(hurt):
    cache, _ = hurt
    rows = open_cache(cache).generation.rows
    for row in np.flatnonzero(rows.bucket == rows.bucket[4]).tolist():
        if row != 4:
            damage_payload(cache, row=row)
    with pytest.raises(CacheDamagedError, match=r"no entry of bucket \d+x\d+ can be read"):
        list(substituting(cache, max_substitutes=18))


def test_a_shard_that_is_gone_is_an_error_soon(hurt):
    cache, _ = hurt
    loader = substituting(cache)
    (shard,) = (cache / "shards").iterdir()
    shutil.rmtree(shard)
    with pytest.raises(CacheDamagedError, match="more than 1 of 18") as caught:
        list(loader)
    assert "is gone" in caught.value.why
    assert isinstance(caught.value.__cause__, MissingEntryError)


@pytest.mark.filterwarnings(WARNED)
def test_an_entry_that_counts_ten_times_is_one_bad_sample(hurt):
    cache, bad = hurt
    loader = open_cache(cache).repeated(10).loader(batch_size=6, on_bad="substitute", max_substitutes=1)
    assert bad not in served(loader)
    assert loader.substituted == {bad: 10}


@pytest.mark.filterwarnings(WARNED)
def test_a_missing_cache_of_two_is_filled_from_what_is_there(whole, tmp_path):
    draw(tmp_path / "more" / "new.png", SHAPES[0], seed=99)
    build(tmp_path / "more", tmp_path / "more.cache")
    both = combine_caches([open_cache(whole), open_cache(tmp_path / "more.cache")])
    shutil.rmtree(tmp_path / "more.cache" / "shards")
    loader = both.loader(batch_size=1, on_bad="substitute")
    assert len(served(loader)) == 19
    assert loader.substituted == {"new.png": 1}


@pytest.mark.filterwarnings(WARNED)
def test_the_stand_in_is_of_the_same_data_set_where_it_has_one(hurt, tmp_path):
    for number in range(40):
        draw(tmp_path / "more" / f"new{number}.png", SHAPES[1], seed=100 + number)
    build(tmp_path / "more", tmp_path / "more.cache")
    both = combine_caches([open_cache(hurt[0]), open_cache(tmp_path / "more.cache")], weights=[1, 1])
    loader = both.loader(batch_size=1, on_bad="substitute")
    own = [name for name in served(loader) if name.startswith("p")]
    planned = loader.position.whole().rows < 18
    assert len(own) == int(planned.sum())
    assert hurt[1] not in own
    assert loader.substituted[hurt[1]] > 1


@pytest.mark.parametrize("options", [{"on_bad": "skip"}, {"max_substitutes": -1}], ids=str)
def test_settings_that_cannot_be(whole, options):
    with pytest.raises(UsageError) as caught:
        substituting(whole, **options)
    assert caught.value.fix


def test_nothing_is_read_twice_while_all_is_whole(whole):
    opened = open_cache(whole)
    substitutes = Substitutes(ReplaceablePictures(EntryReader(opened.layout, opened.generation)), on_bad="substitute")
    asked = []
    assert substitutes.read([1, 2], lambda rows: asked.append(rows) or "made", seed=0, epoch=0) == ([1, 2], "made")
    assert asked == [[1, 2]]
