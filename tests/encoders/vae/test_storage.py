"""Rounding and finite flags without torch, held against torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from latentcache.encoders.vae.storage import encoded
from latentcache.fields.dtypes import as_floats, stored

ANY_FLOATS = hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(width=32))


@given(ANY_FLOATS)
def test_bfloat16_is_torchs(values):
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    ours = as_floats(stored(values, "bfloat16"))
    np.testing.assert_array_equal(ours, theirs.float().numpy())


@given(hnp.arrays(np.uint16, 50))
def test_bfloat16_comes_back(bits):
    back = stored(as_floats(bits), "bfloat16")
    numbers = ~np.isnan(as_floats(bits))
    np.testing.assert_array_equal(back[numbers], bits[numbers])
    assert np.isnan(as_floats(back[~numbers])).all()


@pytest.mark.parametrize(
    ("storage", "limit"), [("float16", 65520.0), ("bfloat16", 3.3962e38), ("float32", float("inf"))]
)
def test_overflow_is_counted_per_item(storage, limit):
    values = np.ones((3, 1, 2, 2), np.float32)
    values[1, 0, 1, 0] = limit
    assert encoded(values, storage).finite.tolist() == [True, False, True]
    values[1, 0, 1, 0] = np.nan
    assert encoded(values, storage).finite.tolist() == [True, False, True]
