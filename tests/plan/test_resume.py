"""Resume: the exact rest of an epoch, also with other sizes; foreign states are rejected."""

import json
from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from made_plans import BUCKETS, POLICIES, batches_of, budgets, columns, due, index_of, loaders, plans

from latentcache.errors import EmptyPlanError, PlanError
from latentcache.plan.batching import BatchPlan
from latentcache.plan.mixing import mixture
from latentcache.plan.samples import Epochs, Position, plan_epoch, rest_of_epoch

SEED, EPOCH = 3, 2


def rest(index, *legs, seed=SEED, epoch=EPOCH):
    """Compute the rest of an epoch after (batches, steps) pairs, the current sizes last."""
    return rest_of_epoch(index, legs, seed=seed, epoch=epoch)


def begun(index, batches):
    return plan_epoch(index, batches, seed=SEED, epoch=EPOCH)


def resumed(index, batches, whole, steps, others=None):
    """The rest of an epoch after a checkpoint, through the API of the loader."""
    state = Epochs(index, batches).state(Position(SEED, EPOCH, delivered=steps))
    epochs = Epochs(index, others or batches)
    position, rest_of_it = epochs.begin(epochs.load(json.loads(json.dumps(state))))
    assert len(rest_of_it) == epochs.remaining(position)
    assert rest_of_it.rows.tolist() == whole.rows[whole.starts[steps] :].tolist()
    assert rest_of_it.bucket.tolist() == whole.bucket[steps:].tolist()
    assert np.diff(rest_of_it.starts).tolist() == np.diff(whole.starts)[steps:].tolist()
    return rest_of_it


@given(loaders(), st.data())
def test_a_resume_with_the_same_sizes_is_the_rest_of_the_epoch(loader, data):
    index, batches = loader
    whole = begun(index, batches)
    assume(len(whole))
    steps = data.draw(st.integers(0, len(whole) - 1))
    left = resumed(index, batches, whole, steps)
    if index.blocks is not None:
        assert left.window.tolist() == whole.window[steps:].tolist()


@given(columns, budgets(), st.sampled_from([1, 2, 3, 4, 6, 12]), st.data())
def test_another_number_of_ranks_goes_on_with_the_same_batches(bucket, batches, ranks, data):
    batches = replace(batches, multiple_of=12, **{f"batch_{batches.budget[0]}": batches.budget[1] * 12})
    whole = begun(index_of(bucket), batches)
    assume(len(whole))
    steps = data.draw(st.integers(0, len(whole) - 1))
    resumed(index_of(bucket), batches, whole, steps, replace(batches, world_size=ranks))


def test_a_resume_with_other_windows_is_rejected():
    bucket, batches = np.zeros(40, np.int32), BatchPlan(batch_size=2)
    indexes = [index_of(bucket), *(index_of(bucket, shard=bucket, shuffle_block=size) for size in (10, 11))]
    for first, second in permutations(indexes, 2):
        with pytest.raises(PlanError, match="another cache"):
            Epochs(second, batches).load(Epochs(first, batches).state(Position(0)))


@given(columns, st.sampled_from(["repeat", "pad", "drop"]), st.data())
def test_resume_from_2x3_to_3x2_keeps_the_global_batches(column, policy, data):
    index = index_of(column)
    two, three = (
        BatchPlan(batch_size=3, world_size=2, remainder=policy),
        BatchPlan(batch_size=2, world_size=3, remainder=policy),
    )
    whole = begun(index, two)
    steps = data.draw(st.integers(0, len(whole)))
    left = rest(index, (two, steps), (three, 0))
    unbroken = [Counter(row for part in step for row in part.rows.tolist()) for step in batches_of(whole)[steps:]]
    assert [Counter(row for part in step for row in part.rows.tolist()) for step in batches_of(left)] == unbroken
    more = data.draw(st.integers(0, len(left)))
    again = rest(index, (two, steps), (three, more), (two, 0))
    assert again.rows.tolist() == whole.rows[whole.starts[steps + more] :].tolist()


SIZES = plans() | budgets()


