import pytest
from bench_text import TINY, measure


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_builds_and_loops_are_measured(tmp_path):
    times = measure(tmp_path, count=4, rounds=1, size=TINY)
    assert [len(rates["build"]) for rates in times.values()] == [1, 1, 1]
