"""Steps, ranks and policies of one epoch, for every way to size batches: equal on all ranks, one bucket per step."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_plans import BUCKETS, batches_of, columns, due, epochs, index_of, laid_out, loaders, part_of, plans, seeds

from latentcache.errors import EmptyPlanError, PlanError, UsageError
from latentcache.plan.batching import BatchPlan, Bucket, require_steps
from latentcache.plan.mixing import mixture
from latentcache.plan.samples import Epochs, Position, SampleIndex, plan_epoch, plan_report

#: 10, 5 and 3 samples of three buckets, steps of 4. The order is pinned.
GOLDEN = {
    ("repeat", 0, 0): [14, 12, 10, 13, 1, 9, 0, 8, 11, 14, 12, 10, 3, 5, 1, 9, 17, 16, 15, 17, 4, 6, 7, 2],
    ("repeat", 0, 1): [17, 15, 16, 17, 14, 13, 12, 10, 4, 0, 8, 2, 13, 12, 10, 11, 7, 9, 6, 3, 6, 3, 1, 5],
    ("repeat", 1, 0): [5, 9, 6, 1, 10, 12, 11, 14, 4, 8, 2, 0, 6, 1, 7, 3, 17, 15, 16, 17, 13, 10, 12, 11],
    ("drop", 0, 0): [1, 9, 0, 8, 14, 12, 10, 13, 4, 6, 7, 2],
    ("partial", 0, 0): [14, 12, 10, 13, 1, 9, 0, 8, 11, 14, 3, 5, 17, 16, 15, 17, 4, 6, 7, 2],
}


@given(loaders(), seeds, epochs)
def test_a_step_is_full_on_every_rank_and_has_one_bucket(loader, seed, epoch):
    index, batches = loader
    report, plan = laid_out(index, batches, seed, epoch)
    assert len(plan) == report.steps
    short = Counter()
    for step in batches_of(plan):
        (length,) = {len(batch.rows) for batch in step}
        part = part_of(index, report, np.concatenate([batch.rows for batch in step]))
        assert {batch.bucket for batch in step} == {part.number % len(BUCKETS)}
        short[part.number] += length * batches.world_size < part.size
        assert length * batches.world_size in (part.size, part.last)
        if batches.batch_size is None:
            unit, budget = batches.budget
            cost = getattr(part.bucket, unit)
            assert part.size * cost <= budget < (part.size + batches.multiple) * cost
    assert all(count <= (batches.remainder == "partial") for count in short.values())
    assert index.blocks is None or (np.diff(plan.window) >= 0).all()


@given(loaders(), seeds, st.just(0) | epochs)
def test_every_sample_is_served_as_often_as_the_report_says(loader, seed, epoch):
    index, batches = loader
    report, plan = laid_out(index, batches, seed, epoch)
    served, times = np.bincount(plan.real(), minlength=len(index.bucket)), due(index, seed, epoch)
    more, fewer = np.maximum(served - times, 0), np.maximum(times - served, 0)
    assert len(plan.rows) == served.sum() + sum(part.padded for part in report.buckets)
    assert report.samples_used + report.samples_dropped == (
        sum(source.samples for source in report.sources) or len(times)
    )
    assert batches.remainder == "drop" or not fewer.any()
    assert batches.remainder in ("repeat", "partial") or not more.any()
    if epoch and index.mixture:
        return
    assert report.samples_per_batch * len(plan) * batches.world_size == pytest.approx(served.sum())
    for part in report.buckets:
        rows = np.flatnonzero(index.apart(batches).bucket == part.number)
        assert (more[rows].sum(), fewer[rows].sum()) == (part.repeated, part.dropped)
        if not part.dropped and not index.mixture:  # repeats are spread
            assert np.ptp(served[rows]) <= 1


@given(columns, plans("pad"), st.integers(0, 9))
def test_padding_rows_are_spread_over_ranks(bucket, batches, epoch):
    report, plan = laid_out(index_of(bucket), batches, epoch=epoch)
    blank = 0
    for step in batches_of(plan):
        real = [len(batch.rows) if batch.is_pad is None else int((~batch.is_pad).sum()) for batch in step]
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
    first, second = (
        plan_epoch(index, BatchPlan(batch_size=b, world_size=w, remainder=policy), seed=seed, epoch=epoch)
        for b, w in ((3, 2), (2, 3))
    )
    for left, right in zip(batches_of(first), batches_of(second), strict=True):
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
        ({}, "the size of a batch is missing"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": 1, "world_size": 0}, "world_size=0"),
        ({"batch_size": 1 << 25}, "in one step"),
        ({"batch_size": 1, "remainder": "skip"}, "remainder='skip': must be"),
        ({"batch_size": 2, "batch_pixels": 10}, "batch_size and batch_pixels exclude each other"),
        ({"batch_pixels": 0}, "batch_pixels=0"),
        ({"batch_tokens": True}, "batch_tokens=True"),
        ({"batch_size": []}, r"batch_size=\[\]"),
        ({"batch_size": [2, 0]}, "batch_size=0"),
        ({"batch_size": [1]}, "1 values for 2 sources"),
        ({"batch_size": 2, "multiple_of": 2}, "only with a budget"),
        ({"batch_pixels": 10**9, "multiple_of": 3, "world_size": 2}, "does not divide among 2 ranks"),
        ({"batch_pixels": 10**12}, "samples in one step"),
    ],
)
def test_settings_that_are_not_allowed(settings, message):
    with pytest.raises(UsageError, match=message) as caught:
        plan_report(index_of([0, 4], parts=(("a", 1), ("b", 1))), BatchPlan(**settings))
    assert caught.value.fix


def test_the_fix_of_a_budget_that_is_too_small_mends_it():
    index = index_of([0, 1, 3])
    with pytest.raises(UsageError, match="too small for a batch of bucket") as caught:
        plan_report(index, BatchPlan(batch_pixels=100_000, world_size=2))
    assert str(caught.value).endswith("fix: batch_pixels=196608, or smaller samples")
    assert plan_report(index, BatchPlan(batch_pixels=196_608, world_size=2)).steps == 3


def test_a_budget_of_what_the_samples_lack_is_named():
    index = SampleIndex(bucket=np.zeros(3, np.int32), buckets=(Bucket(label="all"),), identify=str)
    for unit in ("pixels", "tokens"):
        with pytest.raises(UsageError, match=f"the samples have no {unit}"):
            plan_report(index, BatchPlan(**{f"batch_{unit}": 10}))


def test_sources_of_a_mixture_may_be_several_parts():
    mix = mixture(["a", "b"], [4, 2], [1, 1])
    mix = (replace(mix[0], parts=2), mix[1])
    index = index_of([0] * 6, mixture=mix, parts=(("x", 1), ("y", 3), ("b", 2)))
    report = plan_report(index, BatchPlan(batch_size=(2, 1)))
    assert [(str(bucket.bucket), bucket.steps) for bucket in report.buckets] == [
        ("64x64 of a", 2),
        ("64x64 of b", 4),
    ]
    state = Epochs(index, BatchPlan(batch_size=(2, 1))).state(Position(0, delivered=1))
    assert state["legs"] == [[[2, 1], 1, 1]]
    assert Epochs(index, BatchPlan(batch_size=(2, 1))).load(json.loads(json.dumps(state))).delivered == 1


# Windows: shards are shuffled, then the samples inside a window.

WINDOWED = BatchPlan(batch_size=2, world_size=2, remainder="partial")


def in_shards(bucket, shuffle_block, per_shard=5):
    return index_of(bucket, shard=np.arange(len(bucket)) // per_shard, shuffle_block=shuffle_block)


@pytest.mark.parametrize("size", [5, 10, 35])
def test_a_window_reads_few_shards_and_epochs_differ(size):
    index = in_shards(np.zeros(1000, np.int32), size)
    first, second = (plan_epoch(index, WINDOWED, seed=0, epoch=epoch) for epoch in (0, 1))
    for window in range(1000 // size):
        rows = np.concatenate([first.rows[first.starts[step] : first.starts[step + 1]]
                               for step in np.flatnonzero(first.window == window)])  # fmt: skip
        assert len(set((rows // 5).tolist())) <= size // 5 + 2 + 3  # a step may end in the next window
    assert sorted(first.rows.tolist()) == list(range(1000))
    assert first.rows.tolist() != second.rows.tolist()
    assert (np.diff(first.rows // 5) != 0).mean() > (0.5 if size > 5 else 0.1)


def test_buckets_take_turns_within_a_window():
    plan = plan_epoch(in_shards(np.arange(1000, dtype=np.int32) % 2, 100), WINDOWED, seed=0, epoch=0)
    assert set(plan.bucket[plan.window == 3].tolist()) == {0, 1}


def test_without_a_seed_shards_are_read_in_their_order():
    plan = plan_epoch(in_shards(np.zeros(40, np.int32), 7), WINDOWED, seed=None, epoch=3)
    assert plan.rows.tolist() == list(range(40))
