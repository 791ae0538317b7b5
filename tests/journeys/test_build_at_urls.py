"""Builds whose cache is at a URL."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from s3_server import entries, server, url
from small_cache import SMALL, build, cache, data, draw, run, shared

from latentcache.errors import UsageError
from latentcache.loader.cache import open_cache
from latentcache.pipeline.workers import writer
from latentcache.store.remote.bucket import Bucket
from latentcache.store.remote.transfer import pull
from latentcache.store.remote.view import local_view

__all__ = ["cache", "data", "run", "server", "shared", "url"]


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """The user's cache folder, as on a machine of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "latentcache"


def test_a_build_at_a_url_has_the_entries_of_a_local_one(url, data, cache, run, scratch):
    done = run("build", data, "--out", url, *SMALL, "--json")
    assert done.status == 0
    assert done.json["cache"] == url
    assert done.json["counts"]["encoded"] == 4
    assert entries(run, url) == entries(run, cache)
    assert run("verify", url, "--full").status == 0
    assert not list(scratch.iterdir())


def test_a_second_build_encodes_only_what_is_new(url, data, run, tmp_path):
    assert run("build", data, "--out", url, *SMALL).status == 0
    again = run("build", data, "--out", url, "--json").json
    assert (again["counts"]["encoded"], again["published"]) == (0, False)
    draw(data / "new.png", (80, 64))
    more = run("build", data, "--out", url, "--json").json
    assert (more["counts"]["encoded"], more["snapshot"]) == (1, 2)
    pull(url, tmp_path / "copy")
    assert len(open_cache(tmp_path / "copy")) == 5
    assert run("verify", tmp_path / "copy", "--full").status == 0


SLOW = ("--model", "stub:delay_ms=300", *SMALL[2:], "--batch-size", "1")


@pytest.mark.parametrize("same_machine", [True, False])
def test_what_is_acknowledged_survives_the_machine(url, data, run, tmp_path, monkeypatch, same_machine):
    """A build that is killed is gone on with; what its events name is at the URL, whichever machine goes on."""
    for number in range(12):
        draw(data / f"q{number}.png", (80, 64), seed=number)
    events = tmp_path / "events"
    code = (
        "import sys; from latentcache.pipeline.workers import writer; writer._SENT_S = 1.0\n"
        "from latentcache.cli.app import main; main(sys.argv[1:])"
    )
    words = ["build", data, "--out", url, *SLOW, "--events", events, "--commit-every", "2"]
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, words)], stderr=subprocess.DEVNULL)
    while not events.exists() or not events.read_text():
        time.sleep(0.05)
        assert process.poll() is None
    process.kill()
    process.wait()
    acknowledged = {key for line in events.read_text().splitlines() for key in json.loads(line)["keys"]}
    assert 0 < len(acknowledged) < 16
    if not same_machine:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert acknowledged <= {key for key, checksum in entries(run, url).items() if checksum}
    done = run("build", data, "--out", url, *SLOW, "--json")
    assert done.status == 0
    assert done.json["counts"]["encoded"] <= 16 - len(acknowledged)
    assert run("verify", url, "--full", "--json").json["counts"]["ok"] == 16
    assert len(entries(run, url)) == 16


def test_an_interrupted_build_acknowledges_and_goes_on(url, data, run, tmp_path):
    words = ["build", data, "--out", url, *SLOW]
    process = subprocess.Popen([sys.executable, "-m", "latentcache", *map(str, words)], stderr=subprocess.DEVNULL)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert run("build", data, "--out", url, *SLOW).status == 0
    assert run("verify", url, "--full").status == 0


def test_worker_processes_send_their_shards(url, data, cache, run):
    assert run("build", data, "--out", url, *SMALL, "--device", "cpu*2").status == 0
    assert entries(run, url) == entries(run, cache)


def test_a_shard_that_is_sent_takes_no_space_any_more(url, data, run, scratch, monkeypatch):
    """Of many shards at most two have data in the scratch folder: one is sent while the next one is written."""
    real, taken = Bucket.send, []

    def spied(self, path, key):
        num_filled = 0
        for folder, _, names in os.walk(scratch):  # not rglob: the shard that is written meanwhile may be renamed
            with contextlib.suppress(FileNotFoundError):
                num_filled += "data.mdb" in names and Path(folder, "data.mdb").stat().st_blocks > 0
        taken.append(num_filled)
        return real(self, path, key)

    monkeypatch.setattr(Bucket, "send", spied)
    monkeypatch.setattr(writer, "_SENT_BYTES", 1)
    for number in range(10):
        draw(data / f"q{number}.png", (80, 64), seed=number)
    assert run("build", data, "--out", url, *SMALL, "--commit-every", "1", "--workers", "0").status == 0
    assert len(taken) > 10
    assert max(taken) <= 2
    assert run("verify", url, "--full", "--json").json["counts"]["ok"] == 14


def test_snapshots_of_a_build_that_goes_on_are_at_the_url(url, data, run, monkeypatch):
    seen = []
    real = Bucket.write

    def spied(self, key, value, etag=""):
        if key == "CURRENT":
            seen.append(json.loads(value)["snapshot"])
        return real(self, key, value, etag)

    monkeypatch.setattr(Bucket, "write", spied)
    for number in range(30):
        draw(data / f"q{number}.png", (80, 64), seed=number)
    slow = ("--model", "stub:delay_ms=100", *SMALL[2:], "--batch-size", "1")
    assert run("build", data, "--out", url, *slow, "--publish-every", "1s").status == 0
    assert len(seen) > 1
    assert run("verify", url, "--full").status == 0


def test_of_two_builds_one_wins_and_the_other_goes_on_from_it(url, data, run, tmp_path, monkeypatch):
    assert run("build", data, "--out", url, *SMALL).status == 0
    draw(data / "a.png", (80, 64))
    real = Bucket.write

    def late(self, key, value, etag=""):
        if key != "CURRENT":
            return real(self, key, value, etag)
        monkeypatch.setattr(Bucket, "write", real)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        draw(data / "b.png", (64, 64), seed=5)
        command = [sys.executable, "-m", "latentcache", "build", data, "--out", url]
        assert subprocess.run(command, env=os.environ, check=False, capture_output=True).returncode == 0
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        return real(self, key, value, etag)

    monkeypatch.setattr(Bucket, "write", late)
    done = run("build", data, "--out", url, "--json")
    assert (done.status, done.error["slug"]) == (3, "remote")
    assert "run the same command again" in done.error["fix"]
    again = run("build", data, "--out", url, "--json")
    assert (again.status, again.json["counts"]["encoded"]) == (0, 0)
    assert run("verify", url, "--full").status == 0


def test_python_says_how_a_url_becomes_a_folder(url, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="local_view"):
        build(data, url)
    assert not (tmp_path / "s3:").exists()
    with local_view(url, scratch=tmp_path / "scratch") as out:
        assert build(data, out).encoded == 4
    with local_view(url) as folder:
        assert len(open_cache(folder).loader(batch_size=1, seed=0)) == 4
