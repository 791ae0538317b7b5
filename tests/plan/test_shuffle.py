"""Orders, splits and draws: the same inputs give the same result for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import UsageError
from latentcache.plan.shuffle import by_bucket, drawn_of_samples, in_validation, pick, shuffled

whole = st.integers(-(2**70), 2**70)


@given(st.integers(0, 300), whole, whole, st.integers(0, 5))
def test_a_shuffle_is_a_permutation(count, seed, epoch, stream):
    order = shuffled(count, seed, epoch, stream=stream)
    assert sorted(order.tolist()) == list(range(count))
    assert order.dtype == np.int32


@pytest.mark.parametrize("count", [65_537, 131_072])
def test_many_numbers_are_shuffled_evenly(count):
    """A permutation with uniform pairs of sixteenths: 255 degrees of freedom."""
    orders = [shuffled(count, seed, 0, stream=0) for seed in (1, 2)]
    for order in orders:
        assert order.dtype == np.int32
        assert (np.bincount(order, minlength=count) == 1).all()
        part = order.astype(np.int64) * 16 // count
        for pairs in (part[:-1] * 16 + part[1:], order[:-1] % 16 * 16 + order[1:] % 16):
            even = count / 256
            assert ((np.bincount(pairs, minlength=256) - even) ** 2 / even).sum() < 380
    assert (orders[0] == orders[1]).sum() < 10


def test_streams_are_independent():
    orders = [shuffled(1000, 3, 1, stream=stream) for stream in range(4)]
    assert all(int((a == b).sum()) < 9 for i, a in enumerate(orders) for b in orders[:i])


@given(st.lists(st.integers(0, 6), max_size=60), st.sampled_from([7, 1 << 16, (1 << 16) + 1]))
def test_grouping_keeps_the_order_inside_each_bucket(numbers, num_buckets):
    bucket = np.array(numbers, dtype=np.int32)
    assert by_bucket(bucket, num_buckets).tolist() == sorted(range(len(bucket)), key=lambda row: numbers[row])


def test_more_buckets_than_16_bits_are_distinguished():
    bucket = np.array([1 << 16, 0, 1], dtype=np.int32)
    assert by_bucket(bucket, (1 << 16) + 1).tolist() == [1, 2, 0]


def test_picks_are_spread_and_pinned():
    """Checkpoints depend on it, so no release may change it."""
    assert [pick(1000, seed, 7) for seed in range(3)] == [319, 666, 198]
    firsts = [pick(10, 0, row) for row in range(2000)]
    assert min(np.bincount(firsts, minlength=10)) > 140


def test_a_split_never_moves_a_sample_when_data_is_added():
    content = np.random.default_rng(0).integers(0, 256, (2000, 16), dtype=np.uint8)
    held = in_validation(content, 0.2)
    assert 330 < held.sum() < 470
    assert (in_validation(content[::-1], 0.2)[::-1] == held).all()
    assert (in_validation(content, 0.4) >= held).all()
    assert in_validation(content, 1).all()
    assert not in_validation(content, 0).any()
    with pytest.raises(UsageError, match="validation=2"):
        in_validation(content, 2)


SAMPLES = np.arange(600)


def test_name_seed_epoch_and_occurrence_change_the_draw():
    first, ones = drawn_of_samples("image", SAMPLES, (0, 0)), np.ones(len(SAMPLES), dtype=np.uint32)
    assert len(set(first.tolist())) == len(SAMPLES)
    for name, turn, occurrence in (
        ("image", (1, 0), None),
        ("image", (0, 1), None),
        ("image", (0, 0), ones),
        ("caption", (0, 0), None),
    ):
        assert not (drawn_of_samples(name, SAMPLES, turn, occurrence) == first).any()
    assert (drawn_of_samples("image", SAMPLES, (0, 0), 0 * ones) == first).all()


def test_draws_never_change():
    """xxh3-64 of name, seed, epoch and sample (8 bytes each), and the occurrence from 1 on."""
    many = drawn_of_samples("image", np.arange(12), (3, -5), np.arange(12) % 3)
    assert (many % np.uint64(8)).tolist() == [4, 5, 6, 7, 6, 0, 6, 4, 5, 3, 3, 7]
