import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import UsageError
from latentcache.plan.lengths import checked_lengths, drawn, fitting, merged_upward, row_and_length
from latentcache.plan.weights import mixture, servings

ALLOWED = (4, 8, 16, 32)
rows = st.lists(st.integers(1, 32), max_size=60).map(lambda some: np.array(some, dtype=np.int64))


@given(rows)
def test_a_row_stands_in_the_smallest_length_that_holds_it(tokens):
    for length, bucket in zip(tokens.tolist(), fitting(tokens, ALLOWED).tolist(), strict=True):
        assert ALLOWED[bucket] >= length
        assert bucket == 0 or ALLOWED[bucket - 1] < length


@given(rows, st.integers(1, 12))
def test_what_fills_no_batch_moves_up_and_nothing_is_lost(tokens, batch):
    bucket = merged_upward(tokens, ALLOWED, batch)
    assert bucket.shape == tokens.shape
    assert (bucket >= fitting(tokens, ALLOWED)).all()
    counts = np.bincount(bucket, minlength=len(ALLOWED))
    top = int(np.flatnonzero(counts)[-1]) if len(tokens) else 0
    assert top == int(fitting(tokens, ALLOWED).max(initial=0))
    assert (counts[:top] % batch == 0).all()
    assert counts[top] >= min(batch, len(tokens))
    moved = np.flatnonzero(bucket > fitting(tokens, ALLOWED))
    for row in moved.tolist():  # the longest of their length move
        stayed = tokens[(bucket < bucket[row]) & (fitting(tokens, ALLOWED) == fitting(tokens, ALLOWED)[row])]
        assert stayed.max(initial=0) <= tokens[row]


@given(
    st.lists(st.integers(1, 32), min_size=4, max_size=60), st.integers(1, 12), st.integers(2, 90), st.integers(0, 5)
)
def test_servings_of_any_epoch_fill_the_steps_of_one_length(lengths, batch, samples, epoch):
    tokens = np.array(lengths)
    mix = mixture([3, len(tokens) - 3], [1, 2], samples=samples)
    laid = drawn(tokens, ALLOWED, mix, batch, seed=7, epoch=epoch)
    rows, length = row_and_length(laid.entry, len(tokens))
    assert length.tolist() == laid.bucket.tolist()
    assert (np.array(ALLOWED)[length] >= tokens[rows]).all()
    assert [(rows < 3).sum(), (rows >= 3).sum()] == [data.samples for data in mix.datasets]
    times = servings(fitting(tokens, ALLOWED), mix, seed=7, epoch=epoch)
    assert np.bincount(rows, minlength=len(tokens)).tolist() == times.tolist()
    assert sum(-(-count // batch) for count in np.bincount(length).tolist()) == -(-samples // batch)


def test_one_length_moves_nowhere():
    assert merged_upward(np.array([3, 2, 4]), ALLOWED, 2).tolist() == [0, 0, 0]


def test_a_few_long_rows_get_company():
    tokens = np.array([3] * 8 + [30])
    bucket = merged_upward(tokens, ALLOWED, 4)
    assert np.bincount(bucket).tolist() == [4, 0, 0, 5]


@pytest.mark.parametrize("lengths", [[], [8, 4, 32], [4, 4, 32], [4, 16], [1, 32]])
def test_lengths_that_cannot_be(lengths):
    with pytest.raises(UsageError):
        checked_lengths(lengths, 32)


def test_lengths_that_can():
    assert checked_lengths(None, 32) == (32,)
    assert checked_lengths([8, 32], 32) == (8, 32)
