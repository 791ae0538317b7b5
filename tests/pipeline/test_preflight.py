import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small_builds import folder_of, recipe_of, settings

from latentcache.encoders.describe import describe_model
from latentcache.errors import CacheDamagedError, CacheFormatError, CacheReadOnlyError, DiskFullError, UsageError
from latentcache.pipeline import preflight as preflight_module
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.preflight import (
    Before,
    check_damage,
    check_places,
    check_resample,
    check_space,
    default_threads,
    marker,
    model_config,
    model_name,
    provenance,
    read_before,
    remove_unused,
    source_facts,
)
from latentcache.pipeline.report import BuildPlan
from latentcache.pipeline.settings import RecipeSettings
from latentcache.sources.resolve import scan
from latentcache.store.durable import write_json
from latentcache.store.layout import CacheLayout

STUB = describe_model("stub:delay_ms=3")


def plan_of(cache, **numbers):
    facts = {"entries_to_make": 10, "bytes_to_write": 1000, "free_bytes": 10**9} | numbers
    return BuildPlan(
        cache=cache,
        data=cache,
        model="stub",
        recipe=recipe_of(),
        samples=1,
        buckets={},
        entries_cached=0,
        files_to_read=1,
        refused=(),
        notes=(),
        **facts,
    )


@pytest.mark.parametrize("inside", ["data/cache", "data", "data/a/b", "data/../data/cache"])
def test_a_cache_inside_the_data_is_refused_with_another_place(tmp_path, inside):
    (tmp_path / "data").mkdir()
    with pytest.raises(UsageError, match="inside the data folder") as caught:
        check_places(tmp_path / "data", tmp_path / inside)
    assert caught.value.fix == f"use --out {tmp_path / 'data.latentcache'}"


def test_a_link_does_not_hide_that_the_cache_is_inside(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with pytest.raises(UsageError, match="inside the data folder"):
        check_places(tmp_path / "data", tmp_path / "link" / "cache")


@pytest.mark.parametrize("other", ["notes.txt", "shards/0001.tar"])
def test_a_folder_with_other_things_in_it_is_no_place_for_a_cache(tmp_path, other):
    path = tmp_path / "out" / other
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(UsageError, match="no cache and not empty"):
        check_places(tmp_path / "data", tmp_path / "out")


def test_a_file_is_no_place_for_a_cache(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        check_places(tmp_path / "data", tmp_path / "out")


@pytest.mark.parametrize("mark", ["CURRENT", "BUILDING", "builder.lock"])
def test_a_cache_is_a_place_for_a_cache(tmp_path, mark):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / mark).write_text("")
    check_places(tmp_path / "data", tmp_path / "out")
    check_places(tmp_path / "data", tmp_path / "new")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_place_that_may_not_be_looked_into_is_read_only(tmp_path):
    closed = tmp_path / "closed"
    (closed / "out").mkdir(parents=True)
    closed.chmod(0o700)
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from latentcache.errors import CacheReadOnlyError\n"
        "from latentcache.pipeline.preflight import check_places\n"
        "os.setuid(65534)\n"
        "try:\n    check_places(Path(sys.argv[1], 'data'), Path(sys.argv[1], 'out'))\n"
        "except CacheReadOnlyError:\n    sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(closed)], check=False).returncode == 7
    assert issubclass(CacheReadOnlyError, PermissionError)


@pytest.mark.parametrize(("needed", "fits"), [(10**9 - (64 << 20), False), (8 * 10**8, True), (10**10, False)])
def test_a_build_that_cannot_fit_is_refused_with_both_numbers(tmp_path, needed, fits):
    plan = plan_of(tmp_path, bytes_to_write=needed)
    if fits:
        check_space(plan)
        return
    with pytest.raises(DiskFullError) as caught:
        check_space(plan)
    assert f"{needed:,}" in caught.value.why
    assert f"{10**9:,}" in caught.value.why
    assert f"{64 << 20:,} in reserve" in caught.value.why, "without it the numbers would say that it fits"


def test_a_build_that_makes_nothing_needs_no_space(tmp_path):
    check_space(plan_of(tmp_path, entries_to_make=0, free_bytes=0))


def test_a_full_disk_is_said_before_a_picture_is_decoded(tmp_path, monkeypatch):
    folder_of(tmp_path / "data", 2)
    monkeypatch.setattr(
        "latentcache.pipeline.report.shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})()
    )
    with pytest.raises(DiskFullError, match="too full"):
        build_cache(settings(tmp_path / "data"))
    assert list((tmp_path / "data.latentcache" / "shards").iterdir()) == []


def test_a_kernel_this_machine_does_not_have_is_refused(monkeypatch):
    recipe = recipe_of(resample="lanczos-u8")
    monkeypatch.setattr(preflight_module, "resample_self_test", lambda: False)
    with pytest.raises(UsageError, match="lanczos-u8"):
        check_resample(recipe)
    check_resample(recipe_of(resample="lanczos-pil"))


def test_a_new_place_says_nothing_of_before(tmp_path):
    before = read_before(CacheLayout(tmp_path / "nothing"))
    assert (before.generation, before.recipe, before.model) == (None, None, None)


def test_before_is_what_the_last_build_made(tmp_path):
    build_cache(settings(folder_of(tmp_path / "data", 2)))
    before = read_before(CacheLayout(tmp_path / "data.latentcache"))
    assert before.generation.number == 1
    assert (before.recipe, before.model) == (recipe_of(), "stub")


def test_a_build_that_did_not_end_counts_with_its_recipe_and_model(tmp_path):
    build_cache(settings(folder_of(tmp_path / "data", 2)))
    layout, asked = CacheLayout(tmp_path / "data.latentcache"), recipe_of(alpha="#000000")
    write_json(layout.building, marker(asked, STUB, 2))
    before = read_before(layout)
    assert (before.generation.number, before.recipe, before.model) == (1, asked, "stub:delay_ms=3")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": "stub"}', '{"recipe": {}, "model": "stub"}'])
def test_a_marker_that_cannot_be_read_says_nothing(tmp_path, text):
    layout = CacheLayout(tmp_path)
    layout.building.write_text(text)
    layout.shards.mkdir()
    assert read_before(layout).recipe is None


def test_a_marker_of_a_newer_version_is_refused(tmp_path):
    layout = CacheLayout(tmp_path)
    layout.building.write_text(json.dumps(marker(recipe_of(), STUB, 1) | {"format": 99}))
    with pytest.raises(CacheFormatError, match="99"):
        read_before(layout)


def test_a_folder_with_nothing_but_the_lock_goes(tmp_path):
    layout = CacheLayout(tmp_path / "cache")
    layout.root.mkdir()
    layout.lock.touch()
    remove_unused(layout)
    assert not layout.root.exists()


def test_a_folder_with_anything_else_stays(tmp_path):
    layout = CacheLayout(tmp_path / "cache")
    layout.shards.mkdir(parents=True)
    layout.lock.touch()
    remove_unused(layout)
    assert layout.lock.exists()


def test_a_model_is_found_again_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "vae").mkdir()
    monkeypatch.chdir(tmp_path)
    local = replace(STUB, label="vae", kind="diffusers")
    assert Path(model_name(local)) == (tmp_path / "vae").resolve()
    assert model_name(replace(local, label="owner/name")) == "owner/name"
    assert model_name(STUB) == "stub:delay_ms=3"


