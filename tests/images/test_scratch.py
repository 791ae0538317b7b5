import numpy as np

from latentcache.pipeline.scratch import Scratch, apart, scratch_for


def test_memory_is_kept_and_grows():
    scratch = Scratch(1000)
    small = scratch.memory(100)
    assert scratch.memory(40) is small
    large = scratch.memory(1000)
    assert len(large) == 1000
    assert scratch.memory(100) is large


def test_more_than_the_limit_is_not_kept():
    scratch = Scratch(1000)
    held = scratch.memory(1000)
    assert scratch.memory(1001) is None
    assert scratch.memory(1000) is held


def test_all_threads_together_keep_a_sixteenth_of_the_budget():
    assert 3 * scratch_for(4800, 3).limit == 300
    assert scratch_for(0, 2).memory(1) is None


def test_apart():
    whole = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    own = np.ones((4, 2, 3), np.uint8)
    assert apart(own, whole) is own
    for part in (whole, whole[1:3], whole[:, :1]):
        copied = apart(part, whole)
        assert np.array_equal(copied, part)
        assert not np.may_share_memory(copied, whole)
