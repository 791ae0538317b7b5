import os
import signal
import subprocess
import sys
import time

import pytest
from small_builds import within

from latentcache.errors import InterruptedBuildError
from latentcache.pipeline.interrupt import StopSignal


def signalled(number):
    """Send a signal to this process and wait for what it does."""
    os.kill(os.getpid(), number)
    time.sleep(5)


both = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
WATCHED = (signal.SIGINT, signal.SIGTERM)


@both
def test_while_nothing_is_in_flight_a_signal_ends_the_work_at_once(number):
    with StopSignal() as stop, pytest.raises(InterruptedBuildError) as caught:
        signalled(number)
    assert caught.value.exit_code == 128 + number
    assert caught.value.slug == "interrupted"
    assert number.name in caught.value.what
    assert stop.requested


@both
def test_later_it_only_raises_the_flag(number):
    with StopSignal() as stop:
        stop.orderly = True
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.error().exit_code == 128 + number


def test_afterwards_the_handlers_are_what_they_were():
    before = [signal.getsignal(number) for number in WATCHED]
    with StopSignal() as stop:
        stop.orderly = True
        assert [signal.getsignal(number) for number in WATCHED] != before
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in WATCHED] == before


def test_outside_the_main_thread_it_only_holds_the_flag():
    before = [signal.getsignal(number) for number in WATCHED]

    def work():
        with StopSignal() as stop:
            return [signal.getsignal(number) for number in WATCHED], stop.requested

    assert within(5, work) == (before, False)


def test_asked_twice_the_process_leaves_at_once():
    code = (
        "import os, signal, time\n"
        "from latentcache.pipeline.interrupt import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    stop.orderly = True\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(20)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=15, check=False).returncode == 143
