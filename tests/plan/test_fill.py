"""Rows that only fill: as many as are missing, none that counts twice, and no rank that has nothing but them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.errors import PlanError, UsageError
from latentcache.geometry.sizes import Size
from latentcache.plan.batches import BatchPlan, plan_report
from latentcache.plan.cursor import Cursor, Leg, rest_of_epoch, walked
from latentcache.plan.epoch import plan_epoch, uneven
from latentcache.plan.fill import entries_of, filled, filling, named, only_fills, real, refuse_mask
from latentcache.plan.weights import mixture

SIZES = [Size(1, 8), Size(1, 16), Size(1, 32)]
masks = st.builds(
    BatchPlan, batch_size=st.integers(1, 6), world_size=st.integers(1, 5), small_buckets=st.just("mask")
)
buckets = st.lists(st.integers(0, 2), min_size=1, max_size=90).map(lambda some: np.array(some, dtype=np.int32))


def test_a_row_that_fills_is_the_entry_below_zero():
    rows = np.array([3, ~3, 0, ~0], dtype=np.int32)
    assert only_fills(rows).tolist() == [False, True, False, True]
    assert entries_of(rows).tolist() == [3, 3, 0, 0]
    assert real(rows).tolist() == [3, 0]
    assert filling(filling(rows)).tolist() == rows.tolist()
    assert named(rows, np.array([10, 11, 12, 13])).tolist() == [13, ~13, 10, ~10]


@given(buckets, masks, st.integers(0, 9), st.integers(0, 9))
def test_every_entry_counts_once_and_every_rank_has_as_many_full_batches(bucket, batches, seed, epoch):
    report = plan_report(bucket, SIZES, batches)
    plan = plan_epoch(bucket, report, seed=seed, epoch=epoch)
    assert sorted(real(plan.rows).tolist()) == list(range(len(bucket)))
    assert len(plan) == report.steps == sum(-(-n // batches.global_batch_size) for n in np.bincount(bucket) if n)
    assert int(only_fills(plan.rows).sum()) == report.rows_masked
    assert (report.samples_repeated, report.samples_dropped, report.samples_used) == (0, 0, len(bucket))
    blank = 0
    for step in range(len(plan)):
        shares = [plan.batch(step, rank) for rank in range(batches.world_size)]
        assert {len(share) for share in shares} == {batches.batch_size}
        assert len({int(bucket[row]) for share in shares for row in entries_of(share)}) == 1
        assert any(len(real(share)) for share in shares)
        blank += sum(not len(real(share)) for share in shares)
    assert blank == report.blank_batches
    assert [part.size for part in uneven(plan, np.ones(len(bucket)))] == [0, 0]


@given(buckets, masks)
def test_no_batch_is_blank_where_there_are_as_many_rows_as_ranks(bucket, batches):
    report = plan_report(bucket, SIZES, batches)
    counts = np.bincount(bucket, minlength=3)
    enough = all(n == 0 or n >= batches.world_size for n in counts)
    if batches.batch_size > 1 and enough:
        assert report.blank_batches == 0
    if batches.world_size == 1:
        assert report.blank_batches == 0


@given(buckets, masks)
def test_the_rows_of_a_step_are_shared_evenly(bucket, batches):
    plan = plan_epoch(bucket, plan_report(bucket, SIZES, batches), seed=0, epoch=0)
    for step in range(len(plan)):
        counts = [len(real(plan.batch(step, rank))) for rank in range(batches.world_size)]
        assert max(counts) - min(counts) <= 1


def test_the_step_before_gives_up_rows_for_ranks_that_would_have_none():
    four = BatchPlan(batch_size=3, world_size=4, small_buckets="mask")
    rows = filled(np.arange(13), 24, four)
    shares = [[len(real(share)) for share in step.reshape(4, 3)] for step in rows.reshape(2, 12)]
    assert shares == [[3, 2, 2, 2], [1, 1, 1, 1]]
    assert filled(np.arange(5), 8, BatchPlan(batch_size=1, world_size=4, small_buckets="mask")).tolist() == [
        0, 1, 2, 3, 4, ~0, ~1, ~2,
    ]  # fmt: skip
    assert filled(np.arange(3), 5, BatchPlan(batch_size=5)).tolist() == [0, 1, 2, 0, 1]
    one_each = BatchPlan(batch_size=1, world_size=4, small_buckets="mask")
    assert plan_report(np.zeros(5, int), SIZES, one_each).blank_batches == 3  # it would only move them


@settings(max_examples=60)
@given(buckets, masks, masks, st.integers(0, 99), st.data())
def test_an_epoch_that_goes_on_with_other_sizes_serves_each_entry_once(bucket, first, then, seed, data):
    whole = plan_epoch(bucket, plan_report(bucket, SIZES, first), seed=seed, epoch=2)
    done = data.draw(st.integers(0, len(whole)))
    leg = Leg(batch_size=first.batch_size, world_size=first.world_size, steps=done)
    cursor = Cursor(seed=seed, epoch=2, small_buckets="mask", legs=(leg,))
    rest = rest_of_epoch(bucket, SIZES, cursor, then)
    served = walked(bucket, SIZES, cursor, then).served
    assert sorted([*real(served).tolist(), *real(rest.rows).tolist()]) == list(range(len(bucket)))


def test_weights_fill_the_last_step_with_what_does_not_count():
    bucket, mix = np.zeros(12, dtype=np.int32), mixture([9, 3], [2, 1], samples=10)
    report = plan_report(bucket, SIZES, BatchPlan(batch_size=4, small_buckets="mask"), mix)
    assert (report.steps, report.rows_masked, report.samples_used) == (3, 2, 10)
    for epoch in range(3):
        plan = plan_epoch(bucket, report, seed=0, epoch=epoch)
        own = real(plan.rows)
        assert ((own < 9).sum(), (own >= 9).sum(), len(plan.rows)) == (7, 3, 12)
    two = np.array([0, 1] * 6, dtype=np.int32)
    with pytest.raises(PlanError, match="does not divide"):
        plan_report(two, SIZES, BatchPlan(batch_size=4, small_buckets="mask"), mix)


def test_what_has_no_labels_has_no_such_rows():
    refuse_mask(BatchPlan(batch_size=1))
    with pytest.raises(UsageError, match="mask"):
        refuse_mask(BatchPlan(batch_size=1, small_buckets="mask"))
