"""Repeats, weights and the validation split: exact counts, stable sides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import UsageError
from latentcache.plan.roster import in_validation, roster, servings, shares


@given(st.integers(0, 10_000), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_sum_up_and_are_within_one_of_the_exact_part(total: int, weights: list[float]) -> None:
    counts = shares(total, weights)
    assert sum(counts) == total
    for got, weight in zip(counts, weights, strict=True):
        assert abs(got - total * weight / sum(weights)) < 1.0001


@given(st.integers(1, 50), st.integers(0, 200), st.integers(1, 30))
def test_no_sample_is_ahead_of_another_by_more_than_one(count: int, total: int, epochs: int) -> None:
    served = sum(servings(count, total, epoch) for epoch in range(epochs))
    assert int(served.sum()) == total * epochs
    assert int(served.max() - served.min()) <= 1


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0, 2.0]])
def test_weights_that_cannot_be_are_refused(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="weights"):
        shares(10, weights)


def test_the_split_does_not_move_when_data_is_added() -> None:
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, (4000, 16), dtype=np.uint8)
    side = in_validation(content, 0.1)
    assert 300 < int(side.sum()) < 500
    order = rng.permutation(6000)
    more = np.concatenate([content, rng.integers(0, 256, (2000, 16), dtype=np.uint8)])[order]
    assert (in_validation(more, 0.1)[np.argsort(order)][:4000] == side).all()


def test_a_larger_share_keeps_what_the_smaller_one_took() -> None:
    content = np.random.default_rng(1).integers(0, 256, (2000, 16), dtype=np.uint8)
    small, large = in_validation(content, 0.05), in_validation(content, 0.2)
    assert (large | ~small).all()


@pytest.mark.parametrize(("share", "expected"), [(0, False), (1, True)])
def test_the_ends_of_the_share(share: float, expected: bool) -> None:
    content = np.array([[0] * 16, [255] * 16], dtype=np.uint8)
    assert in_validation(content, share).tolist() == [expected, expected]


def test_a_share_outside_is_refused() -> None:
    with pytest.raises(UsageError, match=r"1\.5"):
        in_validation(np.zeros((1, 16), dtype=np.uint8), 1.5)


def test_the_roster_names_each_entry_as_often_as_it_is_served() -> None:
    assert roster(np.array([2, 0, 1])).tolist() == [0, 0, 2]
