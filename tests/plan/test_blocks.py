"""``shuffle_block``: shards shuffled, then samples within a window, with the guarantees of any other plan."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_plans import batches_of, columns, epochs, index_of, laid_out, plans, seeds

from latentcache.errors import PlanError
from latentcache.plan.batching import BatchPlan
from latentcache.plan.mixing import mixture, occurrences
from latentcache.plan.samples import Epochs, Position, plan_epoch

BATCHES = BatchPlan(batch_size=2, world_size=2, remainder="partial")


def in_shards(bucket, shuffle_block, per_shard=5):
    return index_of(bucket, shard=np.arange(len(bucket)) // per_shard, shuffle_block=shuffle_block)


@given(columns, plans(), seeds, epochs, st.integers(1, 40))
def test_steps_and_samples_are_those_of_the_report(bucket, batches, seed, epoch, size):
    report, plan = laid_out(in_shards(bucket, size), batches, seed, epoch)
    assert report == laid_out(index_of(bucket), batches, seed, epoch)[0]
    assert (len(plan), len(plan.window)) == (report.steps, report.steps)
    assert Counter(plan.real().tolist()).total() == report.samples_used + report.samples_repeated
    for step in batches_of(plan):
        assert {int(number) for one in step for number in bucket[one.rows]} == {step[0].bucket}
    assert (np.diff(plan.window) >= 0).all()


@pytest.mark.parametrize("size", [5, 10, 35])
def test_a_window_reads_few_shards_and_epochs_differ(size):
    index = in_shards(np.zeros(1000, np.int32), size)
    first, second = (plan_epoch(index, BATCHES, seed=0, epoch=epoch) for epoch in (0, 1))
    for window in range(1000 // size):
        rows = np.concatenate([first.rows[first.starts[step] : first.starts[step + 1]]
                               for step in np.flatnonzero(first.window == window)])  # fmt: skip
        assert len(set((rows // 5).tolist())) <= size // 5 + 2 + 3  # a step may end in the next window
    assert sorted(first.rows.tolist()) == list(range(1000))
    assert first.rows.tolist() != second.rows.tolist()
    assert (np.diff(first.rows // 5) != 0).mean() > (0.5 if size > 5 else 0.1)


def test_buckets_take_turns_within_a_window():
    plan = plan_epoch(in_shards(np.arange(1000, dtype=np.int32) % 2, 100), BATCHES, seed=0, epoch=0)
    assert set(plan.bucket[plan.window == 3].tolist()) == {0, 1}


def test_without_a_seed_shards_are_read_in_their_order():
    plan = plan_epoch(in_shards(np.zeros(40, np.int32), 7), BATCHES, seed=None, epoch=3)
    assert plan.rows.tolist() == list(range(40))


@given(columns.filter(len), plans(), st.integers(1, 40), st.data())
def test_a_resume_goes_on_and_needs_the_same_blocks(bucket, batches, size, data):
    if batches.remainder == "drop":
        batches = BATCHES
    index = in_shards(bucket, size)
    first = Epochs(index, batches)
    whole = first.begin(Position(1))[1]
    steps = data.draw(st.integers(0, len(whole) - 1))
    state = first.state(Position(1, delivered=steps))
    rest = Epochs(index, batches).begin(Epochs(index, batches).load(state))[1]
    assert rest.rows.tolist() == whole.rows[whole.starts[steps] :].tolist()
    assert rest.window.tolist() == whole.window[steps:].tolist()
    others = [index_of(bucket), in_shards(bucket, size + 1)]
    for other in others:
        with pytest.raises(PlanError, match="another cache"):
            Epochs(other, batches).load(state)


def test_a_resume_with_other_sizes_serves_every_sample_once():
    index = in_shards(np.arange(90, dtype=np.int32) % 3, 10)
    first = Epochs(index, BATCHES)
    served = first.begin(Position(1))[1].part(0, 5).rows
    state = first.state(Position(1, delivered=5))
    other = Epochs(index, BatchPlan(batch_size=3, world_size=1, remainder="partial"))
    rest = other.begin(other.load(state))[1]
    assert sorted([*served.tolist(), *rest.rows.tolist()]) == list(range(90))


def test_weights_are_kept():
    mix = mixture(["a", "b"], [30, 10], [1, 1])
    index = index_of(np.zeros(40, np.int32), shard=np.arange(40) // 5, mixture=mix, shuffle_block=10)
    plan = plan_epoch(index, BATCHES, seed=0, epoch=2)
    times = occurrences(index.bucket, mix, seed=0, epoch=2)
    assert np.bincount(plan.real(), minlength=40).tolist() == times.tolist()
