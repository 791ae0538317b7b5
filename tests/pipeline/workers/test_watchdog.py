import os

import pytest

from latentcache.errors import UsageError
from latentcache.pipeline.workers.watchdog import (
    ENCODER,
    ENCODING,
    FIRST_PREPARER,
    OPENING,
    PREPARING,
    VARIABLE,
    Activity,
    ActivityBoard,
    Watchdog,
    anonymous_file,
    deadline_s,
)


def step(number=1, stage=PREPARING, slot=FIRST_PREPARER, items=(5,)):
    return Activity(slot, number, stage, items)


def seconds_until_stuck(watch, look, limit=5000, every=0.5):
    """Return the seconds until a worker is given up; ``look`` returns beats and steps."""
    for number in range(limit):
        if watch.stuck(*look(number), every):
            return number * every
    return None


def test_a_hanging_step_is_found_despite_heartbeats():
    watch = Watchdog(10, on_cpu=True)
    assert seconds_until_stuck(watch, lambda n: (n, [step()])) == 10.5


def test_short_steps_never_time_out():
    assert seconds_until_stuck(Watchdog(2, on_cpu=True), lambda n: (n, [step(n)])) is None


def test_a_stopped_process_has_no_heartbeat():
    watch = Watchdog(3, on_cpu=True)
    assert seconds_until_stuck(watch, lambda n: (1 + min(n, 10), [step(n)])) == pytest.approx(10 * 0.5 + 3.5)
    assert "sign of life" in watch.stuck(11, [], 0.5)


def test_a_process_that_is_being_started_has_more_time():
    assert seconds_until_stuck(Watchdog(3, on_cpu=True), lambda n: (0, [])) == pytest.approx(30.5)


@pytest.mark.parametrize(
    ("stage", "items", "on_cpu", "expected"),
    [
        (OPENING, (), True, 100.0),
        (ENCODING, tuple(range(4)), True, 40.0),
        (ENCODING, tuple(range(16)), False, 30.0),
        (PREPARING, (1,), False, 10.0),
    ],
)
def test_each_stage_has_its_deadline(stage, items, on_cpu, expected):
    slot = FIRST_PREPARER if stage == PREPARING else ENCODER
    look = [step(1, stage, slot, items)]
    assert seconds_until_stuck(Watchdog(10, on_cpu=on_cpu), lambda n: (n, look)) == expected + 0.5


def test_a_suspended_build_blames_no_worker():
    watch = Watchdog(10, on_cpu=True)
    watch.stuck(1, [step()], 0.1)
    assert watch.stuck(1, [step()], 3600.0) == ""


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_wrong_deadline_is_an_error(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match="not a positive number"):
        deadline_s()


@pytest.mark.parametrize("memfd", [True, False])
def test_two_boards_over_one_file_show_the_same(memfd, monkeypatch):
    if not memfd:
        monkeypatch.delattr(os, "memfd_create")
    file = anonymous_file()
    board, worker_board = ActivityBoard(2, file.fileno()), ActivityBoard(2, file.fileno())
    worker_board.beat()
    with worker_board.activity(ENCODER, ENCODING, [3, 4]), worker_board.activity(FIRST_PREPARER + 1, PREPARING, [5]):
        assert [(one.row, one.stage, one.items) for one in board.steps()] == [
            (0, ENCODING, (3, 4)),
            (2, PREPARING, (5,)),
        ]
    assert (board.beats, board.steps()) == (1, [])
    file.close()


def test_a_board_takes_a_batch_of_any_size():
    board = ActivityBoard(0)
    with board.activity(ENCODER, ENCODING, range(5000)):
        assert len(board.steps()[0].items) == 1024
