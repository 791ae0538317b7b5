from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import UsageError
from latentcache.plan.given_numbers import is_whole, real, several, whole

NO_NUMBERS = [None, True, False, "1", b"1", [], [1], {}, object, 1j, np.bool_(True), np.array(2), np.array([1])]
NOT_FINITE = [float("nan"), float("inf"), -float("inf"), np.float32("nan")]


@given(st.integers(-(2**70), 2**70), st.integers(-5, 5))
def test_whole_numbers(value, least):
    assert is_whole(value)
    assert is_whole(value, least) == (value >= least)
    if least <= value < 2**63:
        assert whole("n", value, least, why="counted") == value
    else:
        with pytest.raises(UsageError, match="n="):
            whole("n", value, least, why="counted")


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.uint64])
def test_those_of_numpy_are_plain(kind):
    found = whole("n", kind(7), 1, why="counted")
    assert (found, type(found)) == (7, int)
    found = real("x", kind(1), 0, 1, why="a part", fix="0.5")
    assert (found, type(found)) == (1.0, float)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, float, Fraction])
def test_numbers_count_as_they_are_written(kind):
    found = real("x", kind("0.3"), 0, 1, why="a part", fix="0.5")
    assert (found, type(found)) == (0.3, float)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number(value):
    assert not is_whole(value)
    with pytest.raises(UsageError, match="n=") as caught:
        whole("n", value, 0, why="counted")
    assert (caught.value.why, caught.value.fix) == ("counted", "n=0, or more")
    with pytest.raises(UsageError, match="x="):
        real("x", value, 0, why="a part", fix="0.5")


@pytest.mark.parametrize("value", [*NOT_FINITE, -0.1, 1.1, -1, 2], ids=repr)
def test_what_is_outside(value):
    with pytest.raises(UsageError, match="x="):
        real("x", value, 0, 1, why="a part", fix="0.5")


@pytest.mark.parametrize("values", [[1, 2], (1, 2), np.array([1, 2]), iter([1, 2]), {1: 0, 2: 0}])
def test_values_one_by_one(values):
    assert several("some", values, fix="[1]") == [1, 2]


@pytest.mark.parametrize("values", [None, 1, "12", b"12", np.array(3), np.int64(3), object], ids=repr)
def test_one_value_is_not_several(values):
    with pytest.raises(UsageError, match="some="):
        several("some", values, fix="[1]")
