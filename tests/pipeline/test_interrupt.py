import os
import signal
import time

import pytest

from latentcache.errors import InterruptedBuildError
from latentcache.pipeline.interrupt import StopSignal

WATCHED = (signal.SIGINT, signal.SIGTERM)
both = pytest.mark.parametrize("number", WATCHED)


def signalled(number):
    """Send a signal to this process and wait for its effect."""
    os.kill(os.getpid(), number)
    time.sleep(5)


@both
def test_while_nothing_runs_a_signal_raises_at_once(number):
    with StopSignal() as stop, pytest.raises(InterruptedBuildError) as caught:
        signalled(number)
    assert (caught.value.exit_code, caught.value.slug) == (128 + number, "interrupted")
    assert number.name in caught.value.what
    assert stop.requested


@both
def test_while_work_runs_it_only_raises_the_flag(number):
    with StopSignal() as stop:
        stop.orderly = True
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.hurry) == (True, False)
        assert stop.error().exit_code == 128 + number


def test_a_second_signal_ends_the_patience_and_never_the_process():
    told = []
    with StopSignal(told.append) as stop:
        stop.orderly = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.patience_s > 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.hurry, stop.patience_s) == (True, 0.0)
    assert [error.exit_code for error in told] == [143]


def test_a_deferred_block_ends_before_the_error():
    done = []

    def work(stop):
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(1)

    with StopSignal() as stop, pytest.raises(InterruptedBuildError):
        work(stop)
    assert done == [1]
