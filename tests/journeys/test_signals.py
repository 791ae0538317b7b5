"""SIGINT and SIGTERM end a build cleanly, and the same command continues."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from commands import ROOT, acknowledged, build, draw_folder, entries, finished, look, start_build, wait_for

from latentcache.store.paths import CachePaths

both = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.mark.parametrize(("number", "words"), [(signal.SIGINT, ()), (signal.SIGTERM, ("--device", "cpu*2"))])
def test_a_second_signal_ends_the_build_at_once(tmp_path, number, words):
    data, cache, events = draw_folder(tmp_path / "data", 30), tmp_path / "cache", tmp_path / "events"
    process = start_build(data, cache, *words, delay_ms=400, events=events)
    wait_for((cache / "BUILDING").exists, process)
    time.sleep(0.3)
    process.send_signal(number)
    time.sleep(0.2)
    started = time.monotonic()
    process.send_signal(number)
    done = finished(process, 10)
    assert time.monotonic() - started < 8, "30 images of 400 ms were left"
    assert done.status == 128 + number
    assert (done.json["command"], done.json["error"]["slug"]) == ("build", "interrupted")
    assert "error[interrupted]" in done.err
    assert set(acknowledged(events)) <= set(entries(cache)) if (cache / "shards").exists() else True
    assert build(data, cache).status == 0


@both
@pytest.mark.parametrize("after", [0.06, 0.4])
def test_a_signal_at_the_start_ends_the_build(tmp_path, number, after):
    """Before our first line the system ends the process; afterwards the package reports it."""
    data = draw_folder(tmp_path / "data", 30)
    process = start_build(data, tmp_path / "cache", delay_ms=300)
    time.sleep(after)
    process.send_signal(number)
    done = finished(process, 10)
    if done.out:
        assert done.status == done.json["exit_code"] == 128 + number
    else:
        assert done.status in (-number, 1)
        assert not (tmp_path / "cache").exists()


@both
def test_a_signal_during_imports_is_reported(tmp_path, number):
    """The first line of the program blocks signals before it imports the package."""
    code = (
        "import os, runpy, signal, sys\n"
        "class Now:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'latentcache.cli.app': os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Now())\n"
        "sys.argv[1:] = ['info', 'x', '--json']\n"
        "runpy.run_module('latentcache', run_name='__main__', alter_sys=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 128 + number, done.stderr
    assert json.loads(done.stdout)["error"]["slug"] == "interrupted"
    assert "Traceback" not in done.stderr


def test_a_build_whose_lock_file_was_deleted_gives_way(tmp_path):
    """Its open shard is sealed by the other build, so it commits nothing more."""
    data, cache, events = draw_folder(tmp_path / "data", 20), tmp_path / "cache", tmp_path / "events"
    process = start_build(data, cache, "--commit-every", 1, delay_ms=200, events=events)
    wait_for(lambda: acknowledged(events), process)
    (cache / "builder.lock").unlink()
    second = build(data, cache)
    assert second.status == 0, second.err
    assert second.json["counts"]["cached"], "what the first build committed is used"
    first = finished(process, 30)
    assert (first.status, first.json["error"]["slug"]) == (3, "locked"), first.err
    assert "another build has taken this cache over" in first.err
    assert not CachePaths(cache).open_shards()
    assert look("verify", cache, "--full").status == 0
    assert build(data, cache).json["counts"]["encoded"] == 0
