from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from small_builds import FakeEncoder, Talk, folder_of, piece, recipe_of, settings
from tiny_vae import tiny_vae

from latentcache.encoders.protocol import Finished
from latentcache.geometry.sizes import Size
from latentcache.pipeline.batch_size import CALLS, ENOUGH, GAIN, MOST, UNTIMED, BatchSizes
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.encoding import BatchEncoder
from latentcache.pipeline.speed import StageClock

BIG, WIDE, SMALL = Size(64, 64), Size(32, 96), Size(32, 32)


def seconds(fixed, each):
    """How long a call of some size takes: a part for the call and one for each picture."""
    return lambda size: fixed + each * size


def tried(cost, pictures=10_000, most=MOST):
    """The sizes that are called for one bucket, and what is kept."""
    sizes = BatchSizes()
    sizes.expect({BIG: pictures})
    calls = []
    while sizes.timed(BIG, sizes.limit(BIG)) and sum(calls) < pictures:
        size = sizes.limit(BIG)
        calls.append(size)
        if size > most:
            sizes.halve(BIG, size)
        else:
            sizes.took(BIG, size, cost(size))
    return calls, sizes


def test_what_was_asked_for_is_not_timed():
    sizes = BatchSizes(5)
    sizes.expect({BIG: 1000})
    assert sizes.limit(BIG) == sizes.limit(SMALL) == 5
    assert not sizes.timed(BIG, 5)


def test_with_few_pictures_nothing_is_timed():
    sizes = BatchSizes()
    sizes.expect({BIG: ENOUGH - 1})
    assert sizes.limit(BIG) == UNTIMED


def test_a_device_that_is_full_with_one_picture_gets_one():
    calls, sizes = tried(seconds(0, 1))
    assert calls == [1] * CALLS + [2] * CALLS + [4] * CALLS
    assert sizes.limit(BIG) == 1


def test_the_smallest_size_within_3_percent_is_kept():
    _, sizes = tried(seconds(1, 1))
    rates = {2**n: 2**n / (1 + 2**n) for n in range(7)}
    best = max(rates.values())
    assert sizes.limit(BIG) == min(size for size, rate in rates.items() if rate * GAIN >= best)


def test_the_first_call_of_a_size_does_not_count():
    sizes = BatchSizes()
    sizes.expect({BIG: 10_000})
    costs = iter([100.0, 1, 1, 0.5, 1, 1, 0.5, 2, 2])
    for cost in costs:
        sizes.took(BIG, sizes.limit(BIG), cost)
    assert sizes.limit(BIG) in (2, 8)  # 1 a second, 2 a second, 2 a second: the second is kept or more are tried
    assert sizes._trial._rates == {1: 1.0, 2: 2.0, 4: 2.0}


def test_the_largest_bucket_with_enough_pictures_is_timed():
    sizes = BatchSizes()
    sizes.expect({BIG: 3, WIDE: ENOUGH, SMALL: 10_000})
    assert sizes.timed(WIDE, 1)
    assert not sizes.timed(SMALL, 1)
    assert not sizes.timed(WIDE, 2)


def test_other_buckets_start_from_it_by_their_pixels():
    _, sizes = tried(seconds(0, 1))
    assert (sizes.limit(BIG), sizes.limit(SMALL), sizes.limit(Size(64, 128)), sizes.limit(Size(8, 8))) == (
        1,
        4,
        1,
        64,
    )


def test_until_a_size_is_found_other_buckets_get_the_usual_one():
    sizes = BatchSizes()
    sizes.expect({BIG: 10_000})
    sizes.took(BIG, 1, 1.0)
    assert (sizes.limit(BIG), sizes.limit(SMALL)) == (1, UNTIMED)


def test_no_call_gets_more_than_is_said():
    few, many = BatchSizes(), BatchSizes()
    few.expect({BIG: ENOUGH - 1})
    many.expect({BIG: ENOUGH})
    assert (few.most, many.most, BatchSizes(5).most) == (UNTIMED, MOST, 5)


def test_a_trial_ends_when_the_pictures_do():
    calls, sizes = tried(seconds(100, 0.001), pictures=ENOUGH + 5)
    assert calls[-1] == 8
    assert sum(calls) <= ENOUGH + 5
    assert sizes.limit(BIG) == 8


def test_out_of_memory_ends_the_trial_and_is_remembered():
    calls, sizes = tried(seconds(100, 0.001), most=8)
    assert calls[-1] == 16
    assert sizes.limit(BIG) == 8
    assert sizes.halve(BIG, 8) == 4
    assert sizes.limit(BIG) == 4


def test_out_of_memory_elsewhere_leaves_the_trial_alone():
    sizes = BatchSizes()
    sizes.expect({BIG: 10_000})
    assert sizes.halve(SMALL, 2) == 1
    assert sizes.timed(BIG, 1)
    assert sizes.limit(SMALL) == 1


def test_a_new_plan_does_not_begin_again():
    _, sizes = tried(seconds(0, 1))
    sizes.expect({SMALL: 10_000})
    assert sizes.limit(SMALL) == 4


@given(st.floats(0, 50), st.floats(0.01, 5), st.integers(ENOUGH, 3000), st.sampled_from([1, 3, 8, 64]))
def test_a_trial_always_ends_and_never_asks_for_more_than_fits(fixed, each, pictures, most):
    calls, sizes = tried(seconds(fixed, each), pictures=pictures, most=most)
    assert sum(calls) <= pictures
    assert 1 <= sizes.limit(BIG) <= most
    assert max(calls) <= MOST


class Slow(FakeEncoder):
    """Says what a device would: so much for a call, so much for a picture."""

    def submit(self, pictures, *, precise=False):
        encoded = super().submit(pictures, precise=precise).result()
        return Finished(replace(encoded, device_s=0.01 + 0.01 * len(pictures)))


def test_timed_batches_are_results_and_nothing_is_encoded_twice():
    recipe = recipe_of()
    pieces = [piece(seed, recipe) for seed in range(ENOUGH + 7)]
    sizes = BatchSizes()
    sizes.expect({BIG: len(pieces)})
    encoder = Slow()
    batches = BatchEncoder(encoder=encoder, recipe=recipe, sizes=sizes, refuse=print, warn=print, clock=StageClock())
    entries = batches.encode(pieces)
    assert {entry.key for entry in entries} == {one.key for one in pieces}
    assert encoder.num_pictures == len(pieces) == len(entries)
    assert [size for size, _ in encoder.calls] == [1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8, 7]


def test_a_build_with_a_real_model_finds_its_size(tmp_path):
    data, talk = folder_of(tmp_path / "data", ENOUGH + 4, height=32, width=32), Talk()
    model = str(tiny_vae(tmp_path / "model"))
    report = build_cache(
        settings(data, recipe={"model": model, "resolutions": (), "buckets": (Size(32, 32),)}),
        observer=talk,
    )
    assert (report.encoded, report.refused, talk.warnings) == (ENOUGH + 4, (), [])
