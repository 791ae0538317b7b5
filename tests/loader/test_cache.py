import json
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from small_cache import build, draw, draw_four

import latentcache
from latentcache.errors import CacheNotFoundError, EmptyPlanError, PlanError, UsageError
from latentcache.geometry.sizes import Size
from latentcache.loader.cache import Cache, open_cache
from latentcache.loader.cache_mix import combine_caches
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.settings import BuildSettings, RecipeSettings


def test_a_cache_knows_its_entries_and_buckets(shared):
    cache = open_cache(shared[1])
    assert isinstance(cache, Cache)
    assert len(cache) == 4
    assert sum(cache.buckets.values()) == 4
    assert cache.buckets[Size(48, 80)] == 2
    assert cache.recipe.encoder.family == "stub"


def test_the_facade_opens_it(shared):
    assert latentcache.open_cache(str(shared[1])).generation.number == 1


def test_no_cache(tmp_path):
    with pytest.raises(CacheNotFoundError, match="no cache at"):
        open_cache(tmp_path)


def test_the_plan_before_training(shared):
    report = open_cache(shared[1]).plan(batch_size=2, small_buckets="drop")
    assert (report.steps, report.samples_used, report.samples_dropped) == (1, 2, 2)


def test_an_epoch_without_a_step_is_refused_with_the_buckets(shared):
    with pytest.raises(EmptyPlanError) as caught:
        open_cache(shared[1]).loader(batch_size=8, small_buckets="drop")
    assert "48x80: 2" in caught.value.where
    with pytest.raises(PlanError, match="does not divide"):
        open_cache(shared[1]).loader(batch_size=3, small_buckets="error")


@pytest.mark.parametrize(
    "words",
    [
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": 1, "world_size": 0},
        {"batch_size": 1, "rank": 1},
        {"batch_size": 1, "rank": -1, "world_size": 2},
        {"batch_size": 1, "small_buckets": "merge"},
        {"batch_size": "2"},
        {"batch_size": 2.5},
        {"batch_size": None},
        {"batch_size": True},
        {"batch_size": 1, "world_size": 1.0},
        {"batch_size": 1, "dtype": "float32"},
        {"batch_size": 1, "dtype": torch.int64},
    ],
)
def test_settings_that_cannot_be(shared, words):
    with pytest.raises(UsageError) as caught:
        open_cache(shared[1]).loader(**words)
    assert caught.value.fix


def test_a_demo_cache_warns_once(tmp_path):
    recipe = RecipeSettings(model="demo", resolutions=(64,), bucket_step=8)
    build_cache(BuildSettings(data=draw_four(tmp_path / "data"), out=tmp_path / "cache", recipe=recipe))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            batches = list(open_cache(tmp_path / "cache").loader(batch_size=1))
    assert [str(warning.message) for warning in seen] == [
        f"{tmp_path}/cache was made with the demo encoder: it is for trying the tool, not for training"
    ]
    assert seen[0].filename == __file__
    assert batches[0]["latents"].shape[1] == 16


def test_a_build_that_ends_later_changes_nothing(cache, data):
    """The generation is pinned; a cache opened afterwards sees the new one."""
    before = open_cache(cache)
    loader = before.loader(batch_size=1)
    iterator = iter(loader)
    first = next(iterator)
    names = {first["names"][0]}
    draw(data / "p0.png", seed=77)
    (data / "p1.png").unlink()
    draw(data / "new.png", seed=78)
    build(data, cache)
    names |= {batch["names"][0] for batch in iterator}
    assert names == {"p0.png", "p1.png", "p2.png", "p3.png"}
    assert [b["keys"] for b in loader] == [b["keys"] for b in before.loader(batch_size=1)]
    assert set(open_cache(cache).generation.samples.names) == {"p0.png", "p2.png", "p3.png", "new.png"}


def test_batches_say_what_info_says(run, data, tmp_path):
    """Keys, names, shapes and placements, for two resolutions."""
    build(data, tmp_path / "cache", resolutions=(64, 128))
    done = run("info", tmp_path / "cache", "--entries", "--json")
    entries = {entry["key"]: entry for entry in json.loads(done.out)["entries"]}
    served = {}
    for batch in open_cache(tmp_path / "cache").loader(batch_size=1):
        (key,), (name,) = batch["keys"], batch["names"]
        assert name in entries[key]["paths"]
        assert list(batch["latents"].shape[1:]) == entries[key]["shape"]
        assert batch["latents"].dtype == torch.float16
        served[key] = name
    assert set(served) == set(entries)


def test_training_and_validation_are_all_and_nothing_twice(shared):
    cache = open_cache(shared[1])
    train, validation = cache.split(0.5)
    keys = [key for part in (train, validation) for row in part.generation.rows.key for key in [row.tobytes()]]
    assert sorted(keys) == sorted(row.tobytes() for row in cache.generation.rows.key)
    assert (len(cache.split(0)[1]), len(cache.split(1)[0])) == (0, 0)


def test_a_part_is_served_like_a_cache(shared):
    train, _ = open_cache(shared[1]).split(0.5)
    if not len(train):
        pytest.skip("all four pictures are on one side")
    served = [name for batch in train.loader(batch_size=1) for name in batch["names"]]
    assert len(served) == len(set(served)) == len(train)


