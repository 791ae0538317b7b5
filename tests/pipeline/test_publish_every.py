"""Snapshots that a build publishes while it goes on."""

import math
from itertools import islice

import numpy as np
import pytest
from small_builds import CASES, arrays_of, built, draw, png_with_text, reasons

from latentcache.errors import CacheNotFoundError, UsageError
from latentcache.fields.registry import field_kind
from latentcache.pipeline import build
from latentcache.pipeline.preflight import write_state
from latentcache.pipeline.settings import BuildSettings
from latentcache.store.atomic_io import read_json
from latentcache.store.lock import builder_lock
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_leased, open_snapshot

LATENTS, EDGES = CASES["latents"], CASES["edge_map"]


def until(count):
    """Publish after this many jobs, whatever the time."""
    return lambda due, jobs: jobs if due == math.inf else islice(jobs, count)


class Published(dict):
    """Snapshots by number: the names of samples; with the labels of groups, and leases on some."""

    def __init__(self):
        super().__init__()
        self.leased, self.leases, self.labels = [], [], []


@pytest.fixture
def published(monkeypatch):
    """Snapshots of a build; one is due after three inputs."""
    seen, real = Published(), build.publish

    def publish(paths, *arguments, **named):
        report = real(paths, *arguments, **named)
        snapshot = open_snapshot(paths.root)
        seen[report.snapshot] = {name.removesuffix(":1") for name in snapshot.samples.names}
        assert snapshot.complete
        assert bool(snapshot.building) == named["is_part"]
        for rows in snapshot.fields.values():
            assert set(np.asarray(rows.sample).tolist()) == set(range(len(snapshot.samples)))
        seen.labels.append({group.label for rows in snapshot.fields.values() for group in rows.groups})
        seen.leases += [open_leased(paths.root)] if report.snapshot in seen.leased else []
        return report

    monkeypatch.setattr(build, "until", until(2))
    monkeypatch.setattr(build, "publish", publish)
    return seen


def test_snapshots_hold_the_samples_that_are_built(case, tmp_path, published, trusted):
    data = case.data(tmp_path / "data", 10)
    cache = built(case, data, publish_every="10m").cache
    assert [len(names) for names in published.values()] == [3, 6, 9, 10]
    assert CachePaths(cache).snapshots() == [3, 4]
    plain = built(case, data, out=tmp_path / "plain").cache
    assert open_snapshot(cache).fingerprint == open_snapshot(plain).fingerprint
    arrays, expected = arrays_of(cache, case.field), arrays_of(plain, case.field)
    assert all(np.array_equal(arrays[name], expected[name]) for name in expected)
    assert built(case, data, publish_every="10m").published is False


def test_a_snapshot_that_is_open_stays(tmp_path, published):
    data = EDGES.data(tmp_path / "data", 16)
    published.leased.append(2)
    cache = built(EDGES, data, publish_every="10m").cache
    assert len(published) == 6
    assert CachePaths(cache).snapshots() == [2, 5, 6]
    assert open_leased(cache, 2).number == 2
    with pytest.raises(CacheNotFoundError, match=r"snapshot 3 of .* is gone"):
        open_leased(cache, 3)


def test_what_is_not_built_yet_is_not_rejected(case, tmp_path, published):
    data = case.data(tmp_path / "data", 9)
    bad = case.spoil(data, 9)
    report = built(case, data, publish_every="10m")
    assert set(reasons(report)) == {bad.name}
    assert bad.name not in set().union(*published.values())
    first, *_ = published
    assert len(published[first]) in (2, 3)
    assert report.counts()["encoded"] == 9


