"""Weights are exact: so many of each data set, each entry floor or ceil times, evenly over epochs, on any ranks."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.errors import EmptyPlanError, PlanError, UsageError
from latentcache.geometry.sizes import Size
from latentcache.plan.batches import BatchPlan, plan_report, require_steps
from latentcache.plan.cursor import Cursor, Leg, rest_of_epoch
from latentcache.plan.epoch import due, plan_epoch, uneven
from latentcache.plan.weights import bucket_counts, largest_remainder, mixture, servings

SIZES = [Size(64, 64 + 8 * number) for number in range(4)]
fewer = settings(max_examples=40)
weights_made = st.fractions(min_value=Fraction(1, 50), max_value=20, max_denominator=60)


@st.composite
def mixed(draw, most_samples=400):
    """(bucket column, mixture): up to four data sets in up to four buckets."""
    entries = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    weights = draw(st.lists(weights_made, min_size=len(entries), max_size=len(entries)))
    samples = draw(st.none() | st.integers(1, most_samples))
    bucket = draw(st.lists(st.integers(0, 3), min_size=sum(entries), max_size=sum(entries)))
    try:
        return np.array(bucket, dtype=np.int32), mixture(entries, weights, samples=samples)
    except UsageError:
        least = -(-sum(weights) // min(weights))  # serves every data set
        return np.array(bucket, dtype=np.int32), mixture(entries, weights, samples=int(least) + len(entries))


plans = st.builds(
    BatchPlan,
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 4),
    small_buckets=st.sampled_from(["repeat", "drop", "partial"]),
)


# how many


@given(st.integers(0, 10**6), st.lists(weights_made, min_size=1, max_size=9))
def test_the_largest_remainder_is_exact_and_near(total, shares):
    counts = largest_remainder(total, shares)
    assert sum(counts) == total
    assert all(abs(count - total * share / sum(shares)) < 1 for count, share in zip(counts, shares, strict=True))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6), st.data())
def test_by_default_the_largest_for_its_weight_is_served_once_and_nothing_is_left_out(entries, data):
    weights = data.draw(st.lists(st.fractions(1, 10), min_size=len(entries), max_size=len(entries)))
    found = mixture(entries, weights).datasets
    unit = max(count / weight for count, weight in zip(entries, weights, strict=True))
    for dataset in found:
        assert dataset.least >= 1
        assert abs(dataset.samples - unit * dataset.weight) <= Fraction(1, 2)
    largest = [dataset for dataset in found if dataset.entries / dataset.weight == unit]
    assert all(dataset.samples == dataset.entries for dataset in largest)


def test_a_float_counts_as_it_is_written():
    assert [d.samples for d in mixture([10, 10], [0.1, 0.3], samples=40).datasets] == [10, 30]
    assert mixture([10], ["7/10"]).datasets[0].weight == Fraction(7, 10)
    assert mixture([3, 1], [3, 1]).as_json() == [["0", 3, 3], ["1", 1, 1]]
    assert [(d.least, d.most) for d in mixture([10, 4], [1, 1], samples=30).datasets] == [(1, 2), (3, 4)]


@pytest.mark.parametrize("weight", [0, -1, "half", float("nan"), float("inf"), "1/0"])
def test_a_weight_that_is_none(weight):
    with pytest.raises(UsageError, match="a weight of") as caught:
        mixture([5, 5], [1, weight])
    assert caught.value.fix


def test_what_cannot_be_served_is_refused_by_name():
    with pytest.raises(UsageError, match="1 weights for 2"):
        mixture([5, 5], [1])
    with pytest.raises(UsageError, match="cats has no entries"):
        mixture([5, 0], [1, 1], names=["dogs", "cats"])
    with pytest.raises(UsageError, match="10 samples serves none of cats"):
        mixture([5, 5], [100, 1], samples=10, names=["dogs", "cats"])
    with pytest.raises(UsageError, match="an epoch of") as caught:
        mixture([10**6, 10**6], [1, 10**-6])
    assert "samples=" in caught.value.fix
    found = mixture([10**6, 10**6], [1, 10**-6], samples=2_000_000).datasets
    assert [data.samples for data in found] == [1_999_998, 2]
    with pytest.raises(UsageError, match="an epoch of 3000000000 samples"):
        mixture([5], [1], samples=3 * 10**9)


# who


@given(mixed(), st.integers(-5, 10**9), st.integers(0, 10**9))
def test_each_data_set_is_served_exactly_and_each_entry_floor_or_ceil(made, seed, epoch):
    bucket, mix = made
    times = servings(bucket, mix, seed=seed, epoch=epoch)
    for start, dataset in zip(mix.starts(), mix.datasets, strict=False):
        own = times[start : start + dataset.entries]
        assert int(own.sum()) == dataset.samples
        assert dataset.least <= own.min() <= own.max() <= dataset.most


@given(mixed(), st.integers(0, 10**6), st.integers(1, 60))
@settings(max_examples=50)
def test_over_any_stretch_of_epochs_all_entries_are_served_as_evenly_as_can_be(made, first, epochs):
    bucket, mix = made
    total = sum(servings(bucket, mix, seed=1, epoch=first + epoch).astype(int) for epoch in range(epochs))
    for start, dataset in zip(mix.starts(), mix.datasets, strict=False):
        own = total[start : start + dataset.entries]
        assert own.max() - own.min() <= (dataset.samples * epochs % dataset.entries > 0)


@given(mixed(), st.integers(0, 50))
def test_buckets_get_their_share_to_within_one_for_each_data_set(made, epoch):
    bucket, mix = made
    first, least, most = bucket_counts(bucket, mix, 4)
    times = servings(bucket, mix, seed=3, epoch=epoch)
    found = np.bincount(bucket, weights=times, minlength=4)
    assert (least <= found).all()
    assert (found <= most).all()
    assert (most - least <= len(mix.datasets)).all()
    if not epoch:
        assert (found == first).all()


def test_other_seeds_give_the_extra_turns_to_others():
    bucket, mix = np.zeros(100, dtype=np.int32), mixture([100], [1], samples=130)
    chosen = {tuple(np.flatnonzero(servings(bucket, mix, seed=seed, epoch=0) > 1).tolist()) for seed in range(5)}
    assert len(chosen) == 5


def test_the_choice_is_pinned():
    """No release may change it: checkpoints hold positions in what follows from it."""
    bucket, mix = np.repeat([0, 1, 0, 1], [4, 3, 2, 4]).astype(np.int32), mixture([7, 6], [2, 1], samples=13)
    assert mix.as_json() == [["0", 7, 9], ["1", 6, 4]]
    found = [servings(bucket, mix, seed=5, epoch=epoch).tolist() for epoch in (0, 1)]
    assert found == [[1, 2, 1, 1, 1, 1, 2, 1, 0, 0, 1, 1, 1], [2, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 0, 0]]
    report = plan_report(bucket, SIZES, BatchPlan(batch_size=3), mix)
    assert plan_epoch(bucket, report, seed=5, epoch=1).rows.tolist() == [
        8,
        3,
        0,
        4,
        6,
        9,
        7,
        2,
        1,
        0,
        8,
        3,
        5,
        10,
        5,
        11,
        12,
        4,
    ]


# as a plan


@fewer
@given(mixed(), plans, st.integers(0, 99), st.integers(0, 99))
def test_a_weighted_epoch_has_the_steps_of_its_report_in_every_epoch(made, batches, seed, epoch):
    bucket, mix = made
    report = plan_report(bucket, SIZES, batches, mix)
    plan = plan_epoch(bucket, report, seed=seed, epoch=epoch)
    assert len(plan) == report.steps
    assert report.samples_used + report.samples_dropped == mix.samples
    assert len(plan.rows) == report.samples_used + report.samples_repeated
    for step in range(len(plan)):
        shares = [plan.batch(step, rank) for rank in range(batches.world_size)]
        assert len({len(share) for share in shares}) == 1
        assert len(set(bucket[np.concatenate(shares)].tolist())) == 1
        assert 1 <= len(shares[0]) <= batches.batch_size


@fewer
@given(mixed(), plans, st.integers(0, 99))
def test_the_first_epoch_does_what_the_report_says_of_each_bucket(made, batches, seed):
    bucket, mix = made
    report = plan_report(bucket, SIZES, batches, mix)
    plan = plan_epoch(bucket, report, seed=seed, epoch=0)
    expected = due(bucket, report, seed=seed, epoch=0)
    served = np.bincount(plan.rows, minlength=len(bucket))
    present = np.unique(bucket).tolist()
    for number, part in zip(present, report.buckets, strict=True):
        own = bucket == number
        assert int(expected[own].sum()) == part.samples
        assert int(np.maximum(served - expected, 0)[own].sum()) == part.repeated
        assert int(np.maximum(expected - served, 0)[own].sum()) == part.dropped
        assert served[own].sum() == part.samples + part.repeated - part.dropped
    more, fewer = uneven(plan, expected)
    assert (len(more) > 0, len(fewer) > 0) == (report.samples_repeated > 0, report.samples_dropped > 0)


@fewer
@given(mixed(), st.integers(0, 30))
def test_what_fills_a_step_is_first_what_the_epoch_would_not_serve(made, epoch):
    """A bucket of which one entry is due does not fill a step with copies of it while there are others."""
    bucket, mix = made
    batches = BatchPlan(batch_size=3, world_size=2)
    report = plan_report(bucket, SIZES, batches, mix)
    served = np.bincount(plan_epoch(bucket, report, seed=0, epoch=epoch).rows, minlength=len(bucket))
    expected = due(bucket, report, seed=0, epoch=epoch)
    for number in np.unique(bucket).tolist():
        own = bucket == number
        if (served[own] == 0).any():
            assert (served[own] <= np.maximum(expected[own], 1)).all()


@fewer
@given(mixed(), st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]), st.integers(0, 20))
def test_the_order_is_the_same_however_ranks_share_a_step(made, split, epoch):
    bucket, mix = made
    one = plan_epoch(bucket, plan_report(bucket, SIZES, BatchPlan(batch_size=12), mix), seed=4, epoch=epoch)
    batches = BatchPlan(batch_size=split[0], world_size=split[1])
    other = plan_epoch(bucket, plan_report(bucket, SIZES, batches, mix), seed=4, epoch=epoch)
    assert one.rows.tolist() == other.rows.tolist()
    assert one.starts.tolist() == other.starts.tolist()


@fewer
@given(mixed(), plans, st.data())
def test_a_resumed_epoch_is_the_rest_of_it(made, batches, data):
    bucket, mix = made
    whole = plan_epoch(bucket, plan_report(bucket, SIZES, batches, mix), seed=2, epoch=9)
    done = data.draw(st.integers(0, len(whole)))
    leg = Leg(batch_size=batches.batch_size, world_size=batches.world_size, steps=done)
    cursor = Cursor(seed=2, epoch=9, small_buckets=batches.small_buckets, legs=(leg,))
    cursor = Cursor.from_json(json.loads(json.dumps(cursor.as_json())))
    rest = rest_of_epoch(bucket, SIZES, cursor, batches, mix)
    assert rest.rows.tolist() == whole.rows[whole.starts[done] :].tolist()


@fewer
@given(mixed(), st.data())
def test_resumed_on_other_ranks_everything_due_is_served(made, data):
    bucket, mix = made
    first, second = BatchPlan(batch_size=2, world_size=2), BatchPlan(batch_size=3)
    whole = plan_epoch(bucket, plan_report(bucket, SIZES, first, mix), seed=2, epoch=1)
    done = data.draw(st.integers(0, len(whole)))
    leg = Leg(batch_size=2, world_size=2, steps=done)
    cursor = Cursor(seed=2, epoch=1, small_buckets="repeat", legs=(leg,))
    rest = rest_of_epoch(bucket, SIZES, cursor, second, mix)
    served = Counter(whole.rows[: whole.starts[done]].tolist()) + Counter(rest.rows.tolist())
    for row, times in enumerate(servings(bucket, mix, seed=2, epoch=1).tolist()):
        assert served[row] >= times


def test_an_even_mixture_divides_under_error():
    bucket = np.repeat([0, 1, 0], [8, 8, 4]).astype(np.int32)
    strict = BatchPlan(batch_size=4, small_buckets="error")
    report = plan_report(bucket, SIZES, strict, mixture([16, 4], [4, 2]))
    assert (report.samples_repeated, report.samples_dropped, report.steps) == (0, 0, 6)
    with pytest.raises(PlanError, match="does not divide") as caught:
        plan_report(bucket, SIZES, strict, mixture([16, 4], [1, 1], samples=10))
    assert "take turns" in caught.value.why


@fewer
@given(mixed(), st.integers(1, 40), st.integers(1, 4))
def test_what_the_refusal_of_a_weighted_plan_advises_gives_steps(made, batch_size, world_size):
    bucket, mix = made
    batches = BatchPlan(batch_size=batch_size, world_size=world_size, small_buckets="drop")
    report = plan_report(bucket, SIZES, batches, mix)
    if report.steps:
        return
    with pytest.raises(EmptyPlanError) as caught:
        require_steps(report)
    number = [int(word) for word in caught.value.fix.replace(",", "").split() if word.isdigit()]
    if "--batch-size" in caught.value.fix:
        better = BatchPlan(batch_size=number[0], world_size=world_size, small_buckets="drop")
    elif number:
        better = BatchPlan(batch_size=1, world_size=number[0], small_buckets="drop")
    else:
        better = BatchPlan(batch_size=batch_size, world_size=world_size)
    assert plan_report(bucket, SIZES, better, mix).steps > 0


# at most so often


@given(mixed(), st.fractions(1, 6, max_denominator=8))
def test_what_is_served_over_too_often_is_refused_by_name_and_the_advice_holds(made, limit):
    _, mix = made
    entries, weights = zip(*((data.entries, data.weight) for data in mix.datasets), strict=True)
    words = {"samples": mix.samples, "names": [f"set {number}" for number in range(len(entries))]}
    try:
        planned = mixture(entries, weights, **words)
    except UsageError:
        return  # made without samples=, and by those not every data set is served
    over = [data for data in planned.datasets if data.samples > limit * data.entries]
    if not over:
        assert mixture(entries, weights, max_repeat=limit, **words) == planned
        return
    with pytest.raises(UsageError, match=f"an epoch would serve {over[0].name} ") as caught:
        mixture(entries, weights, max_repeat=limit, **words)
    if "at most" in caught.value.fix:
        longest = int(caught.value.fix.split("at most ")[1].split()[0])
        found = mixture(entries, weights, samples=longest, max_repeat=limit)
        assert all(data.samples <= limit * data.entries for data in found.datasets)
        assert longest < mix.samples


def test_a_limit_for_each_and_what_is_none():
    assert mixture([10, 2], [1, 1], max_repeat=[1, 5]).datasets[1].most == 5
    for five in ("5", 5.0, np.int64(5), Decimal(5)):
        assert mixture([10, 2], [1, 1], max_repeat=five) == mixture([10, 2], [1, 1])
    with pytest.raises(UsageError, match="serve few 5 times over, max_repeat=4") as caught:
        mixture([10, 2], [1, 1], max_repeat=[1, 4], names=["many", "few"])
    assert caught.value.where == "10 samples of 2 entries, for a weight of 1 in 20 samples"
    assert caught.value.fix.startswith(
        "an epoch of at most 16 samples (samples=, rows=, --samples), a smaller weight"
    )
    assert mixture([10, 2], [1, 1], samples=16, max_repeat=4).datasets[1].samples == 8
    for limit in (0, 0.5, "many", [1], [1, 2, 3], float("nan")):
        with pytest.raises(UsageError, match="max_repeat="):
            mixture([10, 2], [1, 1], max_repeat=limit)


def test_two_of_one_name_are_refused():
    with pytest.raises(UsageError, match="two data sets are called 'cats'"):
        mixture([10, 2], [1, 1], names=["cats", "cats"])
    with pytest.raises(UsageError, match="1 names for 2 data sets"):
        mixture([10, 2], [1, 1], names=["cats"])


@pytest.mark.parametrize("names", ["ab", ("a", 1), [None, "b"], 5])
def test_names_are_words_one_for_each(names):
    with pytest.raises(UsageError, match="names="):
        mixture([10, 2], [1, 1], names=names)