def test_an_entry_that_counts_twice_is_served_twice(shared):
    cache = open_cache(shared[1]).repeated(2)
    served = Counter(name for batch in cache.loader(batch_size=1) for name in batch["names"])
    assert set(served.values()) == {2}
    with pytest.raises(UsageError, match="repeated"):
        cache.repeated(0)


def test_two_caches_are_served_as_one(shared, tmp_path):
    draw(tmp_path / "more" / "new.png", seed=99)
    build(tmp_path / "more", tmp_path / "more.cache")
    both = combine_caches([open_cache(shared[1]), open_cache(tmp_path / "more.cache")])
    served = Counter(name for batch in both.loader(batch_size=2, small_buckets="partial") for name in batch["names"])
    assert served == Counter(["p0.png", "p1.png", "p2.png", "p3.png", "new.png"])


def test_the_plan_names_who_is_repeated_or_left_out(shared):
    cache = open_cache(shared[1])
    report = cache.plan(batch_size=2, small_buckets="drop", seed=3)
    served = {name for b in cache.loader(batch_size=2, small_buckets="drop", seed=3) for name in b["names"]}
    assert set(report.dropped_names) == {"p0.png", "p1.png", "p2.png", "p3.png"} - served
    assert (len(report.dropped_names), report.repeated_names) == (report.samples_dropped, ())
    report = cache.plan(batch_size=3, seed=3)
    served = Counter(name for batch in cache.loader(batch_size=3, seed=3) for name in batch["names"])
    assert set(report.repeated_names) == {name for name, times in served.items() if times > 1}
    assert cache.plan(batch_size=1).repeated_names == ()


def test_no_sample_crosses_when_a_second_build_adds_others(tmp_path):
    for number in range(24):
        draw(tmp_path / "data" / f"{number:02}.png", seed=number)
    build(tmp_path / "data", tmp_path / "cache")
    first = [set(part.generation.samples.names) & served(part) for part in open_cache(tmp_path / "cache").split(0.4)]
    assert len(first[0]) + len(first[1]) == 24
    assert min(len(part) for part in first) > 3
    for number in range(24, 60):
        draw(tmp_path / "data" / f"0{number}.png", seed=number)  # sorted before and among the others
    (tmp_path / "data" / "07.png").rename(tmp_path / "data" / "99.png")
    (tmp_path / "data" / "11.png").unlink()
    build(tmp_path / "data", tmp_path / "cache")
    assert open_cache(tmp_path / "cache").generation.number == 2
    second = [served(part) for part in open_cache(tmp_path / "cache").split(0.4)]
    assert len(second[0]) + len(second[1]) == 59
    for before, after in zip(first, second, strict=True):
        kept = {"99.png" if name == "07.png" else name for name in before - {"11.png"}}
        assert kept <= after


def served(cache):
    return {name for batch in cache.loader(batch_size=1) for name in batch["names"]}


@pytest.fixture
def two(shared, tmp_path):
    draw(tmp_path / "more" / "new.png", seed=99)
    build(tmp_path / "more", tmp_path / "more.cache")
    return [open_cache(shared[1]), open_cache(tmp_path / "more.cache")]


def test_weights_decide_how_often_each_cache_is_served(two):
    both = combine_caches(two, weights=[0.25, 0.75])
    report = both.plan(batch_size=1)
    assert [(d.name, d.entries, d.samples, d.least, d.most) for d in report.datasets] == [
        ("cache", 4, 4, 1, 1),
        ("more.cache", 1, 12, 12, 12),
    ]
    served = Counter(name for batch in both.loader(batch_size=1) for name in batch["names"])
    assert served == {"p0.png": 1, "p1.png": 1, "p2.png": 1, "p3.png": 1, "new.png": 12}


def test_over_epochs_all_are_served_equally_often(two):
    loader = combine_caches(two, weights=[2, 1], samples=3).loader(batch_size=1, small_buckets="partial")
    served = Counter()
    for epoch in range(2):
        loader.set_epoch(epoch)
        served.update(name for batch in loader for name in batch["names"])
    assert served["new.png"] >= 2
    assert min(served[f"p{number}.png"] for number in range(4)) >= 1


def test_weights_are_said_once_and_last(two):
    both = combine_caches(two, weights=[1, 1])
    for mistaken in (lambda: both.split(0.5), both.repeated, lambda: combine_caches([both, two[0]])):
        with pytest.raises(UsageError, match="of a cache with weights") as caught:
            mistaken()
        assert "combine_caches with the weights" in caught.value.fix
    with pytest.raises(UsageError, match="without weights"):
        combine_caches(two, samples=10)
    with pytest.raises(UsageError, match="1 weights for 2"):
        combine_caches(two, weights=[1])
    repeated = combine_caches([two[0].repeated(3), two[1]], weights=[1, 1])
    assert [d.entries for d in repeated.plan(batch_size=1).datasets] == [12, 1]


def test_numbers_of_numpy_are_numbers(shared):
    loader = open_cache(shared[1]).loader(batch_size=np.int64(2))
    loader.set_epoch(np.int32(3))
    assert loader.epoch == 3


@pytest.mark.parametrize("epoch", [-1, 1.5, "1", None])
def test_an_epoch_that_cannot_be_is_refused(shared, epoch):
    loader = open_cache(shared[1]).loader(batch_size=2)
    with pytest.raises(UsageError, match="epoch"):
        loader.set_epoch(epoch)
