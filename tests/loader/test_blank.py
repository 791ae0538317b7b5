import warnings

import numpy as np
import pytest

from latentcache.loader.blank import warn_of_blank
from latentcache.plan.epoch import EpochPlan


def a_plan(rows, world_size):
    return EpochPlan(rows=np.array(rows, dtype=np.int32), starts=np.array([0, 4, 8]), world_size=world_size)


def test_a_batch_of_one_rank_that_is_all_filling_is_said():
    with pytest.warns(UserWarning, match="^1 of 4 batches of all ranks hold nothing but"):
        warn_of_blank(a_plan([0, 1, 2, 3, 4, ~0, ~1, ~2], 2), 2)


def test_nothing_is_said_where_each_has_a_row():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_blank(a_plan([0, 1, 2, 3, 4, ~0, 5, ~2], 2), 2)
        warn_of_blank(a_plan([0, 1, 2, 3, 4, ~0, ~1, ~2], 1), 4)
