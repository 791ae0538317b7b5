import os
from dataclasses import replace

import pytest
from small_cache import build, draw, draw_four

from latentcache.pipeline import build as build_module
from latentcache.pipeline.preflight import read_before
from latentcache.pipeline.standstill import stands_still
from latentcache.sources.resolve import scan
from latentcache.store.generation import load_generation, publish
from latentcache.store.layout import CacheLayout


@pytest.fixture
def built(tmp_path):
    """A cache whose memos are old enough to be trusted, with a file that was refused for its content."""
    data, cache = draw_four(tmp_path / "data"), tmp_path / "cache"
    (data / "html.png").write_bytes(b"<html>")
    build(data, cache)
    trust(cache)
    return data, cache


def trust(cache):
    """As if the build had looked at its files an hour later."""
    generation = load_generation(cache)
    stat = generation.samples.stat.copy()
    stat[:, 5] += 3600 * 10**9
    refused = [
        {**item, "stat": [*item["stat"][:5], item["stat"][5] + 3600 * 10**9] if item["stat"] else None}
        for item in generation.refused
    ]
    publish(
        CacheLayout(cache),
        recipe=generation.recipe,
        rows=generation.rows,
        samples=replace(generation.samples, stat=stat),
        buckets=generation.buckets,
        shards=generation.shards,
        refused=refused,
        notes=generation.notes,
        facts={name: generation.manifest[name] for name in ("source", "provenance", "demo")},
    )


def answer(data, cache):
    layout = CacheLayout(cache)
    return stands_still(scan(data), load_generation(cache).recipe, read_before(layout), layout)


def the_long_way(monkeypatch, data, cache, **more):
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "stands_still", lambda *given: None)
        return build(data, cache, **more)


def test_nothing_has_changed(built):
    refused = answer(*built)
    assert [(item.name, item.cause) for item in refused] == [("html.png", "html")]


@pytest.mark.parametrize("dry_run", [False, True])
def test_it_says_what_the_long_way_says(built, monkeypatch, dry_run):
    short, long = build(*built, dry_run=dry_run), the_long_way(monkeypatch, *built, dry_run=dry_run)
    assert (short.published, short.encoded, long.published, long.encoded) == (False, 0, False, 0)
    same = {"elapsed_s": 0.0}
    plans = [replace(report.plan, free_bytes=0) for report in (short, long)]
    assert plans[0] == plans[1]
    assert replace(short, plan=None, **same) == replace(long, plan=None, **same)


def edit(data, cache):
    draw(data / "p0.png", seed=9)


def touch(data, cache):
    os.utime(data / "p0.png", (1, 1))


def caption(data, cache):
    (data / "p0.txt").write_text("other")


def add(data, cache):
    draw(data / "new.png", seed=10)


def take_away(data, cache):
    (data / "p1.png").unlink()


def rename(data, cache):
    (data / "p1.png").rename(data / "q1.png")


def mend_the_refused(data, cache):
    draw(data / "html.png", seed=11)


def refuse_another(data, cache):
    (data / "pipe.png").symlink_to("/dev/null")


def note_another(data, cache):
    draw(data / ".hidden.png")


def damage_the_shard(data, cache):
    (shard,) = CacheLayout(cache).sealed_shards()
    (shard / "index.npy").write_bytes(b"")


def begin_another_build(data, cache):
    (cache / "BUILDING").write_text("{}")


@pytest.mark.parametrize(
    "change",
    [
        edit, touch, caption, add, take_away, rename, mend_the_refused, refuse_another, note_another,
        damage_the_shard, begin_another_build,
    ],
)  # fmt: skip
def test_any_change_is_work(built, change):
    change(*built)
    assert answer(*built) is None


def test_young_memos_prove_nothing(tmp_path):
    data, cache = draw_four(tmp_path / "data"), tmp_path / "cache"
    build(data, cache)
    assert answer(data, cache) is None


def test_another_recipe_or_folder_is_work(built):
    data, cache = built
    layout = CacheLayout(cache)
    other = load_generation(cache).recipe.with_encoder(storage_dtype="float32")
    assert stands_still(scan(data), other, read_before(layout), layout) is None
    moved = data.with_name("moved")
    data.rename(moved)
    assert answer(moved, cache) is None


def test_refused_files_are_tried_again_on_demand(built):
    report = build(*built, retry_failed=True)
    assert (report.encoded, len(report.refused)) == (0, 1)
