from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_plans import index_of

from latentcache.errors import PlanError, UsageError
from latentcache.plan.batching import BatchPlan
from latentcache.plan.mixing import bucket_counts, entries_of, largest_remainder, occurrences
from latentcache.plan.mixing import mixture as named_mixture
from latentcache.plan.samples import plan_epoch, plan_report

weights_made = st.fractions(min_value=Fraction(1, 50), max_value=20, max_denominator=60)


def mixture(entries, weights, **more):
    return named_mixture(["cats"] * len(entries), entries, weights, **more)


@st.composite
def mixed(draw, most_samples=400):
    """(bucket column, mixture): up to four sources in up to four buckets."""
    entries = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    weights = draw(st.lists(weights_made, min_size=len(entries), max_size=len(entries)))
    samples = draw(st.none() | st.integers(1, most_samples))
    bucket = draw(st.lists(st.integers(0, 3), min_size=sum(entries), max_size=sum(entries)))
    try:
        return np.array(bucket, dtype=np.int32), mixture(entries, weights, samples=samples)
    except UsageError:
        least = -(-sum(weights) // min(weights))  # serves every source
        return np.array(bucket, dtype=np.int32), mixture(entries, weights, samples=int(least) + len(entries))


@given(st.integers(0, 10**6), st.lists(weights_made, min_size=1, max_size=9))
def test_largest_remainder_is_exact(total, parts):
    counts = largest_remainder(total, parts)
    assert sum(counts) == total
    assert all(abs(count - total * part / sum(parts)) < 1 for count, part in zip(counts, parts, strict=True))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6), st.data())
def test_the_default_epoch_serves_every_sample(entries, data):
    weights = data.draw(st.lists(st.fractions(1, 10), min_size=len(entries), max_size=len(entries)))
    sources = mixture(entries, weights)
    unit = max(count / weight for count, weight in zip(entries, weights, strict=True))
    for source in sources:
        assert source.samples >= source.entries
        assert abs(source.samples - unit * source.weight) <= Fraction(1, 2)


def test_floats_are_exact_decimals():
    assert [source.samples for source in mixture([10, 10], [0.1, 0.3], samples=40)] == [10, 30]
    assert mixture([10], ["7/10"])[0].weight == Fraction(7, 10)
    sources = mixture([3, 1], [3, 1])
    assert [(source.name, source.entries, source.samples) for source in sources] == [
        ("cats", 3, 3),
        ("cats (2)", 1, 1),
    ]


@pytest.mark.parametrize(
    ("entries", "weights", "more", "message"),
    [
        *(([5, 5], [1, bad], {}, "is not above 0") for bad in (0, -1, "half", float("nan"), "1/0")),
        ([5, 5], [1], {}, "1 values for 2 sources"),
        ([5, 0], [1, 1], {}, r"cats \(2\) has no entries"),
        ([5, 5], [100, 1], {"samples": 10}, r"samples=10: an epoch would serve no sample of cats \(2\)"),
        ([10**6, 10**6], [1, 10**-6], {}, "an epoch would have"),
        ([5], [1], {"samples": 3 * 10**9}, "3000000000 samples"),
        ([5, 5], 3, {}, "weights=3: must be a list"),
        ([5, 5], np.array(3), {}, r"weights=array\(3\): must be a list"),
    ],
)
def test_invalid_values_are_rejected_by_name(entries, weights, more, message):
    with pytest.raises(UsageError, match=message) as caught:
        mixture(entries, weights, **more)
    assert caught.value.fix


@given(mixed(), st.integers(-5, 10**9), st.integers(0, 10**9), st.integers(1, 40))
def test_each_entry_is_served_floor_or_ceil_times_in_any_run_of_epochs(mixed_sources, seed, first, epochs):
    bucket, mix = mixed_sources
    total = np.zeros(len(bucket), dtype=int)
    for epoch in range(first, first + epochs):
        times = occurrences(bucket, mix, seed=seed, epoch=epoch)
        for source, entries in entries_of(mix):
            assert int(times[entries].sum()) == source.samples
        total += times
    for source, entries in entries_of(mix):
        assert np.ptp(total[entries]) <= (source.samples * epochs % source.entries > 0)


@given(mixed(), st.integers(0, 50))
def test_buckets_get_their_part_to_within_one_for_each_source(mixed_sources, epoch):
    bucket, mix = mixed_sources
    first, least, most = bucket_counts(bucket, mix, 4)
    counts = np.bincount(bucket, weights=occurrences(bucket, mix, seed=3, epoch=epoch), minlength=4)
    assert (least <= counts).all()
    assert (counts <= most).all()
    assert (most - least <= len(mix)).all()
    if not epoch:
        assert (counts == first).all()


def test_the_choice_is_pinned():
    """Checkpoints store positions that follow from it, so no release may change it."""
    bucket, mix = np.repeat([0, 1, 0, 1], [4, 3, 2, 4]).astype(np.int32), mixture([7, 6], [2, 1], samples=13)
    counts = [occurrences(bucket, mix, seed=5, epoch=epoch).tolist() for epoch in (0, 1)]
    assert counts == [[2, 1, 1, 1, 1, 1, 2, 1, 0, 1, 1, 1, 0], [1, 1, 2, 1, 2, 1, 1, 1, 1, 0, 1, 0, 1]]
    plan = plan_epoch(index_of(bucket, mixture=mix), BatchPlan(batch_size=3), seed=5, epoch=1)
    assert plan.rows.tolist() == [11, 9, 12, 7, 8, 2, 0, 2, 3, 12, 6, 4, 8, 2, 1, 10, 4, 5]


@settings(max_examples=40)
@given(mixed(), st.integers(0, 30))
def test_a_step_is_filled_first_with_samples_that_the_epoch_would_not_serve(mixed_sources, epoch):
    bucket, mix = mixed_sources
    index, batches = index_of(bucket, mixture=mix), BatchPlan(batch_size=3, world_size=2)
    served = np.bincount(plan_epoch(index, batches, seed=0, epoch=epoch).rows, minlength=len(bucket))
    expected = occurrences(bucket, mix, seed=0, epoch=epoch)
    for number in np.unique(bucket).tolist():
        of_bucket = bucket == number
        if (served[of_bucket] == 0).any():
            assert (served[of_bucket] <= np.maximum(expected[of_bucket], 1)).all()


def test_an_even_mixture_divides_under_error():
    bucket = np.repeat([0, 1, 0], [8, 8, 4]).astype(np.int32)
    strict = BatchPlan(batch_size=4, remainder="error")
    report = plan_report(index_of(bucket, mixture=mixture([16, 4], [4, 2])), strict)
    assert (report.samples_repeated, report.samples_dropped, report.steps) == (0, 0, 6)
    with pytest.raises(PlanError, match="does not divide"):
        plan_report(index_of(bucket, mixture=mixture([16, 4], [1, 1], samples=10)), strict)
