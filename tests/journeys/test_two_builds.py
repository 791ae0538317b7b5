"""One builder per cache: a second one is told at once who holds it, and the first goes on."""

import os
import signal

from commands import acknowledged, build, draw_folder, entries, finished, start_build, wait_for, wait_until_stopped


def test_a_second_build_is_told_who_holds_the_cache_and_the_first_goes_on(tmp_path):
    data, cache, events = draw_folder(tmp_path / "data", 16), tmp_path / "cache", tmp_path / "events"
    first = start_build(data, cache, delay_ms=100, events=events)
    wait_for(lambda: (cache / "BUILDING").exists(), first)
    first.send_signal(signal.SIGSTOP)  # a second build that waits for the first now waits for ever
    second = build(data, cache)
    first.send_signal(signal.SIGCONT)
    error = second.json["error"]
    assert (second.code, error["slug"], error["holder"]["pid"]) == (3, "locked", first.pid)
    assert error["holder"]["host"] == os.uname().nodename
    assert str(first.pid) in second.talk
    done = finished(first)
    assert (done.code, done.json["counts"]["encoded"]) == (0, 16)
    assert len(acknowledged(events)) == len(entries(cache)) == 16


def test_a_second_build_is_told_also_while_the_first_is_planning(tmp_path):
    data, cache = draw_folder(tmp_path / "data", 2), tmp_path / "cache"
    first = start_build(data, cache, delay_ms=60_000)
    wait_for((cache / "builder.lock").exists, first)
    second = build(data, cache)
    first.kill()
    finished(first)
    assert (second.code, second.json["error"]["slug"]) == (3, "locked")


def test_of_two_builds_at_the_same_instant_one_wins_and_one_is_told(tmp_path):
    data, cache = draw_folder(tmp_path / "data", 8), tmp_path / "cache"
    both = [start_build(data, cache, armed="before-put:1:stop") for _ in range(2)]
    wait_for(lambda: any(process.poll() is not None for process in both))
    first = next(process for process in both if process.poll() is None)
    wait_until_stopped(first)  # at its first commit
    first.send_signal(signal.SIGCONT)
    loser, winner = sorted((finished(process) for process in both), key=lambda done: -done.code)
    assert (winner.code, loser.code) == (0, 3)
    assert loser.json["error"]["slug"] == "locked"
    assert winner.json["counts"]["encoded"] == len(entries(cache)) == 8


def test_the_lock_of_a_killed_build_is_no_lock(tmp_path):
    data, cache = draw_folder(tmp_path / "data", 4), tmp_path / "cache"
    first = start_build(data, cache, delay_ms=2000)
    wait_for((cache / "builder.lock").exists, first)
    first.kill()
    finished(first)
    assert (cache / "builder.lock").exists()
    assert build(data, cache).json["counts"]["encoded"] == 4
