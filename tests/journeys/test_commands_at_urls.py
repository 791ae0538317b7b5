"""Commands that read a cache at a URL say what they say of its folder."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from damaged import damage_payload
from s3_server import entries, server, url
from small_cache import SMALL, cache, data, draw, run, shared

from latentcache.errors import RemoteError
from latentcache.store.gather import STAND_INS
from latentcache.store.remote.bucket import Bucket
from latentcache.store.remote.transfer import pull, push

__all__ = ["cache", "data", "run", "server", "shared", "url"]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


#: What may differ: times, and the size of the files beside shards.
_OWN = ("elapsed_s", "bytes", "out")


def same(done, cache, url):
    """The JSON of a command, with its times left out and the URL as the folder."""
    text = done.out.replace(url, str(cache))
    return {name: value for name, value in json.loads(text).items() if name not in _OWN}


def compare(run, cache, url, *words):
    """Run a command on a folder and on its URL; gives both results once they are the same."""
    words = [*words, "--json"]
    local = run(*[cache if word == "CACHE" else word for word in words])
    remote = run(*[url if word == "CACHE" else word for word in words])
    assert remote.status == local.status
    assert same(remote, cache, url) == same(local, cache, url)
    assert "latentcache-" not in remote.out + remote.err
    return remote


@pytest.mark.parametrize(
    "words",
    [
        ("info", "CACHE"),
        ("info", "CACHE", "--entries"),
        ("verify", "CACHE"),
        ("verify", "CACHE", "--full"),
        ("verify", "CACHE", "--sample", "1/2"),
        ("verify", "CACHE", "--reencode", "2"),
        ("plan", "CACHE", "--batch-size", "1"),
        ("show", "CACHE", "p1.png"),
    ],
    ids=" ".join,
)
def test_a_url_is_read_as_its_folder_is(url, cache, run, words):
    push(cache, url)
    assert compare(run, cache, url, *words).status == 0
    assert not STAND_INS


def test_the_report_of_a_url_has_its_images_and_its_name(url, cache, run, tmp_path):
    push(cache, url)
    done = run("report", url, "--out", tmp_path / "page.html", "--json")
    page = (tmp_path / "page.html").read_text()
    assert done.json["facts"]["cache"]["cache"] == url
    assert len(done.json["facts"]["sheet"]["cards"]) == 4
    assert "<title>images" in page
    assert "latentcache-" not in page + done.out


def test_the_data_of_a_check_comes_by_ranges(url, cache, run, monkeypatch):
    """No data file is fetched whole, and little more than the payload is read."""
    push(cache, url)
    fetched, read = [], []
    monkeypatch.setattr(Bucket, "fetch", spy(Bucket.fetch, lambda key, path: fetched.append(key)))
    monkeypatch.setattr(Bucket, "ranges", spy(Bucket.ranges, lambda key, first, sizes: read.extend(sizes)))
    checked = run("verify", url, "--full", "--json").json["checked"]
    assert not [key for key in fetched if key.endswith("data.mdb")]
    assert checked["payload_bytes"] <= sum(read) < checked["payload_bytes"] + (1 << 18)


def spy(function, note):
    def spied(self, *arguments):
        note(*arguments)
        return function(self, *arguments)

    return spied


def test_damage_at_a_url_is_found_and_repaired_there(url, cache, data, run, tmp_path):
    damage_payload(cache)
    push(cache, url)
    found = compare(run, cache, url, "verify", "CACHE", "--full")
    assert found.status == 1
    assert found.json["counts"]["corrupt"] == 1
    repaired = run("verify", url, "--full", "--repair", "--yes", "--json")
    assert repaired.json["repair"]["removed"] == 1
    assert run("info", url, "--json").json["complete"] is False
    pull(url, tmp_path / "copy")
    assert run("build", data, "--out", tmp_path / "copy", "--json").json["counts"]["encoded"] == 1
    push(tmp_path / "copy", url)
    assert run("verify", url, "--full").status == 0


def test_a_shard_that_is_gone_or_short_at_the_url(url, cache, run):
    push(cache, url)
    bucket = Bucket(url)
    (key,) = (key for key in bucket.sizes("shards") if key.endswith("data.mdb"))
    whole = cache / key
    short = cache.parent / "short"
    short.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    bucket.send(short, key)
    assert run("verify", url, "--json").json["counts"]["corrupt"] > 0
    bucket.remove(key)
    assert run("verify", url, "--json").json["counts"]["missing"] == 4


def test_a_store_that_stops_answering_is_no_damage(url, cache, run, monkeypatch):
    push(cache, url)
    real = Bucket.ranges

    def broken(self, *arguments):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        return real(Bucket(url), *arguments)

    monkeypatch.setattr(Bucket, "ranges", broken)
    counts = run("verify", url, "--full", "--json").json["counts"]
    assert counts["unverifiable"] == 4
    assert counts["corrupt"] == 0


@pytest.mark.parametrize("command", ["info", "verify", "show", "report", "plan", "gc"])
def test_a_url_without_a_cache_or_a_bucket_is_named(url, run, command):
    more = {"show": ["0"], "plan": ["--batch-size", "1"]}.get(command, [])
    done = run(command, url, *more, "--json")
    assert (done.status, done.error["slug"]) == (3, "cache-not-found")
    done = run(command, "s3://no-such-bucket/x", *more, "--json")
    assert (done.status, done.error["what"]) == (3, "s3://no-such-bucket/x: the bucket does not exist")


@pytest.mark.parametrize("command", ["push", "build"])
@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"AWS_ACCESS_KEY_ID": "reader"}, "access is denied"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "access is denied"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "the store does not answer"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "no credentials|access is denied"),
    ],
)
def test_a_store_that_refuses_is_named_at_once(url, cache, data, run, monkeypatch, command, variables, problem):
    for name, value in variables.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    events = data.parent / "events"
    words = (cache, url) if command == "push" else (data, "--out", url, *SMALL, "--events", events)
    done = run(command, *words, "--json")
    assert (done.status, done.error["slug"]) == (3, "remote")
    assert re.search(problem, done.error["what"])
    assert "secret" not in done.out + done.err
    assert not events.exists()


@pytest.mark.parametrize("wrong", ["s3://", "http://host/bucket", "bucket/x", "s3://host:90/x", "s3://bucket/a b"])
def test_a_url_that_cannot_be_used_is_named(cache, run, wrong):
    done = run("push", cache, wrong, "--json")
    assert (done.status, done.error["what"]) == (2, f"{wrong}: not the URL of a bucket")


@pytest.mark.parametrize(
    "words",
    [
        ("info", "URL"),
        ("gc", "URL"),
        ("push", "CACHE", "URL"),
        ("pull", "URL", "copy"),
        ("push", "URL", "s3://bucket/x"),
        ("export", "URL", "out", "--to", "kohya"),
        ("merge", "CACHE", "URL", "--out", "whole"),
        ("build", "URL", "--out", "whole"),
        ("build", "photos", "--out", "URL"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("password", ["secret", "a/secret+#"])
def test_no_command_shows_the_password_of_a_url(cache, run, words, password):
    places = {"URL": f"s3://key:{password}@bucket/x", "CACHE": cache}
    done = run(*[places.get(word, word) for word in words], "--json")
    assert done.error["slug"] in ("usage", "cache-not-found")
    assert "secret" not in done.out + done.err


def test_data_at_a_url_is_refused_with_the_way(run):
    done = run("build", "s3://bucket/photos", "--out", "cache", "--json")
    assert done.status == 2
    assert "mount the bucket" in done.error["fix"]


@pytest.mark.parametrize("words", [("export", "URL", "out", "--to", "kohya"), ("push", "URL", "s3://bucket/x")])
def test_a_command_that_needs_a_folder_says_how_to_get_it(url, cache, run, words):
    push(cache, url)
    done = run(*[url if word == "URL" else word for word in words], "--json")
    assert (done.status, done.error["fix"]) == (3, f"copy it first: latentcache pull {url} CACHE")


def test_a_store_that_does_not_answer_is_said_once_and_a_signal_ends_the_wait(tmp_path):
    around = os.environ | {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }
    command = [Path(sys.executable).parent / "latentcache", "info", "s3://bucket/x"]
    with subprocess.Popen(command, env=around, stderr=subprocess.PIPE, text=True) as process:
        said = process.stderr.readline()
        process.terminate()
        more = process.stderr.read()
    assert said == "warning: s3://bucket/x: the store does not answer: trying again for 300 s\n"
    assert "warning" not in more
    assert process.returncode == 143


# gc, by the store's clock


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


def test_gc_takes_one_limit_for_a_folder_and_another_for_a_url(url, cache, run):
    wrong = [(url, "--keep", "1"), (cache, "--older-than", "7d"), (url, "--older-than", "soon")]
    assert [run("gc", *words, "--json").status for words in wrong] == [2, 2, 2]


# merge


@pytest.fixture
def parts(url, data, run):
    """URLs of three parts."""
    for number in range(8):
        draw(data / f"q{number}.png", (80, 64), seed=number + 10)
    urls = [f"{url}/part{number}" for number in range(3)]
    for number, part in enumerate(urls):
        assert run("build", data, "--out", part, *SMALL, "--part", f"{number}/3").status == 0
    return urls


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
    assert entries(run, f"{url}/whole") == entries(run, tmp_path / "local")
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
    assert run("build", data, "--out", f"{url}/other", *SMALL, "--flip", "--part", "2/3").status == 0
    other = run("merge", *parts[:2], f"{url}/other", "--out", whole, "--json")
    assert (other.status, other.error["slug"]) == (3, "stale-cache")
    assert f"{url}/other" in other.error["what"]
    assert not Bucket(whole).sizes("shards")
    assert run("info", whole).status == 3
