import numpy as np
import pytest
from made_tokens import cache_of, texts

from latentcache.errors import PlanError
from latentcache.geometry.sizes import Size
from latentcache.loader.row_entries import RowEntries
from latentcache.loader.token_mix import combine_views
from latentcache.plan.batches import BatchPlan
from latentcache.plan.epoch import EpochPlan
from latentcache.plan.lengths import fitting, merged_upward, row_and_length
from latentcache.plan.weights import mixture

SIZES = (Size(1, 4), Size(1, 8))
SIZES_OF_NINE = (Size(1, 4), Size(1, 9))
TOKENS = np.array([3, 3, 4, 7, 2, 8, 8, 1, 2, 3])
MIX = mixture([6, 4], [1, 1], samples=8)


def entries(tokens=TOKENS, sizes=SIZES, *, batch=4, name=b"rows", **words):
    return RowEntries.of(len(TOKENS), tokens, sizes, batch, name=name, **words)


def test_without_weights_a_row_has_one_length_in_all_epochs_of_a_batch_size():
    once = entries()
    assert np.bincount(once.bucket).tolist() == [4, 6]
    laid = [once.drawn(seed, epoch, 4) for seed, epoch in ((0, 0), (3, 7))]
    assert all(one.bucket.tolist() == once.bucket.tolist() for one in laid)
    rows, length = row_and_length(laid[0].entry, len(TOKENS))
    assert (rows.tolist(), length.tolist()) == (list(range(10)), once.bucket.tolist())
    for bucket, width in enumerate((4, 8)):
        chosen = np.flatnonzero(once.bucket == bucket)
        served = once.served(laid[0].entry[chosen])
        assert (served[0].tolist(), served[1]) == (chosen.tolist(), width)


@pytest.mark.parametrize("batch", [1, 3, 5, 10])
def test_an_epoch_that_began_with_another_batch_size_has_the_lengths_of_that(batch):
    assert entries(batch=4).drawn(0, 1, batch).bucket.tolist() == entries(batch=batch).bucket.tolist()


def test_a_view_says_the_lengths_of_its_rows():
    view = cache_of(texts(30, 60)).padded(64, lengths=[16, 32, 64])
    assert view.bucket(4).tolist() == merged_upward(view.row_lengths, [16, 32, 64], 4).tolist()
    mixed = combine_views([view], weights=[1], rows=20)
    assert mixed.bucket(4).tolist() == fitting(view.row_lengths, [16, 32, 64]).tolist()


@pytest.mark.parametrize("mix", [None, MIX])
def test_one_length_asks_for_no_tokens(mix):
    one = entries(None, SIZES[1:], mixture=mix)
    assert one.drawn(0, 0, 4) is None
    assert one.report(BatchPlan(batch_size=4)).mixture == mix


def test_with_weights_an_epoch_has_its_own_lengths():
    mixed = entries(mixture=MIX)
    report = mixed.report(BatchPlan(batch_size=4, small_buckets="error"))
    assert (report.steps, report.samples_repeated, report.mixture) == (2, 0, MIX)
    laid = mixed.drawn(0, 1, 4)
    rows, width = mixed.served(laid.entry[laid.bucket == 1][:2])
    assert width == 8
    assert set(rows.tolist()) <= set(range(10))
    with pytest.raises(PlanError):
        mixed.report(BatchPlan(batch_size=3, small_buckets="error"))


def test_rows_that_only_fill_stay_below_zero_at_any_length():
    mixed = entries(mixture=MIX)
    laid = mixed.drawn(0, 0, 4)
    plan = EpochPlan(rows=np.array([0, ~1, ~2, 3]), starts=np.array([0, 2, 4]), world_size=1)
    codes = mixed.laid(plan, laid).rows
    rows = (laid.entry % 10)[:4].tolist()
    assert mixed.rows(codes).tolist() == [rows[0], ~rows[1], ~rows[2], rows[3]]
    assert mixed.served(codes[1:3])[0].tolist() == [~rows[1], ~rows[2]]


def test_a_step_of_several_lengths_is_as_long_as_its_longest_row_on_all_ranks():
    once = entries()
    short, long = np.flatnonzero(once.bucket == 0).tolist(), np.flatnonzero(once.bucket == 1).tolist()
    rows = np.array([short[0], short[1], short[2], long[0], short[3], short[0]])
    plan = once.laid(EpochPlan(rows=rows, starts=np.array([0, 4, 6]), world_size=2), once.drawn(0, 0, 4))
    assert once.rows(plan.rows).tolist() == rows.tolist()
    assert [[once.served(plan.batch(step, rank))[1] for rank in (0, 1)] for step in (0, 1)] == [[8, 8], [4, 4]]
    assert entries(None, SIZES[1:]).laid(plan, None) is plan


def test_names_tell_what_a_checkpoint_counts():
    names = [entries(), entries(None, SIZES[1:]), entries(TOKENS + 1, SIZES_OF_NINE), entries(name=b"other")]
    assert len({some.identities() for some in names}) == 4
    assert entries(batch=10).identities() == entries().identities()  # lengths follow from the sizes in the cursor
    assert entries(also=(b"other",)).identities()[1:] == entries(name=b"other").identities()
