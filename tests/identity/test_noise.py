"""Noise is normal, depends on its seed words only, and is pinned."""

import math
from statistics import NormalDist

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from latentcache.identity.noise import gaussian

#: Changed noise changes every draw of every cache.
PINNED = ["-0x1.6f1fce0000000p+0", "0x1.356dfe0000000p+0", "-0x1.15f7980000000p+0"]
PINNED += ["0x1.33a2d40000000p+1", "0x1.5ce5c60000000p-2", "0x1.0fe3be0000000p-1"]
word = st.binary(max_size=40) | st.integers(-(2**63), 2**64 - 1)


def test_the_numbers_are_pinned():
    found = gaussian(6, b"read", 7, 2, bytes(range(32)))
    assert found.dtype == np.float32
    assert [value.hex() for value in found.tolist()] == PINNED


def test_numbers_are_normally_distributed():
    numbers = gaussian(1 << 20, b"normal").astype(np.float64)
    assert abs(numbers.mean()) < 0.004
    assert abs(numbers.var() - 1) < 0.006
    assert abs((numbers**3).mean()) < 0.012
    assert abs((numbers**4).mean() - 3) < 0.04
    below = np.arange(1, len(numbers) + 1) / len(numbers)
    normal = np.array([NormalDist().cdf(value) for value in np.sort(numbers)[::1000]])
    assert np.abs(normal - below[::1000]).max() < 1.63 / math.sqrt(len(numbers))  # Kolmogorov-Smirnov at 1 %


@given(one=st.lists(word, min_size=1, max_size=4), other=st.lists(word, min_size=1, max_size=4))
def test_other_seeds_give_other_numbers(one, other):
    same = [w % 2**64 if isinstance(w, int) else w for w in one] == [
        w % 2**64 if isinstance(w, int) else w for w in other
    ]
    assert np.array_equal(gaussian(16, *one), gaussian(16, *other)) == same
