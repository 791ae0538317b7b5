"""Builds with worker processes that are killed, stopped and continued."""

import contextlib
import os
import random
import signal
import time

import pytest
from commands import acknowledged, build, draw_folder, entries, finished, look, start_build, undisturbed, wait_for

NUM_IMAGES = 48
TWO = ("--device", "cpu*2")


def workers_of(process):
    try:
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:  # noqa: PTH123 - of the kernel
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - of the kernel
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def check(cache, events):
    keys, there = acknowledged(events), entries(cache) if (cache / "shards").exists() else {}
    assert len(set(keys)) == len(keys)
    assert set(keys) <= set(there)
    assert None not in {checksum for checksum, _ in there.values()}


def ends_whole(data, cache, events):
    """The next build waits for old workers and continues."""
    last = build(data, cache, *TWO, events=events)
    assert last.status == 0, last.err
    keys = acknowledged(events)
    assert len(set(keys)) == len(keys)
    assert last.json["counts"]["encoded"] + last.json["counts"]["cached"] == NUM_IMAGES
    assert entries(cache) == undisturbed(NUM_IMAGES)
    assert look("verify", cache, "--full", "--json").json["counts"]["ok"] == NUM_IMAGES
    assert not [path for path in cache.rglob("*") if path.suffix in (".tmp", ".open")]


def test_workers_of_a_killed_build_keep_the_lock(tmp_path):
    data, cache, events = draw_folder(tmp_path / "data", NUM_IMAGES), tmp_path / "cache", tmp_path / "events"
    process = start_build(data, cache, *TWO, delay_ms=100, events=events)
    wait_for(lambda: len(acknowledged(events)) >= 3, process)
    workers = workers_of(process)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGSTOP)
    process.kill()
    finished(process)
    again = build(data, cache)
    os.kill(workers[0], signal.SIGKILL)
    assert (again.status, again.json["error"]["slug"]) == (3, "locked")
    assert again.json["error"]["holder"]["pid"] == process.pid
    assert "worker processes of it still run" in again.json["error"]["why"]
    ends_whole(data, cache, events)
    assert not any(map(is_running, workers))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_kills_of_builds_and_workers(tmp_path, seed):
    chance = random.Random(seed)
    data, cache, events = draw_folder(tmp_path / "data", NUM_IMAGES), tmp_path / "cache", tmp_path / "events"
    for _ in range(3):
        process = start_build(data, cache, *TWO, delay_ms=10, events=events, start_new_session=True)
        time.sleep(chance.uniform(0.3, 1.5))
        workers = workers_of(process)
        for pid in chance.sample(workers, k=len(workers) // 2):
            with contextlib.suppress(ProcessLookupError):  # it may have ended already
                os.kill(pid, chance.choice([signal.SIGKILL, signal.SIGSEGV]))
        time.sleep(chance.uniform(0.0, 0.5))
        if chance.random() < 0.7:
            chance.choice([os.kill, os.killpg])(process.pid, signal.SIGKILL)
        done = finished(process)
        assert done.status in (0, -signal.SIGKILL), done.err
        check(cache, events)
    ends_whole(data, cache, events)
