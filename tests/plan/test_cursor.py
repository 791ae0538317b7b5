"""Resume: the rest of an epoch, exactly, and also with other batch and world sizes."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import PlanError
from latentcache.geometry.sizes import Size
from latentcache.plan.batches import BatchPlan, plan_report
from latentcache.plan.cursor import Cursor, Leg, after, recut, rest_of_epoch
from latentcache.plan.epoch import EpochPlan, plan_epoch

SIZES = [Size(64 + 8 * number, 64) for number in range(5)]
SEED, EPOCH = 3, 2

batch_plans = st.builds(
    BatchPlan,
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 4),
    small_buckets=st.sampled_from(["repeat", "partial"]),
)
columns = st.lists(st.integers(0, 4), min_size=1, max_size=90).map(np.array)


def begun(column, batches: BatchPlan) -> EpochPlan:
    return plan_epoch(column, plan_report(column, SIZES, batches), seed=SEED, epoch=EPOCH)


def cursor(*legs: tuple[BatchPlan, int]) -> Cursor:
    stretches = tuple(Leg(batch_size=b.batch_size, world_size=b.world_size, steps=steps) for b, steps in legs)
    return Cursor(seed=SEED, epoch=EPOCH, small_buckets=legs[0][0].small_buckets, legs=stretches)


def like(batches: BatchPlan, policy: str) -> BatchPlan:
    return BatchPlan(batch_size=batches.batch_size, world_size=batches.world_size, small_buckets=policy)


@given(columns, batch_plans, st.data())
def test_with_the_same_sizes_the_rest_is_the_rest_of_the_plan(column, batches, data) -> None:
    whole = begun(column, batches)
    steps = data.draw(st.integers(0, len(whole)))
    rest = rest_of_epoch(column, SIZES, cursor((batches, steps)), batches)
    assert len(rest) == len(whole) - steps
    for step in range(len(rest)):
        for rank in range(batches.world_size):
            assert rest.batch(step, rank).tolist() == whole.batch(steps + step, rank).tolist()


@given(columns, batch_plans, batch_plans, batch_plans, st.data())
def test_with_other_sizes_every_entry_is_served_and_steps_stay_equal(column, first, second, third, data) -> None:
    second, third = like(second, first.small_buckets), like(third, first.small_buckets)
    whole = begun(column, first)
    steps = data.draw(st.integers(0, len(whole)))
    middle = rest_of_epoch(column, SIZES, cursor((first, steps)), second)
    more = data.draw(st.integers(0, len(middle)))
    last = rest_of_epoch(column, SIZES, cursor((first, steps), (second, more)), third)
    head = whole.rows[: whole.starts[steps]].tolist() + middle.rows[: middle.starts[more]].tolist()
    assert set(head + last.rows.tolist()) == set(range(len(column)))
    for plan, batches in ((middle, second), (last, third)):
        for step in range(len(plan)):
            shares = [plan.batch(step, rank) for rank in range(batches.world_size)]
            assert len({len(share) for share in shares}) == 1
            assert len(set(column[np.concatenate(shares)].tolist())) == 1


@given(columns, batch_plans, batch_plans)
def test_recutting_keeps_the_order_inside_each_bucket(column, first, second) -> None:
    whole, other = begun(column, first), like(second, first.small_buckets)
    cut = recut(whole.rows, column, SIZES, other)
    for bucket in set(column.tolist()):
        before = [row for row in whole.rows.tolist() if column[row] == bucket]
        behind = [row for row in cut.rows.tolist() if column[row] == bucket]
        assert behind[: len(before)] == before


def test_divisible_buckets_are_served_exactly_once_after_a_change_of_world_size() -> None:
    column = np.repeat(np.arange(3), 24)
    four, three = BatchPlan(batch_size=2, world_size=4), BatchPlan(batch_size=4, world_size=2)
    whole = begun(column, four)
    rest = rest_of_epoch(column, SIZES, cursor((four, 3)), three)
    served = Counter(whole.rows[: whole.starts[3]].tolist()) + Counter(rest.rows.tolist())
    assert set(served.values()) == {1}


@given(columns, batch_plans, batch_plans, batch_plans, st.sampled_from(["repeat", "partial", "drop"]), st.data())
def test_other_sizes_serve_what_is_owed_and_repeat_no_more_than_their_own_steps_need(
    column, first, second, third, policy, data
) -> None:
    first, second, third = (like(one, policy) for one in (first, second, third))
    whole = begun(column, first)
    if not len(whole):
        return
    steps = data.draw(st.integers(0, len(whole) - 1))
    middle = rest_of_epoch(column, SIZES, cursor((first, steps)), second)
    more = data.draw(st.integers(0, len(middle)))
    last = rest_of_epoch(column, SIZES, cursor((first, steps), (second, more)), third)
    served = whole.rows[: whole.starts[steps]]
    stretches = [(middle, second, served)]
    if more < len(middle):
        stretches.append((last, third, np.concatenate([served, middle.rows[: middle.starts[more]]])))
    for plan, batches, before in stretches:
        if batches.batch_size * batches.world_size == first.batch_size * first.world_size:
            continue
        owed = np.bincount(column[np.setdiff1d(np.arange(len(column)), before)], minlength=5)
        found = np.bincount(column[plan.rows], minlength=5)
        step = batches.global_batch_size
        if policy == "repeat":
            assert found.tolist() == (-(-owed // step) * step).tolist()
        elif policy == "drop":
            assert found.tolist() == (owed // step * step).tolist()
        else:
            assert ((found >= owed) & (found < owed + batches.world_size)).all()


def test_an_epoch_that_was_served_to_its_end_owes_nothing() -> None:
    column, four = np.zeros(10, dtype=int), BatchPlan(batch_size=4, small_buckets="drop")
    one = BatchPlan(batch_size=1, small_buckets="drop")
    assert len(rest_of_epoch(column, SIZES, cursor((four, 2)), one)) == 0
    assert len(rest_of_epoch(column, SIZES, cursor((four, 1)), one)) == 6  # the two that four would drop among them


def test_nothing_is_left_after_the_last_step() -> None:
    column, batches = np.zeros(10, dtype=int), BatchPlan(batch_size=3)
    whole = begun(column, batches)
    assert len(after(whole, len(whole))) == 0


@given(st.integers(), st.integers(0, 99), st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=4))
def test_a_cursor_survives_json(seed: int, epoch: int, legs) -> None:
    stretches = tuple(Leg(batch_size=b, world_size=w, steps=s) for b, w, s in legs)
    one = Cursor(seed=seed, epoch=epoch, small_buckets="repeat", legs=stretches)
    assert Cursor.from_json(json.loads(json.dumps(one.as_json()))) == one


def test_a_newer_cursor_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="position has version 2") as caught:
        Cursor.from_json({"version": 2})
    assert caught.value.slug == "resume-version"


@pytest.mark.parametrize(
    "change",
    [
        *({"epoch": epoch} for epoch in ("x", -3, 1.7)),
        *({"legs": legs} for legs in (3, [], [[1, 2]], [[0, 1, 1]], [[1, 0, 1]], [[1, 1, -1]], [[1, 1, 0.5]])),
        {"legs": [[1 << 20, 1 << 20, 1]]},
        {"seed": None},
    ],
)
def test_a_position_that_is_none_is_refused(change):
    good = {"version": 1, "seed": 0, "epoch": 0, "small_buckets": "repeat", "legs": [[1, 1, 1]]}
    assert Cursor.from_json(good).legs[0].steps == 1
    with pytest.raises(PlanError, match="position cannot be read") as caught:
        Cursor.from_json({**good, **change})
    assert caught.value.slug == "resume-version"
    with pytest.raises(PlanError, match="cannot be read") as caught:
        Cursor.from_json({name: value for name, value in good.items() if name not in change})
    assert "is missing" in caught.value.why
    with pytest.raises(PlanError):
        Cursor.from_json(None)


@pytest.mark.parametrize("legs", [[(4, 4)], [(4, 2), (3, 3)]])
def test_more_steps_than_an_epoch_has_are_refused(legs):
    column, batches = np.zeros(10, dtype=int), BatchPlan(batch_size=4)
    with pytest.raises(PlanError, match="counts more batches than its epoch has") as caught:
        rest_of_epoch(column, SIZES, cursor_of(legs), batches)
    assert caught.value.slug == "resume-mismatch"


def cursor_of(legs):
    stretches = tuple(Leg(batch_size=size, world_size=1, steps=steps) for size, steps in legs)
    return Cursor(seed=0, epoch=0, small_buckets="repeat", legs=stretches)
