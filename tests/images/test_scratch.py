import numpy as np

from latentcache.images.scratch import Scratch, own_memory


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


def test_a_view_is_copied_and_other_memory_is_not():
    whole = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    own = np.ones((4, 2, 3), np.uint8)
    assert own_memory(own, whole) is own
    for part in (whole, whole[1:3], whole[:, :1]):
        copied = own_memory(part, whole)
        assert np.array_equal(copied, part)
        assert not np.may_share_memory(copied, whole)
