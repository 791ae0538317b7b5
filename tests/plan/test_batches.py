import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import EmptyPlanError, PlanError, UsageError
from latentcache.geometry.sizes import Size
from latentcache.plan.batches import BatchPlan, plan_report, require_steps

POLICIES = ["repeat", "drop", "partial"]
counts_made = st.lists(st.integers(0, 70), max_size=8)
plans = st.builds(
    BatchPlan,
    batch_size=st.integers(1, 17),
    world_size=st.integers(1, 9),
    small_buckets=st.sampled_from(POLICIES),
)


def sizes_of(counts):
    return [Size(64, 64 * (position + 1)) for position in range(len(counts))]


def report_of(counts, batches):
    bucket = np.repeat(np.arange(len(counts)), counts)
    return plan_report(bucket, sizes_of(counts), batches)


@given(counts_made, plans)
def test_every_sample_is_used_repeated_or_dropped(counts, batches):
    report = report_of(counts, batches)
    assert [b.samples for b in report.buckets] == [count for count in counts if count]
    for bucket in report.buckets:
        full = batches.global_batch_size * max(bucket.steps - 1, 0)
        served = full + bucket.last * batches.world_size * (bucket.steps > 0)
        assert served == bucket.samples - bucket.dropped + bucket.repeated
        assert 1 <= bucket.last <= batches.batch_size
        assert not (bucket.dropped and bucket.repeated)
    assert report.samples_used + report.samples_dropped == sum(counts)
    assert report.samples_repeated == sum(bucket.repeated for bucket in report.buckets)
    assert report.steps == sum(bucket.steps for bucket in report.buckets)


@given(counts_made, plans)
def test_what_each_policy_promises(counts, batches):
    report = report_of(counts, batches)
    if batches.small_buckets == "drop":
        assert report.samples_repeated == 0
        assert all(bucket.dropped < batches.global_batch_size for bucket in report.buckets)
    else:
        assert report.samples_dropped == 0
        assert report.steps > 0 or not sum(counts)
    if batches.small_buckets == "partial":
        assert all(bucket.repeated < batches.world_size for bucket in report.buckets)
    else:
        assert all(bucket.last == batches.batch_size for bucket in report.buckets)


@given(counts_made, plans)
def test_error_refuses_what_others_would_fill_or_drop(counts, batches):
    strict = BatchPlan(batch_size=batches.batch_size, world_size=batches.world_size, small_buckets="error")
    if any(count % batches.global_batch_size for count in counts):
        with pytest.raises(PlanError, match="does not divide into full batches") as caught:
            report_of(counts, strict)
        assert caught.value.fix == "--small-buckets repeat, drop or partial"
        assert caught.value.exit_code == 1
    else:
        report = report_of(counts, strict)
        assert (report.samples_dropped, report.samples_repeated) == (0, 0)


def test_the_three_policies_side_by_side():
    """22 samples on 2 ranks of 4: two full steps of 8, and 6 left over."""
    found = {}
    for policy in POLICIES:
        (bucket,) = report_of([22], BatchPlan(batch_size=4, world_size=2, small_buckets=policy)).buckets
        found[policy] = (bucket.steps, bucket.repeated, bucket.dropped, bucket.last)
    assert found == {"repeat": (3, 2, 0, 4), "drop": (2, 0, 6, 4), "partial": (3, 0, 0, 3)}


def test_fewer_samples_than_ranks_are_repeated_under_partial():
    (bucket,) = report_of([3], BatchPlan(batch_size=4, world_size=8, small_buckets="partial")).buckets
    assert (bucket.steps, bucket.repeated, bucket.dropped, bucket.last) == (1, 5, 0, 1)


def test_a_report_has_the_sizes_of_its_buckets():
    report = report_of([0, 5, 0, 9], BatchPlan(batch_size=2))
    assert [bucket.size for bucket in report.buckets] == [Size(64, 128), Size(64, 256)]


def test_an_epoch_without_steps_is_refused_in_words():
    report = report_of([7, 2, 5], BatchPlan(batch_size=8, small_buckets="drop"))
    with pytest.raises(EmptyPlanError) as caught:
        require_steps(report)
    error = caught.value
    assert error.what == "no full batch can be formed (0 steps per epoch) at batch size 8 on 1 rank"
    assert error.where == "buckets (height x width: samples) 64x64: 7, 64x128: 2, 64x192: 5"
    assert error.why == "a step holds one bucket and needs 8 samples of it"
    assert error.fix == "--small-buckets repeat, or a --batch-size of at most 7, or more pictures"
    assert (error.slug, error.exit_code) == ("plan-empty", 1)


def test_an_epoch_without_steps_on_several_ranks():
    with pytest.raises(EmptyPlanError) as caught:
        require_steps(report_of([7], BatchPlan(batch_size=4, world_size=2, small_buckets="drop")))
    assert "at batch size 4 on 2 ranks" in caught.value.what
    assert "needs 8 samples" in caught.value.why
    assert "--batch-size of at most 3" in caught.value.fix


@pytest.mark.parametrize(("most", "ranks"), [(1, "1 rank"), (3, "3 ranks")])
def test_more_ranks_than_samples_are_not_mended_by_a_smaller_batch(most, ranks):
    with pytest.raises(EmptyPlanError) as caught:
        require_steps(report_of([most], BatchPlan(batch_size=4, world_size=8, small_buckets="drop")))
    assert caught.value.fix == f"--small-buckets repeat, or at most {ranks}, or more pictures"


@pytest.mark.parametrize("policy", [*POLICIES, "error"])
def test_no_entries_at_all(policy):
    report = report_of([], BatchPlan(batch_size=4, small_buckets=policy))
    assert (report.steps, report.samples_used) == (0, 0)
    with pytest.raises(EmptyPlanError) as caught:
        require_steps(report)
    assert caught.value.where == "there are no entries"
    assert caught.value.fix == "add pictures, then run `latentcache build` again"


@given(counts_made, plans)
def test_what_the_refusal_advises_gives_steps(counts, batches):
    """The numbers in the fix are true: with the batch size or the ranks it names there is a step."""
    report = report_of(counts, batches)
    if report.steps:
        assert require_steps(report) is report
        return
    with pytest.raises(EmptyPlanError) as caught:
        require_steps(report)
    number = [int(word) for word in caught.value.fix.replace(",", "").split() if word.isdigit()]
    if not number:
        assert sum(counts) == 0
    elif "--batch-size" in caught.value.fix:
        better = BatchPlan(batch_size=number[0], world_size=batches.world_size, small_buckets="drop")
        assert report_of(counts, better).steps > 0
    else:
        assert report_of(counts, BatchPlan(batch_size=1, world_size=number[0], small_buckets="drop")).steps > 0


@pytest.mark.parametrize(("batch_size", "world_size"), [(0, 1), (1, 0), (-3, 2)])
def test_sizes_below_one_are_refused(batch_size, world_size):
    with pytest.raises(UsageError, match=f"batch size {batch_size} on {world_size} ranks"):
        BatchPlan(batch_size=batch_size, world_size=world_size)


def test_sizes_of_numpy_become_plain_ones():
    batches = BatchPlan(batch_size=np.int64(3), world_size=np.uint8(200))
    assert (type(batches.batch_size), type(batches.world_size)) == (int, int)
    assert batches.global_batch_size == 600


def test_an_unknown_policy_is_refused():
    with pytest.raises(UsageError, match="unknown policy 'skip'") as caught:
        BatchPlan(batch_size=1, small_buckets="skip")
    assert caught.value.fix == "use one of repeat, drop, partial, error, mask"
