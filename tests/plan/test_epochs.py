"""Steps, ranks and policies of one epoch: equal on all ranks, one bucket per step."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_plans import batches_of, columns, epochs, index_of, laid_out, plans, seeds

from latentcache.errors import EmptyPlanError, PlanError, UsageError
from latentcache.plan.batching import BatchPlan, require_steps
from latentcache.plan.samples import Epochs, Position, plan_epoch, plan_report

#: 10, 5 and 3 samples of three buckets, steps of 4. The order is pinned.
GOLDEN = {
    ("repeat", 0, 0): [14, 12, 10, 13, 1, 9, 0, 8, 11, 14, 12, 10, 3, 5, 1, 9, 17, 16, 15, 17, 4, 6, 7, 2],
    ("repeat", 0, 1): [17, 15, 16, 17, 14, 13, 12, 10, 4, 0, 8, 2, 13, 12, 10, 11, 7, 9, 6, 3, 6, 3, 1, 5],
    ("repeat", 1, 0): [5, 9, 6, 1, 10, 12, 11, 14, 4, 8, 2, 0, 6, 1, 7, 3, 17, 15, 16, 17, 13, 10, 12, 11],
    ("drop", 0, 0): [1, 9, 0, 8, 14, 12, 10, 13, 4, 6, 7, 2],
    ("partial", 0, 0): [14, 12, 10, 13, 1, 9, 0, 8, 11, 14, 3, 5, 17, 16, 15, 17, 4, 6, 7, 2],
}


@given(columns, plans(), seeds, epochs)
def test_all_ranks_have_equal_steps_of_equal_size_from_one_bucket(bucket, batches, seed, epoch):
    report, plan = laid_out(index_of(bucket), batches, seed, epoch)
    assert len(plan) == report.steps
    short = Counter()
    for step in batches_of(plan):
        (length,) = {len(one.rows) for one in step}
        assert {int(number) for one in step for number in bucket[one.rows]} == {step[0].bucket}
        assert length == batches.batch_size or batches.remainder == "partial"
        short[step[0].bucket] += length < batches.batch_size
    assert all(count <= 1 for count in short.values())


@given(columns, plans(), seeds, epochs)
def test_every_sample_is_served_as_often_as_the_report_says(bucket, batches, seed, epoch):
    report, plan = laid_out(index_of(bucket), batches, seed, epoch)
    served = Counter(plan.real().tolist())
    assert served.total() == report.samples_used + report.samples_repeated
    assert len(plan.rows) == served.total() + report.rows_padded
    assert report.samples_used + report.samples_dropped == len(bucket)
    present = [number for number in range(5) if (bucket == number).any()]
    for part, number in zip(report.buckets, present, strict=True):
        times = [served[row] for row in np.flatnonzero(bucket == number).tolist()]
        assert sum(times) == part.samples - part.dropped + part.repeated
        assert times.count(0) == part.dropped
        if not part.dropped:  # repeats are spread
            assert max(times) - min(times) <= 1
    if batches.remainder == "pad":
        assert set(served.values()) <= {1}


@given(columns, plans("pad"), st.integers(0, 9))
def test_padding_rows_are_spread_over_ranks(bucket, batches, epoch):
    report, plan = laid_out(index_of(bucket), batches, epoch=epoch)
    blank = 0
    for step in batches_of(plan):
        real = [len(one.rows) if one.is_pad is None else int((~one.is_pad).sum()) for one in step]
        assert max(real) - min(real) <= 1
        assert any(real)
        blank += real.count(0)
    assert blank == report.blank_batches
    counts = np.bincount(bucket, minlength=5)
    if batches.batch_size > 1 and all(n == 0 or n >= batches.world_size for n in counts):
        assert blank == 0


@given(columns, seeds, epochs, st.sampled_from(["repeat", "drop", "pad"]))
def test_two_layouts_with_the_same_rows_per_step_have_the_same_global_batches(bucket, seed, epoch, policy):
    index = index_of(bucket)
    one, other = (
        plan_epoch(index, BatchPlan(batch_size=b, world_size=w, remainder=policy), seed=seed, epoch=epoch)
        for b, w in ((3, 2), (2, 3))
    )
    for left, right in zip(batches_of(one), batches_of(other), strict=True):
        sets = [sorted(row for part in step for row in part.rows.tolist()) for step in (left, right)]
        assert sets[0] == sets[1]
        pads = [sum(0 if part.is_pad is None else int(part.is_pad.sum()) for part in step) for step in (left, right)]
        assert pads[0] == pads[1]


@pytest.mark.parametrize(("policy", "seed", "epoch"), GOLDEN)
def test_the_order_is_pinned(policy, seed, epoch):
    """Checkpoints store positions in it, so no release may change it."""
    bucket = np.repeat([0, 1, 2], [10, 5, 3])
    _, plan = laid_out(index_of(bucket), BatchPlan(batch_size=2, world_size=2, remainder=policy), seed, epoch)
    assert plan.rows.tolist() == GOLDEN[policy, seed, epoch]


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_seed_every_epoch_has_the_order_of_the_data(world_size):
    index = index_of(np.array([1, 0, 0, 1, 0, 1, 0, 0]))
    batches = BatchPlan(batch_size=2 // world_size, world_size=world_size, remainder="partial")
    for epoch in (0, 3):
        plan = plan_epoch(index, batches, seed=None, epoch=epoch)
        assert plan.real().tolist()[:5] == [1, 2, 4, 6, 7]
        assert plan.bucket.tolist() == [0, 0, 0, 1, 1]
    epochs = Epochs(index, batches)
    state = json.loads(json.dumps(epochs.state(Position(None, delivered=1))))
    assert epochs.begin(epochs.load(state))[1].rows.tolist() == plan.rows.tolist()[2:]


def test_the_order_is_random_and_mixes_buckets():
    _, plan = laid_out(index_of(np.zeros(100_000, np.int32)), BatchPlan(batch_size=1), seed=3)
    assert abs(np.corrcoef(np.arange(len(plan.rows)), plan.rows)[0, 1]) < 0.015
    assert 0.49 < (plan.rows[1:] > plan.rows[:-1]).mean() < 0.51
    _, plan = laid_out(index_of(np.repeat([0, 1], [4000, 4000])), BatchPlan(batch_size=8))
    assert 0.4 < (plan.bucket[1:] != plan.bucket[:-1]).mean() < 0.6
    orders = {
        laid_out(index_of(np.zeros(99, np.int32)), BatchPlan(batch_size=8), seed, epoch)[1].rows.tobytes()
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


@given(columns, plans())
def test_remainder_error_rejects_incomplete_batches(bucket, batches):
    strict = BatchPlan(batch_size=batches.batch_size, world_size=batches.world_size, remainder="error")
    if any(count % (batches.batch_size * batches.world_size) for count in np.bincount(bucket)):
        with pytest.raises(PlanError, match="does not divide into full batches") as caught:
            plan_report(index_of(bucket), strict)
        assert str(caught.value).endswith("fix: remainder='repeat'|'drop'|'partial'")
    else:
        report = plan_report(index_of(bucket), strict)
        assert (report.samples_dropped, report.samples_repeated) == (0, 0)


def test_the_error_lists_buckets_and_counts():
    bucket = np.repeat([0, 1, 2], [7, 2, 5])
    with pytest.raises(EmptyPlanError) as caught:
        require_steps(plan_report(index_of(bucket), BatchPlan(batch_size=8, remainder="drop")))
    assert caught.value.where == "buckets and samples: 64x64: 7, 64x72: 2, 64x80: 5"
    assert caught.value.fix == "--remainder=repeat, or more data"
    assert str(caught.value).endswith("fix: remainder='repeat', or more data")
    assert (caught.value.slug, caught.value.exit_code) == ("plan-empty", 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": 1, "world_size": 0}, "world_size=0"),
        ({"batch_size": 1 << 25}, "in one step"),
        ({"batch_size": 1, "remainder": "skip"}, "remainder='skip': must be"),
    ],
)
def test_settings_that_are_not_allowed(settings, message):
    with pytest.raises(UsageError, match=message) as caught:
        BatchPlan(**settings)
    assert caught.value.fix