def test_the_manifest_says_where_the_entries_come_from(tmp_path):
    facts = source_facts(scan(folder_of(tmp_path / "data", 1)), STUB, tmp_path / "caches" / "one")
    assert facts["source"]["root"] == str((tmp_path / "data").resolve())
    assert (tmp_path / "caches" / "one" / facts["source"]["relative"]).resolve() == (tmp_path / "data").resolve()
    assert facts["demo"] is False
    assert facts["provenance"] == provenance("stub:delay_ms=3") | {"model_config": None, "fold": True}
    assert set(facts["provenance"]["libraries"]) >= {"torch", "pillow", "lmdb"}


def test_there_are_at_least_two_decode_threads():
    assert default_threads() >= 2


def test_a_damaged_manifest_says_that_the_model_must_be_named(tmp_path):
    made = build_cache(settings(folder_of(tmp_path / "data", 2)))
    layout = CacheLayout(made.plan.cache)
    (layout.generation(1) / "manifest.json").write_text("{")
    before = read_before(layout)
    assert (before.generation, before.recipe) == (None, None)
    with pytest.raises(CacheDamagedError, match="cannot say what it was made with") as caught:
        check_damage(before, model_said=False)
    assert "manifest.json cannot be read" in caught.value.why
    check_damage(before, model_said=True)


def test_an_older_whole_generation_stands_in_for_a_damaged_one(tmp_path):
    data = folder_of(tmp_path / "data", 2)
    build_cache(settings(data))
    (data / "000.txt").write_text("a caption")
    made = build_cache(settings(data))
    layout = CacheLayout(made.plan.cache)
    (layout.generation(2) / "names_bytes.npy").write_bytes(b"")
    before = read_before(layout)
    assert before.generation.number == 1
    healed = build_cache(replace(settings(data), recipe=RecipeSettings()))
    assert (healed.encoded, healed.cached, healed.generation) == (0, 2, 3)
    assert read_before(layout).damage == ""


def test_a_torn_current_is_made_again(tmp_path):
    data = folder_of(tmp_path / "data", 2)
    layout = CacheLayout(build_cache(settings(data)).plan.cache)
    layout.current.write_text("00")
    healed = build_cache(settings(data))
    assert (healed.encoded, layout.current_generation()) == (0, healed.generation)


def test_the_configuration_of_a_lone_weights_file_is_remembered(tmp_path):
    weights, config = tmp_path / "vae.safetensors", tmp_path / "elsewhere" / "config.json"
    weights.write_bytes(b"")
    lone = replace(STUB, kind="diffusers", label=str(weights), config_path=config)
    assert model_config(lone) == str(config)
    assert model_config(STUB) is None
    assert source_facts(scan(folder_of(tmp_path / "data", 1)), lone, tmp_path / "c")["provenance"]["model_config"]


def test_a_damaged_marker_says_nothing(tmp_path):
    layout = CacheLayout(tmp_path)
    text = json.dumps(marker(recipe_of(), STUB, 1))
    layout.building.write_text(text)
    assert read_before(layout).recipe == recipe_of()
    layout.building.write_text(text.replace("float16", "float32"))
    assert read_before(layout) == Before()
