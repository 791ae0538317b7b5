import os
import signal
import subprocess
import sys

from latentcache.pipeline.board import DECODING, DEVICE, ENCODING, FIRST_DECODER, Board, Doing, shared_descriptor

CHILD = """
import os, signal, sys
from latentcache.pipeline.board import *
board = Board(2, int(sys.argv[1]))
board.beat()
with board.doing(DEVICE, ENCODING, range(5)):
    pass
with board.doing(DEVICE, ENCODING, (7, 8)), board.doing(FIRST_DECODER + 1, DECODING, (1 << 40,)):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_was_doing_can_be_read():
    descriptor = shared_descriptor()
    try:
        board = Board(2, descriptor)
        words = [sys.executable, "-c", CHILD, str(descriptor)]
        assert subprocess.run(words, pass_fds=[descriptor], check=False).returncode == -signal.SIGKILL
        assert board.beats == 1
        assert board.steps() == [
            Doing(slot=DEVICE, stage=ENCODING, step=2, items=(7, 8)),
            Doing(slot=FIRST_DECODER + 1, stage=DECODING, step=1, items=(1 << 40,)),
        ]
    finally:
        os.close(descriptor)


def test_a_step_that_ended_is_not_on_the_board_also_after_an_error():
    board = Board(1)
    try:
        with board.doing(FIRST_DECODER, DECODING, (3,)):
            assert [step.items for step in board.steps()] == [(3,)]
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert board.steps() == []


def test_more_samples_than_there_is_room_for_do_not_spill_over():
    board = Board(1)
    with board.doing(DEVICE, ENCODING, range(5000)):
        (step,) = board.steps()
    assert step.items == tuple(range(len(step.items)))
    assert 256 <= len(step.items) < 5000
