"""Old data at a URL goes, by the store's clock."""

import time

import pytest
from s3_server import server, url
from small_cache import SMALL, cache, data, draw, run, shared

from latentcache.store.remote.bucket import Bucket
from latentcache.store.remote.transfer import pull

__all__ = ["cache", "data", "run", "server", "shared", "url"]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def rebuilt(url, data, run):
    """A URL with two snapshots that share no entry."""
    assert run("build", data, "--out", url, *SMALL).status == 0
    for number in range(4):
        draw(data / f"p{number}.png", seed=40 + number)
    assert run("build", data, "--out", url).status == 0
    return url


def reasons(done, state):
    return sorted(item["reason"] for item in done.json["items"] if item["category"] == state)


def test_only_old_data_that_nothing_needs_goes(rebuilt, run, tmp_path):
    young = run("gc", rebuilt, "--apply", "--json")
    assert (young.status, reasons(young, "removed")) == (0, [])
    assert reasons(young, "held") == ["rollback"]
    time.sleep(2.5)
    plan = run("gc", rebuilt, "--older-than", "1s", "--json")
    assert reasons(plan, "removable") == ["superseded", "unreferenced"]
    assert plan.json["removable_bytes"] > 0
    done = run("gc", rebuilt, "--older-than", "1s", "--apply", "--json")
    assert reasons(done, "removed") == ["superseded", "unreferenced"]
    assert done.json["freed_bytes"] == plan.json["removable_bytes"]
    assert run("verify", rebuilt, "--full", "--json").json["counts"]["ok"] == 4
    pull(rebuilt, tmp_path / "copy")
    assert run("gc", rebuilt, "--older-than", "1s", "--json").json["items"] == []


def test_what_a_young_snapshot_needs_stays(rebuilt, run):
    bucket = Bucket(rebuilt)
    time.sleep(2.5)
    (first,) = {key.split("/")[1] for key in bucket.sizes("snapshots") if "/000001-" in key}
    data, _ = bucket.read(f"snapshots/{first}/rejected.jsonl")
    bucket.remove(f"snapshots/{first}/rejected.jsonl")
    bucket.write(f"snapshots/{first}/rejected.jsonl", data)
    done = run("gc", rebuilt, "--older-than", "2s", "--apply", "--json")
    assert reasons(done, "removed") == []
    bucket.remove(f"snapshots/{first}/manifest.json")
    done = run("gc", rebuilt, "--older-than", "2s", "--apply", "--json")
    assert reasons(done, "removed") == []


def test_a_build_that_loses_shards_to_gc_says_so_and_mends(rebuilt, data, run, monkeypatch):
    """The build plans on entries of an old shard, which goes before it publishes."""
    for number in range(4):
        draw(data / f"p{number}.png", [(96, 64), (64, 96), (80, 80), (96, 64)][number], seed=number)
    real = Bucket.send

    def send(self, path, key):
        monkeypatch.setattr(Bucket, "send", real)
        time.sleep(2.5)
        assert run("gc", rebuilt, "--older-than", "1s", "--apply").status == 0
        return real(self, path, key)

    monkeypatch.setattr(Bucket, "send", send)
    done = run("build", data, "--out", rebuilt, "--json")
    assert (done.status, done.error["slug"]) == (3, "remote")
    assert run("build", data, "--out", rebuilt).status == 0
    assert run("verify", rebuilt, "--full", "--json").json["counts"]["ok"] == 4


def test_wrong_calls(url, cache, run, monkeypatch):
    assert run("gc", url, "--json").error["slug"] == "cache-not-found"
    assert run("gc", url, "--keep", "1", "--json").status == 2
    assert run("gc", cache, "--older-than", "7d", "--json").status == 2
    assert run("gc", url, "--older-than", "soon", "--json").status == 2
    assert run("gc", "s3://key:secret@bucket/x", "--json").status == 2
