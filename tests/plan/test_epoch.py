import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.geometry.sizes import Size
from latentcache.plan.batches import BatchPlan, plan_report
from latentcache.plan.epoch import plan_epoch, uneven

SIZES = [Size(64, 64), Size(32, 96), Size(96, 32)]
#: 10 entries of the first bucket, 5 of the second, 3 of the third, on 2 ranks of 2: the order is pinned for ever.
GOLDEN = {
    ("repeat", 0, 0): [14, 12, 10, 13, 1, 9, 0, 8, 11, 14, 12, 10, 3, 5, 1, 9, 17, 16, 15, 17, 4, 6, 7, 2],
    ("repeat", 0, 1): [17, 15, 16, 17, 14, 13, 12, 10, 4, 0, 8, 2, 13, 12, 10, 11, 7, 9, 6, 3, 6, 3, 1, 5],
    ("repeat", 1, 0): [5, 9, 6, 1, 10, 12, 11, 14, 4, 8, 2, 0, 6, 1, 7, 3, 17, 15, 16, 17, 13, 10, 12, 11],
    ("drop", 0, 0): [1, 9, 0, 8, 14, 12, 10, 13, 4, 6, 7, 2],
    ("partial", 0, 0): [14, 12, 10, 13, 1, 9, 0, 8, 11, 14, 3, 5, 17, 16, 15, 17, 4, 6, 7, 2],
}

buckets_made = st.lists(st.integers(0, 4), max_size=150).map(lambda numbers: np.array(numbers, dtype=np.int32))
plans = st.builds(
    BatchPlan,
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5),
    small_buckets=st.sampled_from(["repeat", "drop", "partial"]),
)
seeds = st.integers(-(2**63), 2**64)
epochs = st.integers(0, 10**9)


def laid_out(bucket, batches, seed=0, epoch=0):
    sizes = [Size(64, 64 * (number + 1)) for number in range(int(bucket.max(initial=-1)) + 1)]
    report = plan_report(bucket, sizes, batches)
    return report, plan_epoch(bucket, report, seed=seed, epoch=epoch)


@given(buckets_made, plans, seeds, epochs)
def test_all_ranks_have_equal_steps_of_equal_size_from_one_bucket(bucket, batches, seed, epoch):
    report, plan = laid_out(bucket, batches, seed, epoch)
    assert len(plan) == report.steps
    partial_steps = Counter()
    for step in range(len(plan)):
        shares = [plan.batch(step, rank) for rank in range(batches.world_size)]
        (length,) = {len(share) for share in shares}
        assert len({int(number) for share in shares for number in bucket[share]}) == 1
        assert length == batches.batch_size or batches.small_buckets == "partial"
        assert 1 <= length <= batches.batch_size
        partial_steps[int(bucket[shares[0][0]])] += length < batches.batch_size
    assert all(count <= 1 for count in partial_steps.values())


@given(buckets_made, plans, seeds, epochs)
def test_every_sample_is_served_as_often_as_the_report_says(bucket, batches, seed, epoch):
    report, plan = laid_out(bucket, batches, seed, epoch)
    shares = [plan.batch(step, rank) for step in range(len(plan)) for rank in range(batches.world_size)]
    served = Counter(np.concatenate(shares).tolist() if shares else [])
    assert served.total() == len(plan.rows) == report.samples_used + report.samples_repeated
    assert len(served) == report.samples_used
    present = [number for number in range(5) if (bucket == number).any()]
    for part, number in zip(report.buckets, present, strict=True):
        times = [served[row] for row in np.flatnonzero(bucket == number).tolist()]
        assert sum(times) == part.samples - part.dropped + part.repeated
        assert times.count(0) == part.dropped
        if not part.dropped:  # repeats are spread: nothing is served twice more often than another
            assert max(times) - min(times) <= 1


@given(buckets_made, plans, seeds, epochs)
def test_the_ranks_together_serve_the_rows_in_order(bucket, batches, seed, epoch):
    _, plan = laid_out(bucket, batches, seed, epoch)
    shares = [plan.batch(step, rank) for step in range(len(plan)) for rank in range(batches.world_size)]
    assert [row for share in shares for row in share.tolist()] == plan.rows.tolist()


@given(buckets_made, plans, seeds, epochs)
def test_the_same_inputs_give_the_same_order(bucket, batches, seed, epoch):
    first, second = (laid_out(bucket.astype(kind), batches, seed, epoch)[1] for kind in (np.int32, np.int64))
    np.testing.assert_array_equal(first.rows, second.rows)
    np.testing.assert_array_equal(first.starts, second.starts)


@pytest.mark.parametrize(("policy", "seed", "epoch"), GOLDEN)
def test_the_order_is_pinned(policy, seed, epoch):
    """No release of any library may change it: checkpoints hold positions in it."""
    bucket = np.repeat([0, 1, 2], [10, 5, 3])
    batches = BatchPlan(batch_size=2, world_size=2, small_buckets=policy)
    plan = plan_epoch(bucket, plan_report(bucket, SIZES, batches), seed=seed, epoch=epoch)
    assert plan.rows.tolist() == GOLDEN[policy, seed, epoch]
    assert plan.starts.tolist() == sorted(plan.starts.tolist())


def test_the_order_of_a_hundred_thousand_is_pinned():
    bucket = np.zeros(100_000, dtype=np.int32)
    _, plan = laid_out(bucket, BatchPlan(batch_size=8), seed=42, epoch=7)
    assert plan.rows[:8].tolist() == [40966, 90295, 65896, 90620, 55910, 55459, 343, 43544]
    digest = hashlib.sha256(plan.rows.astype("<i4").tobytes()).hexdigest()
    assert digest[:16] == "b1128575ce61dad3"


