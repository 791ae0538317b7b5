import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from latentcache.plan.packing import best_fit


def best_fit_one_by_one(lengths, capacity):
    """Compute row loads: each piece, longest first, goes into the fullest row with room."""
    loads = []
    for length in sorted(lengths, reverse=True):
        fits = [number for number, load in enumerate(loads) if load + length <= capacity]
        if fits:
            loads[max(fits, key=lambda number: loads[number])] += length
        else:
            loads.append(length)
    return sorted(loads)


@given(st.integers(1, 40).flatmap(lambda most: st.tuples(st.lists(st.integers(1, most), max_size=60), st.just(most))))
def test_rows_are_those_of_best_fit_decreasing(case):
    lengths, capacity = case
    order, ends = best_fit(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    rows = np.split(np.array(lengths, dtype=np.int64)[order], ends[:-1]) if len(ends) else []
    assert all(len(row) for row in rows)
    assert sorted(int(row.sum()) for row in rows) == best_fit_one_by_one(lengths, capacity)
    assert all(row.tolist() == sorted(row.tolist(), reverse=True) for row in rows)


def test_long_rows_are_packed():
    order, ends = best_fit(np.array([70_000, 30_000, 1, 100_000]), 100_000)
    assert (order.tolist(), ends.tolist()) == ([3, 0, 1, 2], [1, 3, 4])