@given(columns, st.tuples(SIZES, SIZES, SIZES), st.sampled_from(POLICIES), st.booleans(), st.data())
def test_a_resume_with_other_sizes_serves_every_sample(column, sizes, policy, windows, data):
    first, second, third = (replace(batches, remainder=policy) for batches in sizes)
    index = index_of(column, shard=np.arange(len(column)) // 5 if windows else None)
    whole = begun(index, first)
    assume(len(whole))
    steps = data.draw(st.integers(0, len(whole) - 1))
    try:
        middle = rest(index, (first, steps), (second, 0))
        more = data.draw(st.integers(0, len(middle)))
        last = rest(index, (first, steps), (second, more), (third, 0))
    except EmptyPlanError:
        assert policy == "drop"
        return
    head = whole.part(0, steps).real().tolist()
    both = Counter(head + middle.part(0, more).real().tolist() + last.real().tolist())
    if policy != "drop":
        assert set(both) == set(range(len(column)))
    if policy == "pad":
        assert set(both.values()) <= {1}
    for plan in (middle, last):
        for step in batches_of(plan):
            assert len({len(part.rows) for part in step}) == 1
            assert {int(bucket) for part in step for bucket in column[part.rows]} == {step[0].bucket}
    if second.layout != first.layout:
        left = np.bincount(column[np.setdiff1d(np.arange(len(column)), head)], minlength=5)
        served, step = np.bincount(column[middle.real()], minlength=5), np.array(second.sizes(BUCKETS))
        full = {"repeat": -(-left // step) * step, "drop": left // step * step, "pad": left}
        if policy in full:
            assert served.tolist() == full[policy].tolist()
        else:
            assert ((served >= left) & (served < left + second.multiple)).all()


def with_weights():
    bucket = np.array([0, 1, 0, 1, 1, 0, 0, 2, 2, 0, 1], np.int32)
    return index_of(bucket, mixture=mixture(["a", "b"], [7, 4], [2, 1], samples=20))


@given(plans("repeat"), st.integers(0, 20), st.data())
def test_a_resume_of_weights_with_other_sizes_numbers_occurrences(batches, epoch, data):
    index, other = with_weights(), BatchPlan(batch_size=3)
    assume(batches.layout != other.layout)
    whole = plan_epoch(index, batches, seed=2, epoch=epoch)
    steps = data.draw(st.integers(0, len(whole)))
    parts = whole.part(0, steps), rest(index, (batches, steps), (other, 0), seed=2, epoch=epoch)
    times = Counter(row for part in parts for row in part.real().tolist())
    numbered = [pair for part in parts for pair in zip(part.rows, part.again, strict=True)]
    assert sorted(numbered) == [(row, time) for row in sorted(times) for time in range(times[row])]
    for row, count in enumerate(due(index, 2, epoch).tolist()):
        assert times[row] >= count


def test_a_rest_of_repeats_is_empty_with_other_sizes():
    index, sizes = with_weights(), BatchPlan(batch_size=3, world_size=3)
    assert len(rest(index, (sizes, 3), seed=2, epoch=6)) == 1
    assert len(rest(index, (sizes, 3), (BatchPlan(batch_size=3), 0), seed=2, epoch=6)) == 0


@pytest.mark.parametrize(
    "change",
    [
        *({"epoch": epoch} for epoch in ("x", -3, 1.7)),
        {"seed": "x"},
        *(
            {"legs": legs}
            for legs in (3, [], [[1, 2]], [[0, 1, 1]], [[1, 1, -1]], [[1, 1, 0.5]], [[1 << 20, 1 << 20, 1]])
        ),
    ],
)
def test_a_position_that_cannot_be_read_is_rejected(change):
    epochs = epochs_of()
    good = epochs.state(Position(0))
    for bad in ({**good, **change}, {name: good[name] for name in good if name not in change}, {"version": 2}, None):
        with pytest.raises(PlanError) as caught:
            epochs.load(bad)
        assert caught.value.slug == "resume-version"


def epochs_of(count=10, **more):
    return Epochs(index_of(np.zeros(count, np.int32)), BatchPlan(**{"batch_size": 2} | more))


def test_a_resumed_epoch_is_followed_by_full_epochs():
    epochs = epochs_of()
    position = epochs.load(json.loads(json.dumps(epochs.state(Position(0, delivered=2)))))
    begun, plan = epochs.begin(position)
    assert (len(plan), plan.before, begun.delivered, epochs.remaining(begun)) == (3, 2, 2, 3)
    assert [len(epochs.begin(start)[1]) for start in (begun, Position(0, delivered=2))] == [5, 5]
    position = epochs.load(epochs.state(Position(0, delivered=5)))
    assert (position.epoch, epochs.remaining(position), len(epochs.begin(position)[1])) == (1, 5, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan_id": "others"}, "plan_id: expected others, found these"),
        ({"remainder": "drop"}, "remainder: expected drop, found repeat"),
        ({"weights": [[1, 1]]}, "weights: expected"),
        ({"legs": [[2, 1, 9]]}, "counts more batches"),
    ],
)
def test_a_foreign_state_is_rejected_by_name(change, message):
    epochs = epochs_of()
    with pytest.raises(PlanError) as caught:
        epochs.load({**epochs.state(Position(0)), **change})
    assert message in f"{caught.value.what} {caught.value.why}"
    assert caught.value.slug == "resume-mismatch"
    assert caught.value.fix


def test_a_rest_that_fills_no_batch_is_rejected_and_not_served_again():
    state = epochs_of(remainder="drop").state(Position(0, delivered=4))
    with pytest.raises(EmptyPlanError, match="fills no batch of size 4") as caught:
        epochs_of(batch_size=4, remainder="drop").load(state)
    assert "smaller batch_size" in caught.value.fix
