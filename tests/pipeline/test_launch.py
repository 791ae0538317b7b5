import os
import signal
import threading
import time
from pathlib import Path

import pytest
from small_builds import within

from latentcache import failpoint
from latentcache.pipeline.board import DECODING, FIRST_DECODER, Board
from latentcache.pipeline.launch import Hand, WorkerProcess, WorkerThread
from latentcache.pipeline.watch import Watch


def next_of(line):
    while not (found := line.arrived()):
        assert not line.ended
        time.sleep(0.005)
    return found[0]


def environment_of(process):
    while not (found := Path(f"/proc/{process.pid}/environ").read_bytes()):
        time.sleep(0.005)  # for a moment of its start a process has none
    return found.split(b"\0")


def ended(launched):
    def wait():
        while not launched.line.ended:
            launched.line.arrived()
            time.sleep(0.005)
        launched.line.close()
        return launched.ended()

    return within(20, wait)


def test_a_process_answers_before_it_has_a_job_and_ends_with_its_build():
    process = WorkerProcess({}, lock=None)
    process.line.send("can-resample")
    assert within(60, lambda: next_of(process.line))["kind"] == "found"
    process.line.close()
    assert within(20, process.ended) == (0, "ended with status 0")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_how_a_process_ended_is_told(number):
    process = WorkerProcess({}, lock=None)
    os.kill(process.pid, number)
    assert ended(process) == (number, f"was ended by {number.name}")


def test_signals_to_the_group_are_left_to_the_build():
    process = WorkerProcess({}, lock=None)
    process.line.send("can-resample")
    within(60, lambda: next_of(process.line))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    process.line.send("can-resample")
    assert within(20, lambda: next_of(process.line))["kind"] == "found"
    process.kill()
    assert ended(process)[0] == signal.SIGKILL


def test_it_is_in_the_group_of_the_build_and_sees_its_own_variables(tmp_path):
    process = WorkerProcess({"CUDA_VISIBLE_DEVICES": "3"}, lock=None)
    assert os.getpgid(process.pid) == os.getpgid(0)
    assert b"CUDA_VISIBLE_DEVICES=3" in environment_of(process)
    process.kill()
    ended(process)


@pytest.mark.parametrize(("armed", "again"), [("encoding:1:die", ""), ("encoding@a*:1:die", "encoding@a*:1:die")])
def test_only_a_failpoint_of_a_picture_outlives_its_worker(monkeypatch, armed, again):
    monkeypatch.setenv(failpoint.VARIABLE, armed)
    process = WorkerProcess({}, lock=None, again=True)
    assert f"{failpoint.VARIABLE}={again}".encode() in environment_of(process)
    process.kill()
    ended(process)


def test_a_thread_ends_when_the_build_hangs_up():
    worker = WorkerThread()
    worker.line.send("can-resample")
    assert within(60, lambda: next_of(worker.line))["kind"] == "found"
    worker.line.close()
    assert worker.watched(2) is None
    before = threading.active_count()
    within(10, lambda: worker._thread.join())
    assert threading.active_count() <= before


class Killed:
    def __init__(self):
        self.kills = 0

    def kill(self):
        self.kills += 1


def test_a_hand_that_does_not_move_is_given_up_once_and_its_step_is_remembered():
    board, launched = Board(2), Killed()
    hand = Hand(launched=launched, shard="x", board=board, watch=Watch(1.0, on_cpu=True))
    with board.doing(FIRST_DECODER + 1, DECODING, (9,)):
        for _ in range(8):
            board.beat()
            hand.look(0.5)
    assert launched.kills == 1
    assert "has not moved" in hand.stuck
    assert [step.items for step in hand.was_doing()] == [(9,)]
