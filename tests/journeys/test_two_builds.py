"""One builder per cache; a killed one leaves no lock, and a cache that says that it is not complete."""

import signal

from commands import (
    acknowledged,
    build,
    draw_folder,
    entries,
    finished,
    look,
    start_build,
    wait_for,
    wait_until_stopped,
)


def test_of_two_builds_at_the_same_instant_one_wins_and_one_is_told(tmp_path):
    data, cache = draw_folder(tmp_path / "data", 8), tmp_path / "cache"
    both = [start_build(data, cache, armed="before-put:1:stop") for _ in range(2)]
    wait_for(lambda: any(process.poll() is not None for process in both))
    first = next(process for process in both if process.poll() is None)
    wait_until_stopped(first)  # at its first commit
    first.send_signal(signal.SIGCONT)
    loser, winner = sorted((finished(process) for process in both), key=lambda done: -done.status)
    assert (winner.status, loser.status) == (0, 3)
    assert loser.json["error"]["slug"] == "locked"
    assert winner.json["counts"]["encoded"] == len(entries(cache)) == 8


def test_a_killed_build_leaves_no_lock_and_says_that_it_is_not_complete(tmp_path):
    data, cache, events = draw_folder(tmp_path / "data", 30), tmp_path / "cache", tmp_path / "events"
    process = start_build(data, cache, events=events, armed="before-put:3:hang")
    wait_for(lambda: len(acknowledged(events)) == 2, process)
    process.kill()
    finished(process)
    assert (cache / "builder.lock").exists()
    told = look("info", cache, "--json").json
    assert (told["complete"], told["snapshot"], told["counts"]["samples"]) == (False, 0, 30)
    assert told["counts"]["entries"] >= 2
    unfinished = look("verify", cache, "--json")
    assert (unfinished.status, unfinished.json["error"]["slug"]) == (3, "cache-unfinished")
    assert build(data, cache, events=events).json["counts"]["encoded"] == 30 - told["counts"]["entries"]
