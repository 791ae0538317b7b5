import os
import threading
import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_builds import bomb_header, causes, draw, folder_of, recipe_of, settings

from latentcache.errors import UnusableSampleError
from latentcache.geometry.placement import refusal
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.identity.key import EntryKey
from latentcache.identity.stat import RACY_NS
from latentcache.pipeline import survey as survey_module
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.preflight import decoders
from latentcache.pipeline.survey import Memory, keys_of, placements_for, survey
from latentcache.recipe import GeometrySettings
from latentcache.sources.causes import HINTS
from latentcache.sources.resolve import scan
from latentcache.store.catalog import Catalog, load_catalog
from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout

NOTHING = Memory({}, {})
TABLES = GeometrySettings(resolutions=(64, 128), multiple=32).tables()


def looked_at(data, *, recipe=None, cache=None, **options):
    """The survey of a data folder, with the memory of its cache where there is one."""
    recipe = recipe or recipe_of()
    catalog = load_catalog(CacheLayout(cache)) if cache else Catalog([])
    memory = Memory.of(load_generation(cache), recipe) if cache else NOTHING
    return survey(scan(data), recipe, catalog, memory, max_pixels=options.pop("max_pixels", 10**8), **options)


def aged(folder):
    """Make files so old that their times can be trusted."""
    old = time.time_ns() - 10 * RACY_NS
    for path in folder.rglob("*"):
        os.utime(path, ns=(old, old))
    while time.time_ns() - max(path.stat().st_ctime_ns for path in folder.rglob("*")) < RACY_NS:
        time.sleep(0.1)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A data folder that can be trusted, one bad file in it, and its cache."""
    data = folder_of(tmp_path_factory.mktemp("survey") / "data", 3)
    (data / "bad.jpg").write_bytes(b"no picture")
    (data / "cut.jpg").write_bytes(draw(data / "cut.jpg", 9).read_bytes()[:-300])
    aged(data)
    report = build_cache(settings(data))
    assert set(causes(report)) == {"bad.jpg", "cut.jpg"}
    return data, report.plan.cache


def test_of_a_new_folder_only_headers_are_read(tmp_path):
    folder_of(tmp_path, 2)
    (tmp_path / "bad.png").write_bytes(b"<html>")
    found = looked_at(tmp_path)
    assert [planned.sample.name for planned in found.todo] == ["000.png", "001.png"]
    assert [planned.size for planned in found.todo] == [Size(64, 64)] * 2
    assert [failed.refusal.name for failed in found.failed] == ["bad.png"]
    assert found.known == ()


@pytest.mark.parametrize("slow", [False, True])
def test_headers_are_read_by_threads_where_the_disk_is_slow(tmp_path, monkeypatch, slow):
    """And never by the caller, who could not hear a signal in a read that does not end."""
    data = folder_of(tmp_path / "data", 30)
    plain, seen, read = looked_at(data), set(), survey_module.picture_size
    waits = count(0, 0.01 if slow else 0.001)
    monkeypatch.setattr(
        survey_module, "time", SimpleNamespace(perf_counter=lambda: next(waits), thread_time=count(0, 0.001).__next__)
    )

    def reading(file, **options):
        seen.add(threading.get_ident())
        time.sleep(0.005)
        return read(file, **options)

    monkeypatch.setattr(survey_module, "picture_size", reading)
    monkeypatch.setattr(survey_module, "_HEADER_CHUNK", 16)
    assert looked_at(data) == plain
    assert len(plain.todo) == 30
    assert threading.get_ident() not in seen
    assert (len(seen) > 1) == slow


def test_work_is_in_runs_of_one_bucket(tmp_path):
    for number in range(9):
        draw(tmp_path / f"{number}.png", number, height=(64, 32, 128)[number % 3], width=64)
    sizes = [planned.placements[0].bucket for planned in looked_at(tmp_path).todo]
    runs = [size for size, before in zip(sizes, [None, *sizes], strict=False) if size != before]
    assert len(runs) == len(set(sizes)) == 3


def test_a_file_that_did_not_change_is_not_opened(built, monkeypatch):
    data, cache = built
    opened = []
    monkeypatch.setattr("latentcache.pipeline.survey.open_source", lambda path: opened.append(path))
    monkeypatch.setattr("latentcache.pipeline.survey.read_source", lambda path: opened.append(path))
    found = looked_at(data, cache=cache)
    assert opened == []
    assert [planned.sample.name for planned in found.known] == ["000.png", "001.png", "002.png"]
    assert {failed.refusal.name: failed.refusal.cause for failed in found.failed} == {
        "bad.jpg": "unknown",
        "cut.jpg": "truncated",
    }
    assert found.todo == ()


def test_a_refused_file_is_remembered_by_its_content(built):
    data, cache = built
    recorded = {item["name"]: item for item in load_generation(cache).refused}
    for name in ("bad.jpg", "cut.jpg"):
        assert recorded[name]["content"] == content_hash((data / name).read_bytes()).hex()
        assert recorded[name]["stat"]


def test_refused_files_are_looked_at_again_when_asked(built):
    data, cache = built
    found = looked_at(data, cache=cache, retry_failed=True)
    assert [planned.sample.name for planned in found.todo] == ["cut.jpg"]  # its header is whole
    assert [failed.refusal.name for failed in found.failed] == ["bad.jpg"]


def test_refusals_count_only_for_the_recipe_they_were_made_with(built):
    data, cache = built
    other = replace(recipe_of(), geometry=GeometrySettings(resolutions=(128,), multiple=32))
    assert [planned.sample.name for planned in looked_at(data, cache=cache, recipe=other).todo] == [
        "000.png",
        "001.png",
        "002.png",
        "cut.jpg",
    ]


def test_a_file_too_young_to_be_trusted_is_read_again_and_counted_as_cached(tmp_path):
    data = folder_of(tmp_path / "data", 2)
    cache = build_cache(settings(data)).plan.cache
    found = looked_at(data, cache=cache)
    assert [planned.content for planned in found.todo] == [b"", b""]
    assert [planned.expected for planned in found.todo] == [
        content_hash((data / name).read_bytes()) for name in ("000.png", "001.png")
    ]


def test_more_pixels_than_allowed_is_no_lasting_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr("latentcache.identity.stat.RACY_NS", 0)  # every file can be trusted at once
    data = folder_of(tmp_path / "data", 1)
    draw(data / "large.png", 5, height=200, width=200)
    report = build_cache(settings(data, max_pixels=5000))
    assert causes(report) == {"large.png": "too-many-pixels"}
    assert [p.sample.name for p in looked_at(data, cache=report.plan.cache).todo] == ["large.png"]


@pytest.mark.parametrize(
    ("size", "cause"),
    [((8, 8), "too-small"), ((4000, 100), "extreme-aspect"), ((12_000, 12_000), "too-many-pixels")],
)
def test_what_no_bucket_takes_is_refused_with_the_hint_of_its_cause(tmp_path, size, cause):
    (tmp_path / "a.png").write_bytes(bomb_header(*size))
    (failed,) = looked_at(tmp_path).failed
    assert (failed.refusal.cause, failed.refusal.hint) == (cause, HINTS[cause])
    assert failed.refusal.content == content_hash(bomb_header(*size))


def test_several_resolutions_give_one_placement_each():
    placements = placements_for(Size(300, 300), TABLES)
    assert [placement.bucket for placement in placements] == [Size(64, 64), Size(128, 128)]


def test_one_bucket_is_used_once():
    table = TABLES[0]
    assert len(placements_for(Size(300, 300), (table, table))) == 1


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_a_picture_has_distinct_buckets_or_a_cause(height, width):
    size = Size(height, width)
    if all(refusal(size, table) for table in TABLES):
        with pytest.raises(UnusableSampleError) as caught:
            placements_for(size, TABLES)
        assert caught.value.fix == HINTS[caught.value.slug]
        return
    buckets = [placement.bucket for placement in placements_for(size, TABLES)]
    assert len(set(buckets)) == len(buckets) <= len(TABLES)
    assert all(any(bucket in table.sizes for table in TABLES) for bucket in buckets)


def test_keys_name_content_bucket_and_recipe():
    recipe = recipe_of()
    keys = keys_of(b"c" * 16, placements_for(Size(300, 300), TABLES), recipe)
    unpacked = [EntryKey.unpack(key) for key in keys]
    assert [key.bucket for key in unpacked] == [Size(64, 64), Size(128, 128)]
    assert {(key.content, key.recipe) for key in unpacked} == {(b"c" * 16, recipe.key_part)}


@pytest.mark.parametrize("cause", ["permission", "io-error", "changing", "vanished", "out-of-memory"])
def test_what_was_no_fault_of_the_file_is_tried_again(built, monkeypatch, cause):
    data, cache = built
    generation = load_generation(cache)
    refused = tuple({**item, "cause": cause} if item["name"] == "cut.jpg" else item for item in generation.refused)
    memory = Memory.of(replace(generation, refused=refused), recipe_of())
    found = survey(scan(data), recipe_of(), load_catalog(CacheLayout(cache)), memory, max_pixels=10**8)
    assert [planned.sample.name for planned in found.todo] == ["cut.jpg"]
    assert [failed.refusal.name for failed in found.failed] == ["bad.jpg"]


def test_other_decoders_look_at_refused_files_again(built):
    generation = load_generation(built[1])
    now = decoders()
    assert set(Memory.of(generation, recipe_of(), now).refused) == {"bad.jpg", "cut.jpg"}
    for name in now:
        assert Memory.of(generation, recipe_of(), now | {name: "99"}).refused == {}
