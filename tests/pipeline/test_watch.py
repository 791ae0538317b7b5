import pytest

from latentcache.errors import UsageError
from latentcache.pipeline.board import DECODING, DEVICE, ENCODING, FIRST_DECODER, OPENING, Doing
from latentcache.pipeline.watch import DEADLINE_S, VARIABLE, Watch, deadline_s


def step(number=1, stage=DECODING, slot=FIRST_DECODER, items=(5,)):
    return Doing(slot=slot, stage=stage, step=number, items=items)


def seconds_until_stuck(watch, look, limit=5000, every=0.5):
    """How long a worker is watched before it is given up; ``look`` gives beats and steps for each look."""
    for number in range(limit):
        if watch.stuck(*look(number), every):
            return number * every
    return None


def test_a_step_that_does_not_end_is_found_while_the_heart_beats():
    watch = Watch(10, on_cpu=True)
    assert seconds_until_stuck(watch, lambda n: (n, [step()])) == 10.5
    assert watch.late([step(), step(slot=FIRST_DECODER + 1)]) == [step()]


def test_steps_that_follow_each_other_are_fine_for_ever():
    assert seconds_until_stuck(Watch(2, on_cpu=True), lambda n: (n, [step(n)])) is None


def test_a_process_that_was_stopped_shows_no_sign_of_life():
    watch = Watch(3, on_cpu=True)
    assert seconds_until_stuck(watch, lambda n: (1 + min(n, 10), [step(n)])) == pytest.approx(10 * 0.5 + 3.5)
    assert "sign of life" in watch.stuck(11, [], 0.5)


def test_a_process_that_is_being_started_has_more_time():
    assert seconds_until_stuck(Watch(3, on_cpu=True), lambda n: (0, [])) == pytest.approx(30.5)


def test_doing_nothing_is_no_crime():
    assert seconds_until_stuck(Watch(2, on_cpu=True), lambda n: (n, [])) is None


@pytest.mark.parametrize(
    ("stage", "items", "on_cpu", "expected"),
    [
        (OPENING, (), True, 100.0),
        (ENCODING, tuple(range(4)), True, 40.0),
        (ENCODING, tuple(range(16)), False, 30.0),
        (DECODING, (1,), False, 10.0),
    ],
)
def test_each_stage_has_its_time(stage, items, on_cpu, expected):
    slot = FIRST_DECODER if stage == DECODING else DEVICE
    look = [step(1, stage, slot, items)]
    assert seconds_until_stuck(Watch(10, on_cpu=on_cpu), lambda n: (n, look)) == expected + 0.5


def test_a_build_that_was_asleep_accuses_nobody():
    watch = Watch(10, on_cpu=True)
    watch.stuck(1, [step()], 0.1)
    assert watch.stuck(1, [step()], 3600.0) == ""


def test_the_deadline_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert deadline_s() == DEADLINE_S
    monkeypatch.setenv(VARIABLE, "2.5")
    assert deadline_s() == 2.5


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_deadline_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match="no number of seconds"):
        deadline_s()
