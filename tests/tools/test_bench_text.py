"""The benchmark of text encoding runs with tiny models."""

import pytest
from bench_text import TINY, measure, table


def test_ratios_are_taken_round_by_round():
    assert "| P | 2.00 | 1.00 | 1.00 | 2.00 (1.00 to 4.00) |" in table(
        {"P": {"build": [1.0, 2.0, 4.0], "whole": [1.0], "loop": [1.0, 1.0, 1.0]}}
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_builds_and_loops_are_measured(tmp_path):
    times = measure(tmp_path, count=4, rounds=1, size=TINY)
    assert [len(rates["build"]) for rates in times.values()] == [1, 1, 1]
