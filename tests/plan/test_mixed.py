"""One more data set, wherever it stands among the others, changes neither their turns nor their order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.geometry.sizes import Size
from latentcache.plan.batches import BatchPlan, plan_report
from latentcache.plan.epoch import plan_epoch
from latentcache.plan.mixed import mixed_turns
from latentcache.plan.weights import Dataset, Mixture, servings

fewer = settings(max_examples=60)


@st.composite
def sources(draw):
    """Two to four (name, buckets of the entries, samples); the names are drawn, and so is their order."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=4, unique=True))
    made = []
    for name in names:
        buckets = draw(st.lists(st.integers(0, 3), min_size=1, max_size=25))
        made.append((name, buckets, draw(st.integers(1, 3 * len(buckets)))))
    return made


def laid(some):
    """(bucket column, mixture) of sources one after the other; buckets are numbered as they are met."""
    numbers = {size: number for number, size in enumerate(dict.fromkeys(size for _, own, _ in some for size in own))}
    datasets = [Dataset(name=name, weight=1, entries=len(own), samples=count) for name, own, count in some]
    bucket = np.array([numbers[size] for _, own, _ in some for size in own], dtype=np.int32)
    return bucket, Mixture(datasets=tuple(datasets)), {number: size for size, number in numbers.items()}


def told(rows, mix):
    """Entries by the name of their data set and their place in it."""
    starts = mix.starts()
    owner = np.searchsorted(starts, rows, side="right") - 1
    return [(mix.datasets[who].name, int(row) - starts[who]) for who, row in zip(owner, rows, strict=True)]


def turns_by_size(some, seed, epoch):
    bucket, mix, sizes = laid(some)
    times = servings(bucket, mix, seed=seed, epoch=epoch)
    present = np.unique(bucket).tolist()
    made = list(mixed_turns(bucket, mix, times, seed=seed, epoch=epoch))
    assert len(made) == len(present)
    for number, own in zip(present, made, strict=True):
        assert (bucket[own.rows] == number).all()
        assert (np.diff(own.places) > 0).all()
        assert sorted(own.spare.tolist()) == np.flatnonzero((bucket == number) & (times == 0)).tolist()
    counts = np.bincount(np.concatenate([own.rows for own in made]), minlength=len(bucket))
    assert counts.tolist() == times.tolist()
    return {sizes[number]: told(own.rows, mix) for number, own in zip(present, made, strict=True)}


@fewer
@given(sources(), st.integers(0, 99), st.integers(0, 99), st.data())
def test_a_source_that_is_added_changes_no_turn_and_no_order_of_the_others(some, seed, epoch, data):
    added = data.draw(st.sampled_from(some))[0]
    fewer_sources = data.draw(st.permutations([one for one in some if one[0] != added]))
    before, now = turns_by_size(fewer_sources, seed, epoch), turns_by_size(some, seed, epoch)
    for size, turns in before.items():
        assert [turn for turn in now[size] if turn[0] != added] == turns


@fewer
@given(sources(), st.integers(0, 99), st.sampled_from(["partial", "mask"]), st.data())
def test_where_there_is_one_bucket_the_whole_epoch_keeps_its_order(some, epoch, policy, data):
    some = [(name, [0] * len(own), count) for name, own, count in some]
    added = data.draw(st.sampled_from(some))[0]

    def epoch_of(chosen, batch_size):
        bucket, mix, _ = laid(chosen)
        report = plan_report(bucket, [Size(1, 8)], BatchPlan(batch_size=batch_size, small_buckets=policy), mix)
        rows = plan_epoch(bucket, report, seed=1, epoch=epoch).rows
        return told(rows[rows >= 0], mix)

    before, now = epoch_of([one for one in some if one[0] != added], 3), epoch_of(some, 4)
    assert [turn for turn in now if turn[0] != added] == before


def test_sources_of_one_size_do_not_walk_in_step():
    some = [("a", [0] * 200, 300), ("b", [0] * 200, 300)]
    bucket, mix, _ = laid(some)
    times = servings(bucket, mix, seed=0, epoch=0)
    assert (times[:200] != times[200:]).sum() > 50
    order = turns_by_size(some, 0, 0)[0]
    first = {turn: place for place, turn in reversed(list(enumerate(order)))}
    near = [abs(first["a", place] - first["b", place]) for place in range(200)]
    assert np.median(near) > 50
    blocks = [[name for name, _ in order[start : start + 60]].count("a") for start in range(0, 600, 60)]
    assert 15 < min(blocks) <= max(blocks) < 45  # mixed all along


def test_buckets_of_several_sizes_are_spread_over_the_epoch():
    some = [("a", [0, 1, 2, 3] * 30, 120), ("b", [2, 0] * 40, 160)]
    bucket, mix, _ = laid(some)
    report = plan_report(bucket, [Size(1, 8 * number + 8) for number in range(4)], BatchPlan(batch_size=5), mix)
    plan = plan_epoch(bucket, report, seed=3, epoch=0)
    firsts = [int(bucket[plan.batch(step)[0]]) for step in range(len(plan))]
    half = len(firsts) // 2
    for number in range(4):
        assert firsts[:half].count(number) == pytest.approx(firsts[half:].count(number), abs=4)
