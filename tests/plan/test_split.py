"""The validation split: stable sides."""

from __future__ import annotations

import numpy as np
import pytest

from latentcache.errors import UsageError
from latentcache.plan.split import in_validation


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