def test_only_samples_with_every_field_are_published(tmp_path, published, trusted):
    data = LATENTS.data(tmp_path / "data", 8)
    for number in range(8):
        LATENTS.path(data, number).with_suffix(".txt").write_text(f"caption {number}")
    prompts = field_kind("prompt_embeds").settings(text_encoder="stub", empty_prompt=True)
    fields = LATENTS.fields() | {"prompt_embeds": prompts}
    cache = built(LATENTS, data, fields=fields, publish_every="10m").cache
    assert [len(names) for names in published.values()] == [3, 6, 8]
    plain = built(LATENTS, data, fields=fields, out=tmp_path / "plain").cache
    assert open_snapshot(cache).fingerprint == open_snapshot(plain).fingerprint
    assert built(LATENTS, data, fields=fields).published is False


def test_copies_of_an_image_are_encoded_once(tmp_path, published):
    """Their files differ, so the build learns from the pixels that they are equal."""
    data = tmp_path / "data"
    source = draw(tmp_path / "source.png", 0).read_bytes()
    data.mkdir()
    for number in range(9):
        (data / f"{number}.png").write_bytes(png_with_text(source, f"copy {number}"))
    built(LATENTS, data, publish_every="10m")
    assert [len(names) for names in published.values()] == [3, 6, 9]


def test_the_first_snapshot_has_every_bucket(tmp_path, published, monkeypatch):
    monkeypatch.setattr(build, "until", until(79))
    sizes = [(64, 64), (32, 96), (96, 32), (32, 128), (128, 32)]
    for number in range(200):
        bucket = 0 if number < 160 else number % 5
        draw(tmp_path / "data" / f"{number:03}.png", number, height=sizes[bucket][0], width=sizes[bucket][1])
    built(LATENTS, tmp_path / "data", publish_every="10m")
    assert [len(names) for names in published.values()] == [80, 160, 200]
    assert len(published.labels[0]) == 5
    assert published.labels[0] == published.labels[-1]


def test_opening_a_cache_before_its_first_snapshot_says_how_far_the_build_is(tmp_path, monkeypatch):
    data, states = EDGES.data(tmp_path / "data", 4), []
    monkeypatch.setattr(build, "_CLAIM_S", 0.0)
    monkeypatch.setattr(
        build,
        "write_state",
        lambda *arguments, **more: (write_state(*arguments, **more), states.append(more["progress"])),
    )
    cache = built(EDGES, data).cache
    assert {"field": "edge_map", "done": 4, "total": 4} in states
    paths = CachePaths(cache)
    paths.current.unlink()
    with pytest.raises(CacheNotFoundError, match="no finished build"):
        open_snapshot(cache)
    write_state(paths, {}, BuildSettings(data=data).source or build.SourceOptions(), progress=states[-1])
    assert read_json(paths.building)["progress"] == states[-1]
    with builder_lock(paths.lock), pytest.raises(CacheNotFoundError, match="4 of 4 edge_map") as caught:
        open_snapshot(cache)
    assert "--publish-every" in caught.value.fix


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1h", 3600), (5, 5)])
def test_a_duration(text, seconds):
    assert BuildSettings(data="x", publish_every=text).publish_every == seconds


@pytest.mark.parametrize("text", ["10", "10 m", "1.5h", "ten", "", "0s", "-1m", True])
def test_a_duration_of_another_form(text):
    with pytest.raises(UsageError) as caught:
        BuildSettings(data="x", publish_every=text)
    if isinstance(text, str) and text != "0s":
        assert str(caught.value).endswith("fix: publish_every='10m'; or 90s, 1h, 7d")


def test_a_build_that_was_killed_before_its_last_snapshot_is_ended(tmp_path, monkeypatch, trusted):
    data, real = EDGES.data(tmp_path / "data", 3), build.publish
    with monkeypatch.context() as patch:
        patch.setattr(build, "publish", lambda *arguments, **named: real(*arguments, **named | {"is_part": True}))
        cache = built(EDGES, data).cache
    assert (len(open_snapshot(cache).samples), open_snapshot(cache).building) == (3, 3)
    assert built(EDGES, data).published
    assert open_snapshot(cache).building == 0
    assert built(EDGES, data).published is False
