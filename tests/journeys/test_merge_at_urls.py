"""Parts at URLs become one cache at a URL."""

import pytest
from s3_server import server, url
from small_cache import SMALL, cache, data, draw, run, shared

from latentcache.errors import RemoteError
from latentcache.store.remote.bucket import Bucket
from latentcache.store.remote.transfer import pull

__all__ = ["cache", "data", "run", "server", "shared", "url"]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def parts(url, data, run):
    """URLs of three parts."""
    for number in range(8):
        draw(data / f"q{number}.png", (80, 64), seed=number + 10)
    urls = [f"{url}/part{number}" for number in range(3)]
    for number, part in enumerate(urls):
        assert run("build", data, "--out", part, *SMALL, "--part", f"{number}/3").status == 0
    return urls


def keys(run, where):
    return {entry["key"] for entry in run("info", where, "--entries", "--json").json["entries"]}


def test_parts_at_urls_are_merged_inside_the_store(url, parts, data, run, tmp_path, monkeypatch):
    fetched, sent = [], []
    fetch, send = Bucket.fetch, Bucket.send
    monkeypatch.setattr(Bucket, "fetch", lambda self, key, path: (fetched.append(key), fetch(self, key, path)))
    monkeypatch.setattr(Bucket, "send", lambda self, path, key: (sent.append(key), send(self, path, key)))
    done = run("merge", *parts, "--out", f"{url}/whole", "--json")
    assert done.status == 0
    assert done.json["cache"] == f"{url}/whole"
    assert not [key for key in (*fetched, *sent) if key.endswith("data.mdb")]
    assert run("build", data, "--out", tmp_path / "local", *SMALL).status == 0
    assert keys(run, f"{url}/whole") == keys(run, tmp_path / "local")
    assert run("verify", f"{url}/whole", "--full", "--json").json["counts"]["ok"] == 12
    again = run("merge", *parts, "--out", f"{url}/whole", "--json")
    assert (again.status, again.json["published"]) == (0, False)


def test_local_parts_and_one_of_another_bucket(url, server, parts, run, tmp_path):
    server.make_bucket("other")
    elsewhere = url.replace("s3://bucket", "s3://other")
    pull(parts[0], tmp_path / "part0")
    pull(parts[1], tmp_path / "part1")
    assert run("push", tmp_path / "part1", elsewhere).status == 0
    before = {path: path.stat().st_blocks for path in tmp_path.rglob("part0/shards/*/*")}
    assert run("merge", tmp_path / "part0", elsewhere, parts[2], "--out", f"{url}/whole").status == 0
    assert {path: path.stat().st_blocks for path in before} == before
    assert run("verify", f"{url}/whole", "--full", "--json").json["counts"]["ok"] == 12
    assert run("merge", *parts, "--out", tmp_path / "folder").status == 0
    assert run("verify", tmp_path / "folder", "--full").status == 0


def test_a_merge_that_is_cut_goes_on(url, parts, run, monkeypatch):
    real, calls = Bucket.copy, []

    def cut(self, *arguments):
        calls.append(arguments)
        if len(calls) in (2, 4, 7):
            raise RemoteError("cut", where=url)
        return real(self, *arguments)

    monkeypatch.setattr(Bucket, "copy", cut)
    statuses = [run("merge", *parts, "--out", f"{url}/whole").status for _ in range(4)]
    assert statuses == [3, 3, 3, 0]
    assert run("verify", f"{url}/whole", "--full", "--json").json["counts"]["ok"] == 12


def test_wrong_parts_publish_nothing(url, parts, data, run):
    whole = f"{url}/whole"
    lacking = run("merge", *parts[:2], "--out", whole, "--json")
    assert (lacking.status, "2/3" in lacking.error["what"]) == (2, True)
    nowhere = run("merge", *parts[:2], f"{url}/nowhere", "--out", whole, "--json")
    assert (nowhere.status, nowhere.error["slug"]) == (3, "cache-not-found")
    assert run("build", data, "--out", f"{url}/other", *SMALL, "--flip", "--part", "2/3").status == 0
    other = run("merge", *parts[:2], f"{url}/other", "--out", whole, "--json")
    assert (other.status, other.error["slug"]) == (3, "stale-cache")
    assert f"{url}/other" in other.error["what"]
    assert not Bucket(whole).sizes("shards")
    assert run("info", whole).status == 3
