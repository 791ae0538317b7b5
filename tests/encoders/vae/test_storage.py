"""Rounding and finite flags without torch, held against torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from latentcache.encoders.vae.storage import from_bfloat16, stored, to_bfloat16

ANY_FLOATS = hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(width=32))


@given(ANY_FLOATS)
def test_bfloat16_is_torchs(values):
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    ours = from_bfloat16(to_bfloat16(values))
    np.testing.assert_array_equal(ours, theirs.float().numpy())


@given(hnp.arrays(np.uint16, 50))
def test_bfloat16_comes_back(bits):
    back = to_bfloat16(from_bfloat16(bits))
    numbers = ~np.isnan(from_bfloat16(bits))
    np.testing.assert_array_equal(back[numbers], bits[numbers])
    assert np.isnan(from_bfloat16(back[~numbers])).all()


@pytest.mark.parametrize(
    ("storage", "limit"), [("float16", 65520.0), ("bfloat16", 3.3962e38), ("float32", float("inf"))]
)
def test_overflow_is_counted_per_item(storage, limit):
    values = np.ones((3, 1, 2, 2), np.float32)
    values[1, 0, 1, 0] = limit
    assert stored(values, storage).finite.tolist() == [True, False, True]
    values[1, 0, 1, 0] = np.nan
    assert stored(values, storage).finite.tolist() == [True, False, True]
