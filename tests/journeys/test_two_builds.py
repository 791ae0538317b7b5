"""One builder per cache: a second one is told at once who holds it, and the first goes on."""

import signal

from commands import build, draw_folder, entries, finished, start_build, wait_for, wait_until_stopped


def test_a_second_build_is_told_also_while_the_first_is_planning(tmp_path):
    data, cache = draw_folder(tmp_path / "data", 2), tmp_path / "cache"
    first = start_build(data, cache, delay_ms=60_000)
    wait_for((cache / "builder.lock").exists, first)
    second = build(data, cache)
    first.kill()
    finished(first)
    assert (second.status, second.json["error"]["slug"]) == (3, "locked")


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
