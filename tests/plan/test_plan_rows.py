import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from latentcache.plan.rows import RowPlan, row_lengths


def a_plan(rows, max_length):
    pieces = [length for row in rows for length in row]
    return RowPlan(
        max_length=max_length,
        ends=np.cumsum([len(row) for row in rows], dtype=np.int64),
        document=np.arange(len(pieces), dtype=np.int32),
        start=np.zeros(len(pieces), dtype=np.uint32),
        length=np.array(pieces, dtype=np.uint32),
        dropped=np.empty(0, dtype=np.int32),
    )


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=20))
def test_pieces_lengths_and_fill(rows):
    plan = a_plan(rows, 40)
    assert len(plan) == len(rows)
    assert [[int(plan.length[i]) for i in plan.pieces(row)] for row in range(len(plan))] == rows
    assert row_lengths(plan).tolist() == [sum(row) for row in rows]
    assert plan.fill == (sum(map(sum, rows)) / (40 * len(rows)) if rows else 0.0)
