import sys

import pytest
from bench_startup import BARE, commands, measure, small_cache


def test_every_command_runs_in_every_round():
    quick = {BARE: [sys.executable, "-c", "pass"], "slow": [sys.executable, "-c", "import time; time.sleep(0.1)"]}
    times = measure(quick, rounds=2)
    assert [len(values) for values in times.values()] == [2, 2]
    assert min(times["slow"]) >= 0.1


@pytest.mark.slow
def test_what_is_compared_succeeds(tmp_path):
    times = measure(commands(small_cache(tmp_path, count=3)), rounds=1)
    assert all(values for values in times.values())
