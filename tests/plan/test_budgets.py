"""Batches by a budget of pixels or tokens, and a batch size for each source."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from made_plans import POLICIES, batches_of, columns, epochs, seeds

from latentcache.errors import PlanError, UsageError
from latentcache.plan.batching import BatchPlan, Bucket
from latentcache.plan.mixing import Mixture, mixture, occurrences
from latentcache.plan.samples import Epochs, Position, SampleIndex, plan_epoch, plan_report, rest_of_epoch

#: Frames, height and width of each bucket: up to 98,304 pixels, 7 to 24 tokens.
SIZES = [(1, 64, 64), (1, 64, 128), (1, 128, 192), (3, 128, 256), (1, 256, 256)]
TOKENS = [7, 10, 24, 16, 9]


def index_of(bucket, **more):
    pairs = zip(SIZES, TOKENS, strict=True)
    buckets = tuple(Bucket(label=str(size), size=size, tokens=tokens) for size, tokens in pairs)
    return SampleIndex(bucket=np.asarray(bucket, np.int32), buckets=buckets, identify=lambda: "these", **more)


@st.composite
def budgets(draw, policies=POLICIES):
    ranks, rounded = draw(st.sampled_from([(1, None), (2, None), (3, None), (1, 4), (2, 4), (4, 4), (2, 6)]))
    unit, least = draw(st.sampled_from([("pixels", 98_304), ("tokens", 24)]))
    budget = draw(st.integers(least * (rounded or ranks), least * 30))
    policy = draw(st.sampled_from(policies))
    return BatchPlan(**{f"batch_{unit}": budget}, multiple_of=rounded, world_size=ranks, remainder=policy)


def cost(batches, bucket):
    return TOKENS[bucket] if batches.batch_tokens else int(np.prod(SIZES[bucket]))


@given(columns, budgets(), seeds, epochs)
def test_a_step_has_as_many_samples_as_its_budget_allows_on_every_rank(bucket, batches, seed, epoch):
    index = index_of(bucket)
    report, plan = plan_report(index, batches), plan_epoch(index, batches, seed=seed, epoch=epoch)
    assert len(plan) == report.steps
    small = Counter()
    for step in batches_of(plan):
        (length,) = {len(part.rows) for part in step}
        assert {int(number) for part in step for number in bucket[part.rows]} == {step[0].bucket}
        samples, each = length * batches.world_size, cost(batches, step[0].bucket)
        assert samples * each <= batches.budget[1]
        assert samples % batches.multiple == 0
        small[step[0].bucket] += (samples + batches.multiple) * each <= batches.budget[1]
    assert all(count <= (batches.remainder == "partial") for count in small.values())


@given(columns, budgets(), seeds, epochs)
def test_every_sample_is_served_as_often_as_the_report_says(bucket, batches, seed, epoch):
    index = index_of(bucket)
    report, plan = plan_report(index, batches), plan_epoch(index, batches, seed=seed, epoch=epoch)
    served = Counter(plan.real().tolist())
    assert served.total() == report.samples_used + report.samples_repeated
    assert report.samples_used + report.samples_dropped == len(bucket)
    if batches.remainder != "drop":
        assert set(served) == set(range(len(bucket)))
    if batches.remainder in ("drop", "pad"):
        assert set(served.values()) <= {1}
    assert report.samples_per_batch * len(plan) * batches.world_size == pytest.approx(served.total())


@given(columns, budgets(), seeds, st.data())
def test_another_number_of_ranks_goes_on_with_the_same_batches(bucket, batches, seed, data):
    batches = replace(batches, multiple_of=12, **{f"batch_{batches.budget[0]}": batches.budget[1] * 12})
    index, other = index_of(bucket), replace(batches, world_size=data.draw(st.sampled_from([1, 2, 3, 4, 6, 12])))
    whole = plan_epoch(index, batches, seed=seed, epoch=0)
    assume(len(whole))
    state = Epochs(index, batches).state(Position(seed, delivered=data.draw(st.integers(0, len(whole) - 1))))
    epochs = Epochs(index, other)
    position, rest = epochs.begin(epochs.load(json.loads(json.dumps(state))))
    assert len(rest) == epochs.remaining(position)
    assert rest.rows.tolist() == whole.rows[-len(rest.rows) :].tolist()
    assert np.diff(rest.starts).tolist() == np.diff(whole.starts)[-len(rest) :].tolist()


@given(columns, budgets(), st.data())
def test_training_goes_on_with_another_kind_of_batch_size(bucket, batches, data):
    assume(len(bucket))
    index, other = index_of(bucket), BatchPlan(batch_size=3, world_size=2, remainder=batches.remainder)
    for first, second in ((batches, other), (other, batches)):
        whole = plan_epoch(index, first, seed=1, epoch=0)
        steps = data.draw(st.integers(0, len(whole)))
        try:
            rest = rest_of_epoch(index, [(first, steps), (second, 0)], seed=1, epoch=0)
        except PlanError:
            assert batches.remainder == "drop"
            continue
        both = Counter(whole.part(0, steps).real().tolist() + rest.real().tolist())
        assert batches.remainder == "drop" or set(both) == set(range(len(bucket)))
        assert batches.remainder not in ("drop", "pad") or set(both.values()) <= {1}


@given(columns, columns, st.sampled_from(POLICIES), st.booleans(), seeds)
def test_each_source_has_batches_of_its_size(first, second, policy, weighted, seed):
    assume(len(first) and len(second))
    counts, mix = [len(first), len(second)], None
    if weighted and policy != "pad":
        mix = mixture(["a", "b"], counts, [2, 3])
    index = index_of(np.concatenate([first, second]), mixture=mix, parts=(("a", counts[0]), ("b", counts[1])))
    batches = BatchPlan(batch_size=[4, 1], world_size=2, remainder=policy)
    plan, report = plan_epoch(index, batches, seed=seed, epoch=3), plan_report(index, batches)
    assert len(plan) == report.steps
    for step in batches_of(plan):
        rows = np.concatenate([part.rows for part in step])
        (source,) = set((rows >= counts[0]).tolist())
        assert len(step[0].rows) == (4, 1)[source] or policy == "partial"
        assert set(index.bucket[rows].tolist()) == {step[0].bucket}
    if policy != "drop":
        times = np.ones(len(index.bucket)) if mix is None else occurrences(index.bucket, mix, seed=seed, epoch=3)
        assert (np.bincount(plan.real(), minlength=len(times)) >= times).all()


def test_sources_of_a_mixture_may_be_several_parts():
    mix = mixture(["a", "b"], [4, 2], [1, 1])
    mix = Mixture(sources=(replace(mix.sources[0], parts=2), mix.sources[1]))
    index = index_of([0] * 6, mixture=mix, parts=(("x", 1), ("y", 3), ("b", 2)))
    report = plan_report(index, BatchPlan(batch_size=(2, 1)))
    assert [(str(bucket.bucket), bucket.steps) for bucket in report.buckets] == [
        ("(1, 64, 64) of a", 2),
        ("(1, 64, 64) of b", 4),
    ]
    state = Epochs(index, BatchPlan(batch_size=(2, 1))).state(Position(0, delivered=1))
    assert state["legs"] == [[[2, 1], 1, 1]]
    assert Epochs(index, BatchPlan(batch_size=(2, 1))).load(json.loads(json.dumps(state))).delivered == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "the size of a batch is missing"),
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
def test_settings_that_are_not_allowed(sizes, message):
    with pytest.raises(UsageError, match=message) as caught:
        plan_report(index_of([0, 4], parts=(("a", 1), ("b", 1))), BatchPlan(**sizes))
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
