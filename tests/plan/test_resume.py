"""Resume: the exact rest of an epoch, also with other sizes; foreign states are rejected."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_plans import POLICIES, batches_of, index_of, plans

from latentcache.errors import EmptyPlanError, PlanError
from latentcache.plan.batching import BatchPlan
from latentcache.plan.mixing import mixture, occurrences
from latentcache.plan.samples import Epochs, Position, plan_epoch, rest_of_epoch

SEED, EPOCH = 3, 2
columns = st.lists(st.integers(0, 4), min_size=1, max_size=90).map(lambda some: np.array(some, np.int32))


def rest(index, *legs, seed=SEED, epoch=EPOCH):
    """Compute the rest of an epoch after (batches, steps) pairs, the current sizes last."""
    return rest_of_epoch(index, legs, seed=seed, epoch=epoch)


def batch_plan(batches, policy):
    return BatchPlan(batch_size=batches.batch_size, world_size=batches.world_size, remainder=policy)


def begun(index, batches):
    return plan_epoch(index, batches, seed=SEED, epoch=EPOCH)


def sample_counts(plan, steps):
    head = slice(0, int(plan.starts[steps]))
    return plan.rows[head] if plan.is_pad is None else plan.rows[head][~plan.is_pad[head]]


@given(columns, plans(), st.data())
def test_resume_with_the_same_sizes_continues_the_plan(column, batches, data):
    index = index_of(column)
    whole = begun(index, batches)
    steps = data.draw(st.integers(0, len(whole)))
    left = rest(index, (batches, steps))
    assert left.rows.tolist() == whole.rows[whole.starts[steps] :].tolist()
    assert left.bucket.tolist() == whole.bucket[steps:].tolist()


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


@given(columns, plans(), plans(), plans(), st.sampled_from(POLICIES), st.data())
def test_resume_with_other_sizes_serves_every_sample(column, first, second, third, policy, data):
    first, second, third = (batch_plan(one, policy) for one in (first, second, third))
    index = index_of(column)
    whole = begun(index, first)
    if not len(whole):
        return
    steps = data.draw(st.integers(0, len(whole) - 1))
    try:
        middle = rest(index, (first, steps), (second, 0))
        more = data.draw(st.integers(0, len(middle)))
        last = rest(index, (first, steps), (second, more), (third, 0))
    except EmptyPlanError:
        assert policy == "drop"
        return
    head = sample_counts(whole, steps).tolist()
    both = Counter(head + sample_counts(middle, more).tolist() + last.real().tolist())
    if policy != "drop":
        assert set(both) == set(range(len(column)))
    if policy == "pad":
        assert set(both.values()) <= {1}
    for plan in (middle, last):
        for step in batches_of(plan):
            assert len({len(part.rows) for part in step}) == 1
            assert {int(bucket) for part in step for bucket in column[part.rows]} == {step[0].bucket}
    if second.layout != first.layout:
        due = np.bincount(column[np.setdiff1d(np.arange(len(column)), head)], minlength=5)
        found, step = np.bincount(column[middle.real()], minlength=5), second.batch_size * second.world_size
        if policy == "repeat":
            assert found.tolist() == (-(-due // step) * step).tolist()
        elif policy == "drop":
            assert found.tolist() == (due // step * step).tolist()
        elif policy == "pad":
            assert found.tolist() == due.tolist()
        else:
            assert ((found >= due) & (found < due + second.world_size)).all()


@given(plans("repeat", "drop", "partial"), st.integers(0, 20), st.data())
def test_a_resumed_epoch_with_weights_is_the_rest_of_it(batches, epoch, data):
    bucket = np.array([0, 1, 0, 1, 1, 0, 0, 2, 2, 0, 1], np.int32)
    index = index_of(bucket, mixture=mixture(["a", "b"], [7, 4], [2, 1], samples=20))
    whole = plan_epoch(index, batches, seed=2, epoch=epoch)
    done = data.draw(st.integers(0, len(whole)))
    left = rest(index, (batches, done), seed=2, epoch=epoch)
    assert left.rows.tolist() == whole.rows[whole.starts[done] :].tolist()
    if batches.remainder != "repeat":
        return
    other = rest(index, (batches, done), (BatchPlan(batch_size=3), 0), seed=2, epoch=epoch)
    if batches.layout != (3,):
        both = Counter(sample_counts(whole, done).tolist()) + Counter(other.real().tolist())
        parts = whole.part(0, done), other
        numbered = [pair for part in parts for pair in zip(part.rows, part.again, strict=True)]
        assert sorted(numbered) == [(row, time) for row in sorted(both) for time in range(both[row])]
        for row, times in enumerate(occurrences(bucket, index.mixture, seed=2, epoch=epoch).tolist()):
            assert both[row] >= times


def test_a_rest_of_repeats_is_empty_with_other_sizes():
    bucket = np.array([0, 1, 0, 1, 1, 0, 0, 2, 2, 0, 1], np.int32)
    index = index_of(bucket, mixture=mixture(["a", "b"], [7, 4], [2, 1], samples=20))
    sizes = BatchPlan(batch_size=3, world_size=3)
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
    place = epochs.load(json.loads(json.dumps(epochs.state(Position(0, delivered=2)))))
    begun, plan = epochs.begin(place)
    assert (len(plan), plan.before, begun.delivered, epochs.remaining(begun)) == (3, 2, 2, 3)
    assert [len(epochs.begin(one)[1]) for one in (begun, Position(0, delivered=2))] == [5, 5]
    place = epochs.load(epochs.state(Position(0, delivered=5)))
    assert (place.epoch, epochs.remaining(place), len(epochs.begin(place)[1])) == (1, 5, 5)


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
