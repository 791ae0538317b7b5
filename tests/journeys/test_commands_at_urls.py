"""Commands that read a cache at a URL say what they say of its folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from damaged import damage_payload
from s3_server import server, url
from small_cache import cache, data, run, shared

from latentcache.store.gather import STAND_INS
from latentcache.store.remote.bucket import Bucket
from latentcache.store.remote.transfer import pull, push

__all__ = ["cache", "data", "run", "server", "shared", "url"]

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


@pytest.mark.parametrize("command", ["info", "verify", "show", "report", "plan"])
def test_what_is_wrong_with_a_url_is_named(url, run, monkeypatch, command):
    more = {"show": ["0"], "plan": ["--batch-size", "1"]}.get(command, [])
    done = run(command, url, *more, "--json")
    assert (done.status, done.error["slug"]) == (3, "cache-not-found")
    done = run(command, "s3://key:secret@bucket/x", *more, "--json")
    assert (done.status, done.error["slug"]) == (2, "usage")
    assert "secret" not in done.out + done.err
    done = run(command, "s3://no-such-bucket/x", *more, "--json")
    assert (done.status, done.error["what"]) == (3, "s3://no-such-bucket/x: the bucket does not exist")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    done = run(command, url, *more, "--json")
    assert (done.status, done.error["what"]) == (3, f"{url}: access is denied")


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
@pytest.mark.parametrize("password", ["secret", "a/secret+", "#secret"])
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
