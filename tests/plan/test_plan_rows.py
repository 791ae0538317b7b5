import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_corpora import corpus_of, documents

from latentcache.plan.rows import Left, RowPlan, accounted, begins, row_lengths, rows_of_pieces, spread


def a_plan(rows, max_length, **more):
    pieces = [length for row in rows for length in row]
    return RowPlan(
        max_length=max_length,
        ends=np.cumsum([len(row) for row in rows], dtype=np.int64),
        document=np.arange(len(pieces), dtype=np.int32),
        start=np.zeros(len(pieces), dtype=np.uint32),
        length=np.array(pieces, dtype=np.uint32),
        **more,
    )


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=20))
def test_pieces_lengths_and_fill(rows):
    plan = a_plan(rows, 40)
    assert len(plan) == len(rows)
    assert [[int(plan.length[i]) for i in plan.pieces(row)] for row in range(len(plan))] == rows
    assert row_lengths(plan).tolist() == [sum(row) for row in rows]
    assert plan.fill == (sum(map(sum, rows)) / (40 * len(rows)) if rows else 0.0)
    assert rows_of_pieces(plan).tolist() == [number for number, row in enumerate(rows) for _ in row]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=9))
def test_ranges_one_after_the_other(ranges):
    first, count = (np.array([one[part] for one in ranges], dtype=np.int64) for part in (0, 1))
    assert spread(first, count).tolist() == [n for start, number in ranges for n in range(start, start + number)]


def test_parts_begin_where_those_before_them_end():
    assert begins(np.array([2, 5, 5])).tolist() == [0, 2, 5]
    assert begins(np.array([])).tolist() == []


def test_what_is_left_out_is_counted_by_reason():
    plan = a_plan([[3]], 4, too_long=Left(tokens=7), idle=Left(tokens=2))
    assert plan.tokens_dropped == 9
    assert {reason: left.tokens for reason, left in plan.left.items()} == {
        "too_long": 7,
        "cut": 0,
        "idle": 2,
        "tail": 0,
    }


@pytest.mark.parametrize(("rows", "max_length"), [([[3], [4]], 7), ([[3, 5]], 7)], ids=["a token lost", "too long"])
def test_a_plan_that_is_not_whole_is_noticed(rows, max_length):
    corpus = corpus_of([(3, []), (5, [])])
    assert accounted(a_plan([[3, 5]], 8), corpus)
    with pytest.raises(AssertionError):
        accounted(a_plan(rows, max_length), corpus)


@given(documents())
def test_whether_everything_carries_loss(made):
    assert corpus_of(made).whole == all(runs == [(0, length)] for length, runs in made)
