import shutil
import time

import pytest
from small_builds import draw, folder_of, recipe_of, settings

from latentcache.geometry.sizes import Size
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.report import Silent, build_report, entry_bytes
from latentcache.pipeline.work import Progress
from latentcache.store.entry import HEADER_BYTES


def planned(data, **changes):
    """The plan of a build that stops after it."""
    return build_cache(settings(data, dry_run=True, **changes)).plan


def test_a_plan_says_what_there_is_to_do(tmp_path):
    data = folder_of(tmp_path / "data", 3)
    draw(data / "wide.png", 7, height=32, width=128)
    (data / "bad.png").write_bytes(b"<html>")
    plan = planned(data)
    assert (plan.samples, plan.files_to_read, plan.entries_to_make, plan.entries_cached) == (5, 4, 4, 0)
    assert plan.buckets == {Size(64, 64): 3, Size(32, 128): 1}
    assert [item.cause for item in plan.refused] == ["html"]
    assert plan.bytes_to_write == 3 * entry_bytes(recipe_of(), Size(64, 64)) + entry_bytes(recipe_of(), Size(32, 128))
    assert plan.free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)


def test_a_plan_counts_what_is_there_already(tmp_path):
    data = folder_of(tmp_path / "data", 3)
    build_cache(settings(data))
    draw(data / "new.png", 9)
    plan = planned(data)
    assert (plan.entries_to_make, plan.entries_cached) == (1, 3)


def test_one_more_resolution_is_one_more_entry_per_picture(tmp_path):
    data = folder_of(tmp_path / "data", 3)
    build_cache(settings(data))
    plan = planned(data, recipe={"resolutions": (64, 128)})
    assert (plan.entries_to_make, plan.entries_cached) == (3, 3)


def test_a_plan_makes_nothing(tmp_path):
    data = folder_of(tmp_path / "data", 1)
    report = build_cache(settings(data, dry_run=True))
    assert report.dry_run
    assert report.samples == 1
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("side", [32, 64, 128])
def test_the_bytes_of_an_entry_are_never_too_few(side):
    recipe = recipe_of()
    payload = 4 * (side // 8) ** 2 * 2
    assert HEADER_BYTES + payload <= entry_bytes(recipe, Size(side, side)) <= HEADER_BYTES + payload + 4096 + 1000


def test_the_estimate_holds_for_a_real_build(tmp_path):
    data = folder_of(tmp_path / "data", 60, height=128, width=128)
    report = build_cache(settings(data, recipe={"resolutions": (128,)}))
    written = sum(file.stat().st_size for file in (report.plan.cache / "shards").rglob("*"))
    assert written <= report.plan.bytes_to_write * 1.1 + 100_000


def test_a_report_counts_keys_not_samples(tmp_path):
    data = folder_of(tmp_path / "data", 2)
    (data / "copy.png").write_bytes((data / "000.png").read_bytes())
    report = build_cache(settings(data))
    assert (report.samples, report.encoded, report.cached) == (3, 2, 0)
    assert report.buckets == {Size(64, 64): 3}
    again = build_cache(settings(data))
    assert (again.encoded, again.cached) == (0, 2)


def test_a_dry_report_has_the_refusals_of_its_plan(tmp_path):
    data = folder_of(tmp_path / "data", 1)
    (data / "bad.png").write_bytes(b"")
    plan = planned(data)
    report = build_report(plan, started=time.monotonic(), dry_run=True)
    assert report.refused == plan.refused
    assert len(report.refused) == 1


def test_an_observer_may_say_nothing():
    silent = Silent()
    assert silent.advanced(Progress()) is None
    assert silent.warned("x") is None
