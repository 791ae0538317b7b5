import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import UsageError
from latentcache.plan.trainer_steps import trainer_steps

small = st.integers(1, 9)


@given(st.integers(1, 200), st.integers(0, 4), small, small, small, st.booleans())
def test_they_are_those_of_batches_dealt_out_and_accumulated(rows, epochs, batch_size, world_size, grad_accum, drop):
    full, rest = divmod(rows, batch_size)
    batches = full + bool(rest and not drop)
    dealt, left = divmod(batches, world_size)
    mine = dealt + bool(left and not drop)
    expected = epochs * max(mine // grad_accum + bool(mine % grad_accum), 1)
    words = {"batch_size": batch_size, "world_size": world_size, "grad_accum": grad_accum, "drop_last": drop}
    assert trainer_steps(rows, epochs, **words) == expected
    assert trainer_steps(rows, epochs / 2, **words) == math.ceil(expected / 2)


@pytest.mark.parametrize("words", [{"grad_accum": 0}, {"grad_accum": 1.5}, {"batch_size": 0}, {"world_size": -1}])
def test_what_cannot_be(words):
    with pytest.raises(UsageError):
        trainer_steps(10, 1, **{"batch_size": 2} | words)
    with pytest.raises(UsageError, match="epochs="):
        trainer_steps(10, -1, batch_size=2)
