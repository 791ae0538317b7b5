"""Rounding and finite flags without torch equal torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from latentcache.fields.dtypes import as_floats, is_finite, stored

ANY_FLOATS = hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(width=32))


@given(ANY_FLOATS)
def test_bfloat16_equals_torch(values):
    expected = torch.from_numpy(values).to(torch.bfloat16)
    ours = as_floats(stored(values, "bfloat16"))
    np.testing.assert_array_equal(ours, expected.float().numpy())


@given(hnp.arrays(np.uint16, 50))
def test_bfloat16_round_trips(bits):
    back = stored(as_floats(bits), "bfloat16")
    numbers = ~np.isnan(as_floats(bits))
    np.testing.assert_array_equal(back[numbers], bits[numbers])
    assert np.isnan(as_floats(back[~numbers])).all()


@pytest.mark.parametrize(
    ("storage", "limit"), [("float16", 65520.0), ("bfloat16", 3.3962e38), ("float32", float("inf"))]
)
def test_overflow_is_not_finite(storage, limit):
    values = stored(np.float32([1, limit, np.nan, -limit]), storage)
    assert [is_finite(values[n : n + 1], storage) for n in range(4)] == [True, False, False, False]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_pattern_of_16_bits_is_distinguished(dtype):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    values = patterns.view(np.float16) if dtype == "float16" else as_floats(patterns)
    assert is_finite(patterns[np.isfinite(values)], dtype)
    assert not any(is_finite(pattern, dtype) for pattern in patterns[~np.isfinite(values)].reshape(-1, 1))
