"""The report of a plan and that of a loader: the same numbers and names, which cost nothing until asked for."""

import pickle
from collections import Counter

import pytest
from small_cache import build, draw

import latentcache.plan.epoch
from latentcache.errors import UsageError
from latentcache.loader.cache import open_cache
from latentcache.loader.cache_mix import combine_caches

SHAPES = [(96, 64), (64, 96), (80, 80)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Eleven pictures in buckets of four, four and three."""
    folder = tmp_path_factory.mktemp("report")
    for number in range(11):
        draw(folder / "data" / f"{number:02}.png", SHAPES[number % 3], seed=number)
    build(folder / "data", folder / "cache")
    return open_cache(folder / "cache")


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("policy", ["repeat", "drop", "partial"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loader_says_whom_it_repeats_and_leaves_out(cache, seed, policy, weighted):
    served_from = combine_caches(list(cache.split(0.4)), weights=[1, 2]) if weighted else cache
    words = {"batch_size": 3, "small_buckets": policy, "seed": seed}
    loader = served_from.loader(**words)
    served = Counter(name for batch in loader for name in batch["names"])
    planned = served_from.plan(**words)
    assert loader.report == planned
    assert (loader.report.repeated_names, loader.report.dropped_names) == (
        planned.repeated_names,
        planned.dropped_names,
    )
    names = set(served_from.generation.samples.names)
    if not weighted:
        assert set(loader.report.repeated_names) == {name for name, times in served.items() if times > 1}
        assert set(loader.report.dropped_names) == names - set(served)
    assert set(loader.report.repeated_names) | set(loader.report.dropped_names) <= names
    assert loader.report.repeated_names or loader.report.dropped_names or policy == "partial"


def test_nothing_is_planned_before_names_are_asked_for(cache, monkeypatch):
    planned = []
    plan_epoch = latentcache.plan.epoch.plan_epoch
    monkeypatch.setattr(
        latentcache.plan.epoch, "plan_epoch", lambda *a, **k: planned.append(a) or plan_epoch(*a, **k)
    )
    loader = cache.loader(batch_size=3)
    reports = [loader.report, cache.plan(batch_size=3), pickle.loads(pickle.dumps(loader)).report]
    assert [(len(loader), report.samples_repeated) for report in reports] == [(5, 4)] * 3
    assert planned == []
    for report in reports:
        assert len(report.repeated_names) == 4
        assert report.dropped_names == ()
    assert len(planned) == 3


@pytest.mark.parametrize("seed", [1.5, "1", None, True])
def test_a_seed_that_is_none_is_refused(cache, seed):
    for make in (cache.plan, cache.loader):
        with pytest.raises(UsageError, match="seed="):
            make(batch_size=3, seed=seed)
