import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import PlanError, UsageError
from latentcache.geometry.sizes import Size
from latentcache.plan.batches import BatchPlan, plan_report
from latentcache.plan.epoch import plan_epoch
from latentcache.plan.fill import entries_of, real
from latentcache.plan.lengths import checked_lengths, drawn, fitting, merged_upward, row_and_length
from latentcache.plan.weights import mixture, servings

ALLOWED = (4, 8, 16, 32)
rows = st.lists(st.integers(1, 32), max_size=60).map(lambda some: np.array(some, dtype=np.int64))


@given(rows)
def test_a_row_stands_in_the_smallest_length_that_holds_it(tokens):
    for length, bucket in zip(tokens.tolist(), fitting(tokens, ALLOWED).tolist(), strict=True):
        assert ALLOWED[bucket] >= length
        assert bucket == 0 or ALLOWED[bucket - 1] < length


@given(rows, st.integers(1, 12))
def test_what_fills_no_batch_moves_up_and_nothing_is_lost(tokens, batch):
    bucket = merged_upward(tokens, ALLOWED, batch)
    assert bucket.shape == tokens.shape
    assert (bucket >= fitting(tokens, ALLOWED)).all()
    counts = np.bincount(bucket, minlength=len(ALLOWED))
    top = int(np.flatnonzero(counts)[-1]) if len(tokens) else 0
    assert top == int(fitting(tokens, ALLOWED).max(initial=0))
    assert (counts[:top] % batch == 0).all()
    assert counts[top] >= min(batch, len(tokens))
    moved = np.flatnonzero(bucket > fitting(tokens, ALLOWED))
    for row in moved.tolist():  # the longest of their length move
        stayed = tokens[(bucket < bucket[row]) & (fitting(tokens, ALLOWED) == fitting(tokens, ALLOWED)[row])]
        assert stayed.max(initial=0) <= tokens[row]


@given(
    st.lists(st.integers(1, 32), min_size=4, max_size=60), st.integers(1, 12), st.integers(2, 90), st.integers(0, 5)
)
def test_servings_of_any_epoch_fill_the_steps_of_one_length(lengths, batch, samples, epoch):
    tokens = np.array(lengths)
    mix = mixture([3, len(tokens) - 3], [1, 2], samples=samples)
    laid = drawn(tokens, ALLOWED, mix, batch, seed=7, epoch=epoch)
    rows, length = row_and_length(laid.entry, len(tokens))
    assert length.tolist() == laid.bucket.tolist()
    assert (np.array(ALLOWED)[length] >= tokens[rows]).all()
    assert [(rows < 3).sum(), (rows >= 3).sum()] == [data.samples for data in mix.datasets]
    times = servings(fitting(tokens, ALLOWED), mix, seed=7, epoch=epoch)
    assert np.bincount(rows, minlength=len(tokens)).tolist() == times.tolist()
    assert sum(-(-count // batch) for count in np.bincount(length).tolist()) == -(-samples // batch)


def test_one_length_moves_nowhere():
    assert merged_upward(np.array([3, 2, 4]), ALLOWED, 2).tolist() == [0, 0, 0]


def test_a_few_long_rows_get_company():
    tokens = np.array([3] * 8 + [30])
    bucket = merged_upward(tokens, ALLOWED, 4)
    assert np.bincount(bucket).tolist() == [4, 0, 0, 5]


@pytest.mark.parametrize("lengths", [[], [8, 4, 32], [4, 4, 32], [4, 16], [1, 32]])
def test_lengths_that_cannot_be(lengths):
    with pytest.raises(UsageError):
        checked_lengths(lengths, 32)


def test_lengths_that_can():
    assert checked_lengths(None, 32) == (32,)
    assert checked_lengths([8, 32], 32) == (8, 32)


POLICIES = ["repeat", "drop", "partial", "mask", "error"]


@pytest.mark.parametrize("policy", POLICIES)
@given(rows, st.integers(1, 5), st.integers(1, 3), st.integers(0, 3))
def test_no_length_is_skipped_under_any_policy(policy, tokens, batch_size, world_size, epoch):
    """A length with fewer rows than a step goes with a longer one; only the rest of all rows goes by the policy."""
    batches = BatchPlan(batch_size=batch_size, world_size=world_size, small_buckets=policy)
    step, sizes = batches.global_batch_size, [Size(1, length) for length in ALLOWED]
    bucket = merged_upward(tokens, ALLOWED, step)
    whole, rest = divmod(len(tokens), step)
    if policy == "error" and rest:
        with pytest.raises(PlanError, match="does not divide"):
            plan_report(bucket, sizes, batches)
        return
    report = plan_report(bucket, sizes, batches)
    plan = plan_epoch(bucket, report, seed=5, epoch=epoch)
    times = np.bincount(real(plan.rows), minlength=len(tokens))
    assert len(plan) == report.steps == whole + (rest > 0 and policy != "drop")
    assert (times == 0).sum() == report.samples_dropped == (rest if policy == "drop" else 0)
    assert (np.array(ALLOWED)[bucket] >= tokens).all()
    if policy == "mask":
        assert (times == 1).all()
        assert report.rows_masked == (step - rest) % step
    if policy == "repeat" and len(tokens) >= step:
        assert times.max(initial=0) <= 2
    for number in range(len(plan)):
        assert len(set(bucket[entries_of(plan.rows[plan.starts[number] : plan.starts[number + 1]])].tolist())) == 1
