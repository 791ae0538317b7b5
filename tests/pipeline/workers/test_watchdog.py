import pytest

from latentcache.errors import UsageError
from latentcache.pipeline.workers.watchdog import (
    ENCODING,
    IDLE,
    OPENING,
    PREPARING,
    VARIABLE,
    Beat,
    Step,
    Watchdog,
    deadline_s,
)

HANGING = Step(1, PREPARING, (5,))


def seconds_until_stuck(watch, reports, limit=5000, every=0.5):
    """Return the seconds until a worker is given up; ``reports`` gives what it reports before each look."""
    for number in range(limit):
        for report in reports(number):
            watch.report(report)
        if watch.stuck(every):
            return (number + 1) * every
    return None


def test_a_hanging_step_is_found_despite_heartbeats():
    watch = Watchdog(10, on_cpu=True)
    watch.report(HANGING)
    assert seconds_until_stuck(watch, lambda n: [Beat()]) == 10.5
    assert watch.begun == {5: PREPARING}


def test_short_steps_never_time_out():
    watch = Watchdog(2, on_cpu=True)
    assert seconds_until_stuck(watch, lambda n: [Beat(), HANGING]) is None
    watch.report(Step(1, IDLE))
    assert watch.begun == {}


def test_a_stopped_process_has_no_heartbeat():
    watch = Watchdog(3, on_cpu=True)
    assert seconds_until_stuck(watch, lambda n: [Beat()] if n < 10 else []) == pytest.approx(10 * 0.5 + 3.5)
    assert "sign of life" in watch.stuck(0.5)


def test_a_process_that_is_being_started_has_more_time():
    assert seconds_until_stuck(Watchdog(3, on_cpu=True), lambda n: []) == pytest.approx(31)


@pytest.mark.parametrize(
    ("stage", "jobs", "on_cpu", "expected"),
    [
        (OPENING, (), True, 100.0),
        (ENCODING, tuple(range(4)), True, 40.0),
        (ENCODING, tuple(range(16)), False, 30.0),
        (PREPARING, (1,), False, 10.0),
    ],
)
def test_each_stage_has_its_deadline(stage, jobs, on_cpu, expected):
    watch = Watchdog(10, on_cpu=on_cpu)
    watch.report(Step(0, stage, jobs))
    assert seconds_until_stuck(watch, lambda n: [Beat()]) == expected + 0.5


def test_a_suspended_build_blames_no_worker():
    watch = Watchdog(10, on_cpu=True)
    watch.report(HANGING)
    assert watch.stuck(3600.0) == ""


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_wrong_deadline_is_an_error(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match="not a positive number"):
        deadline_s()