@pytest.mark.parametrize(("seed", "epoch", "first"), [
    (2**63 + 5, 2**40, [95624, 52468, 32475, 40751, 91507, 39524]),
    (-1, 0, [76745, 75226, 68673, 76410, 18354, 91407]),
])  # fmt: skip
def test_the_order_of_extreme_seeds_is_pinned(seed, epoch, first):
    _, plan = laid_out(np.zeros(100_000, dtype=np.int32), BatchPlan(batch_size=8), seed=seed, epoch=epoch)
    assert plan.rows[:6].tolist() == first


def test_epochs_and_seeds_have_orders_of_their_own():
    bucket = np.zeros(1000, dtype=np.int32)
    orders = [laid_out(bucket, BatchPlan(batch_size=8), seed, epoch)[1] for seed in range(6) for epoch in range(6)]
    assert len({order.rows.tobytes() for order in orders}) == 36
    for order in orders:  # and none is nearly another: about one entry in a thousand stays in its place
        assert sum(int((order.rows == other.rows).sum()) > 8 for other in orders) == 1


def test_an_order_looks_like_chance():
    bucket = np.zeros(100_000, dtype=np.int32)
    _, plan = laid_out(bucket, BatchPlan(batch_size=1), seed=3)
    positions = np.arange(len(plan.rows))
    assert abs(np.corrcoef(positions, plan.rows)[0, 1]) < 0.015
    assert abs(np.corrcoef(plan.rows[:-1], plan.rows[1:])[0, 1]) < 0.015
    assert 0.49 < (plan.rows[1:] > plan.rows[:-1]).mean() < 0.51


def test_buckets_are_mixed_over_the_epoch():
    bucket = np.repeat([0, 1], [4000, 4000]).astype(np.int32)
    _, plan = laid_out(bucket, BatchPlan(batch_size=8))
    firsts = np.array([int(bucket[plan.batch(step)[0]]) for step in range(len(plan))])
    assert 0.4 < (firsts[1:] != firsts[:-1]).mean() < 0.6


def test_every_epoch_repeats_other_samples():
    bucket = np.zeros(17, dtype=np.int32)
    repeated = set()
    for epoch in range(40):
        _, plan = laid_out(bucket, BatchPlan(batch_size=8), epoch=epoch)
        repeated |= {row for row, times in Counter(plan.rows.tolist()).items() if times > 1}
    assert repeated == set(range(17))


@pytest.mark.parametrize("policy", ["repeat", "drop", "partial"])
def test_a_million_samples_in_skewed_buckets_are_laid_out_as_the_policy_says(policy):
    """Bucket sizes fall by halves, down to a single sample; eight ranks."""
    held = np.maximum(1_000_000 >> np.arange(1, 25), 1)
    held[0] += 1_000_000 - held.sum()
    bucket = np.random.default_rng(0).permutation(np.repeat(np.arange(24), held))
    sizes = [Size(64, 64 + 8 * number) for number in range(24)]
    batches = BatchPlan(batch_size=6, world_size=8, small_buckets=policy)
    report = plan_report(bucket, sizes, batches)
    plan = plan_epoch(bucket, report, seed=7, epoch=3)
    lengths = np.diff(plan.starts)
    assert len(plan) == report.steps > 20_000
    assert (lengths % 8 == 0).all()  # equal shares of all ranks
    of_step = bucket[plan.rows[plan.starts[:-1]]]
    assert (bucket[plan.rows] == np.repeat(of_step, lengths)).all()  # one bucket, so the same one on all ranks
    steps = np.bincount(of_step, minlength=24)
    full = np.bincount(of_step[lengths == 48], minlength=24)
    times = np.bincount(plan.rows, minlength=len(bucket))
    served = np.bincount(bucket, weights=times, minlength=24).astype(int)
    if policy == "drop":
        assert steps.tolist() == full.tolist() == (held // 48).tolist()
        assert times.max() == 1
        assert served.tolist() == (held // 48 * 48).tolist()
    else:
        assert steps.tolist() == (-(-held // 48)).tolist()
        assert full.tolist() == (steps if policy == "repeat" else held // 48).tolist()
        fewest, most = (np.full(24, -1) for _ in range(2))
        for number in range(24):
            own = times[bucket == number]
            fewest[number], most[number] = own.min(), own.max()
        assert fewest.min() == 1  # none is left out
        assert (most - fewest <= 1).all()  # and none repeated before the others of its bucket
        filled = steps * 48 if policy == "repeat" else held // 48 * 48 + -(-(held % 48) // 8) * 8
        assert served.tolist() == filled.tolist()
    assert (report.samples_used + report.samples_repeated, report.samples_dropped) == (
        len(plan.rows),
        int((times == 0).sum()),
    )


def test_an_epoch_of_nothing():
    report, plan = laid_out(np.zeros(0, dtype=np.int32), BatchPlan(batch_size=4))
    assert (len(plan), len(plan.rows), report.steps) == (0, 0, 0)


def test_who_is_served_unevenly_is_named() -> None:
    column = np.array([0, 0, 0, 1])
    sizes = [Size(64, 64), Size(64, 128)]
    for policy, expected in (("repeat", (2, 0)), ("drop", (0, 2)), ("partial", (0, 0))):
        report = plan_report(column, sizes, BatchPlan(batch_size=2, small_buckets=policy))
        repeated, dropped = uneven(plan_epoch(column, report, seed=0, epoch=0), np.ones(len(column), dtype=int))
        assert (len(repeated), len(dropped)) == expected
        assert (int(repeated.size + dropped.size) == 0) == (policy == "partial")
