import os
import signal

import pytest

from latentcache.errors import InterruptedBuildError
from latentcache.pipeline.interrupt import StopSignal


def test_a_second_signal_ends_the_grace_period():
    with StopSignal() as stop:
        stop.orderly = True
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.requested, stop.error().exit_code) == (True, 130)
        assert stop.patience_s > 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.patience_s, stop.error().exit_code) == (0.0, 143)


def test_a_deferred_block_ends_before_the_error():
    done = []

    def work(stop):
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(1)

    with StopSignal() as stop, pytest.raises(InterruptedBuildError):
        work(stop)
    assert done == [1]
