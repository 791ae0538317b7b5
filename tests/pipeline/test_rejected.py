"""A rejected or failed command leaves the cache and the next build's settings unchanged."""

import json
from dataclasses import replace

import pytest
from small_builds import CASES, Recorder, built, settings, tree

from latentcache.errors import (
    CacheDamagedError,
    CacheFormatError,
    DiskFullError,
    LatentcacheError,
    UsageError,
    WorkerError,
)
from latentcache.pipeline import preflight
from latentcache.pipeline.build import build_cache, plan_build
from latentcache.pipeline.preflight import read_existing
from latentcache.store.atomic_io import write_json
from latentcache.store.paths import CachePaths

LATENTS = CASES["latents"]


def full_disk(case, data, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "RESERVE_BYTES", 1 << 60)
    return settings(case, data, recipe={"flip": True} if case is LATENTS else {}), DiskFullError


def no_event_file(case, data, tmp_path, monkeypatch):
    return settings(case, data, events=tmp_path / "no" / "events"), UsageError


def another_kind_of_data(case, data, tmp_path, monkeypatch):
    other = CASES["latents" if case.field == "input_ids" else "input_ids"]
    return settings(case, other.data(tmp_path / "others", 1)), LatentcacheError


def dying_workers(case, data, tmp_path, monkeypatch):
    def die(*_, **__):
        raise WorkerError("workers keep dying", fix="look at the log")

    monkeypatch.setattr("latentcache.pipeline.build.Run", die)
    return settings(case, data), WorkerError


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("rejected", [full_disk, no_event_file, another_kind_of_data, dying_workers])
def test_a_rejected_build_leaves_everything_as_it_was(case, rejected, exists, tmp_path, monkeypatch):
    data = case.data(tmp_path / "data", 2)
    cache = tmp_path / "deep" / "cache"
    if exists:
        built(case, data, out=cache)
    case.write(data, 9)
    rejected_settings, error = rejected(case, data, tmp_path, monkeypatch)
    rejected_settings = replace(rejected_settings, out=cache)
    before = tree(tmp_path)
    with pytest.raises(error) as caught:
        build_cache(rejected_settings)
    assert tree(tmp_path) == before
    assert caught.value.fix
    monkeypatch.undo()


def test_a_first_build_that_was_killed_is_continued_without_its_flags(tmp_path, monkeypatch):
    data = LATENTS.data(tmp_path / "data", 3)
    with pytest.raises(LatentcacheError):
        built(LATENTS, data, recipe={"resolutions": (128,)}, events="/dev/full", commit_every=1)
    cache = tmp_path / "cache"
    assert CachePaths(cache).building.exists()
    assert read_existing(settings(LATENTS, data, fields={})).field_names == ("latents",)
    assert plan_build(settings(LATENTS, data, fields={})).cached > 0, "though no image is read"
    state = CachePaths(cache).building.read_bytes()
    rejected, error = dying_workers(LATENTS, data, tmp_path, monkeypatch)
    with pytest.raises(error):
        build_cache(replace(rejected, fields={"latents": replace(rejected.fields["latents"], resolutions=(256,))}))
    assert CachePaths(cache).building.read_bytes() == state
    monkeypatch.undo()
    report = built(LATENTS, data, fields={})
    assert report.plan.fields["latents"].recipe.as_json()["geometry"]["resolutions"] == [128]


@pytest.mark.parametrize("change", [{"part": 7}, {"source": {"layout": 5}}, {"fields": []}, {"format": float("inf")}])
def test_a_build_state_with_other_values_is_ignored(tmp_path, change):
    data, paths = LATENTS.data(tmp_path / "data", 3), CachePaths(tmp_path / "cache")
    with pytest.raises(LatentcacheError):
        built(LATENTS, data, events="/dev/full", commit_every=1)
    write_json(paths.building, json.loads(paths.building.read_bytes()) | change)
    assert read_existing(settings(LATENTS, data, fields={})).field_names == ()
    report = built(LATENTS, data)
    assert report.encoded + report.cached == 3


def test_a_damaged_build_state_is_ignored_and_a_newer_one_is_rejected(case, tmp_path):
    data = case.data(tmp_path / "data", 2)
    cache = built(case, data).cache
    (cache / "BUILDING").write_bytes(b"{ half")
    assert built(case, data).encoded == 0
    (cache / "BUILDING").write_text('{"format": 99, "fields": {}}')
    with pytest.raises(CacheFormatError, match="99"):
        built(case, data)


def test_a_damaged_manifest_is_replaced_if_the_fields_are_named(case, tmp_path):
    data, observer = case.data(tmp_path / "data", 2), Recorder()
    cache = built(case, data).cache
    manifest = CachePaths(cache).snapshot(1) / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes().replace(b'"complete"', b'"complate"'))
    with pytest.raises(CacheDamagedError, match="unknown"):
        built(case, data, fields={})
    report = built(case, data, observer=observer)
    assert (report.encoded, report.published) == (0, True)
    assert any("damaged" in message for message in observer.warnings)
