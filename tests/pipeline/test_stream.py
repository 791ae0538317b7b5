"""Streaming builds: everything is known before it is encoded, and a failure keeps its position."""

import numpy as np
from small_builds import Recorder, arrays_of, built, rows_of

from latentcache.fields.table import Rejected
from latentcache.pipeline.diff import field_work
from latentcache.pipeline.stream import loader_order
from latentcache.store.paths import CachePaths
from latentcache.store.pending import open_pending
from latentcache.store.snapshot import open_snapshot


class Following(Recorder):
    """Opens the pending snapshot at the first sign of progress."""

    def __init__(self, cache, field):
        super().__init__()
        self.cache, self.field, self.snapshot = cache, field, None

    def advanced(self, progress):
        super().advanced(progress)
        if self.snapshot is None:
            self.snapshot = open_pending(self.cache, timeout_s=60)


def slow(case):
    return {name: f"{value}:delay_ms=10" for name, value in case.settings.items() if value == "stub"}


def test_a_pending_snapshot_names_everything_that_the_build_makes(case, tmp_path, monkeypatch):
    monkeypatch.setenv("DELAY_MS", "10")
    data, cache = case.data(tmp_path / "data", 20), tmp_path / "cache"
    observer = Following(cache, case.field)
    report = built(case, data, observer=observer, stream=True, recipe=slow(case))
    assert (report.encoded, report.published) == (20, True)
    pending, finished = observer.snapshot.fields[case.field], open_snapshot(cache).fields[case.field]
    assert np.array_equal(pending.row_keys(), finished.row_keys())
    assert pending.groups == finished.groups
    assert list(observer.snapshot.samples.names) == list(open_snapshot(cache).samples.names)
    assert not CachePaths(cache).pending.exists()
    assert open_pending(cache) is None
    plain = built(case, data, out=tmp_path / "plain")
    assert rows_of(cache, case.field) == rows_of(plain.cache, case.field)
    made, expected = arrays_of(cache, case.field), arrays_of(plain.cache, case.field)
    assert all(np.array_equal(a, b) for name in made for a, b in zip(made[name], expected[name], strict=True))


def test_a_streaming_build_with_nothing_to_do_publishes_nothing(case, tmp_path, trusted, no_runs):
    data = case.data(tmp_path / "data", 3)
    built(case, data)
    with no_runs():
        report = built(case, data, stream=True)
    assert (report.published, CachePaths(report.cache).pending.exists()) == (False, False)


def test_what_a_killed_streaming_build_left_is_removed(case, tmp_path):
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
