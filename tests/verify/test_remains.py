import os

import pytest
from small_cache import build, draw

from latentcache.store.layout import CacheLayout
from latentcache.verify.remains import disk_bytes, generations_on_disk, leftovers, sealed_at


@pytest.fixture
def layout(cache, data):
    draw(data / "p0.png", seed=61)
    build(data, cache)
    return CacheLayout(cache)


def test_generations_and_what_they_need(layout):
    first, second = generations_on_disk(layout, 2)
    assert (first.number, second.number, first.replaces) == (1, 2, 0)
    assert first.shards < second.shards
    assert first.since == second.since == (second.folder / "manifest.json").stat().st_mtime


def test_a_damaged_manifest_is_known_to_be_unknown(layout):
    (layout.generation(1) / "manifest.json").write_bytes(b"{}")
    assert [old.shards is None for old in generations_on_disk(layout, 2)] == [True, False]


def test_a_whole_cache_has_no_leftovers(layout):
    assert list(leftovers(layout)) == []


def test_leftovers(layout):
    names = ("CURRENT.tmp", "shards/gone.retired", "generations/000002/key.npy.tmp", "scratch/thing")
    layout.scratch.mkdir()
    for name in names:
        (layout.root / name).touch()
    (layout.root / "generations" / "000003").mkdir()
    found = {path.relative_to(layout.root).as_posix() for path in leftovers(layout)}
    assert found == {*names, "generations/000003"}


def test_when_a_shard_was_sealed(layout):
    shard = layout.all_sealed()[0]
    os.utime(shard / "shard.json", (5, 5))
    assert sealed_at(shard) == 5
    (shard / "shard.json").unlink()
    assert sealed_at(shard) == shard.stat().st_mtime


def test_bytes_on_disk(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x" * 100_000)
    assert 100_000 <= disk_bytes(tmp_path) < 200_000
    assert disk_bytes(tmp_path / "nothing") == 0


def test_a_report_that_was_never_put_in_place_is_left_over_after_an_hour(cache):
    layout = CacheLayout(cache)
    layout.reports.joinpath("build").mkdir(parents=True)
    fresh, old = (layout.reports / "build" / f".report.json.{pid}.tmp" for pid in (7, 8))
    for path in (fresh, old):
        path.touch()
    os.utime(old, (1, 1))
    assert list(leftovers(layout)) == [old]
