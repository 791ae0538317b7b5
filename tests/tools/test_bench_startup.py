import pytest
from bench_startup import commands, measure, small_cache


@pytest.mark.slow
def test_every_startup_measure_succeeds(tmp_path):
    times = measure(commands(small_cache(tmp_path, count=3)), rounds=1)
    assert all(values for values in times.values())
