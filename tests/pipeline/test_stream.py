"""Streaming builds: the plan is known first, and a failure keeps its position."""

import numpy as np
from small_builds import built

from latentcache.fields.table import Rejected
from latentcache.pipeline.diff import field_work
from latentcache.pipeline.stream import loader_order
from latentcache.store.paths import CachePaths


def test_a_streaming_build_with_nothing_to_do_publishes_nothing(case, tmp_path, trusted, no_runs):
    data = case.data(tmp_path / "data", 3)
    built(case, data)
    with no_runs():
        report = built(case, data, stream=True)
    assert (report.published, CachePaths(report.cache).pending.exists()) == (False, False)


def test_leftovers_of_a_killed_streaming_build_are_removed(case, tmp_path):
    data = case.data(tmp_path / "data", 3)
    cache = built(case, data).cache
    CachePaths(cache).pending.mkdir(parents=True)
    (CachePaths(cache).pending / "manifest.json").write_text("{}")
    case.write(data, 7)
    assert built(case, data).encoded == 1
    assert not CachePaths(cache).pending.exists()


def test_samples_that_one_field_lacks_are_not_waited_for():
    from test_diff import KIND, FakeCatalog, described, table

    samples = table(list(range(1, 31)))
    lacking = {row: Rejected(name=f"{row:05}.png", reason="truncated") for row in range(30) if row % 3}
    works = [field_work(KIND, described(), None, samples, FakeCatalog(), rejected) for rejected in ({}, lacking)]
    rank = loader_order(works, samples, 3, 5)
    assert np.flatnonzero(rank < 30).tolist() == list(range(0, 30, 3))
    assert sorted(rank[::3].tolist()) == list(range(10))
