"""Resume: a checkpoint counts delivered batches, goes on exactly, and is refused by other contents."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from latentcache.errors import EmptyPlanError, PlanError
from latentcache.loader.cache import Cache, open_cache
from latentcache.loader.cache_mix import combine_caches
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.settings import BuildSettings, RecipeSettings
from latentcache.plan.weights import servings

SIZES = [(64, 64)] * 7 + [(48, 80)] * 5 + [(80, 48)] * 9


def build(folder: Path, sizes: list[tuple[int, int]]) -> Cache:
    folder.mkdir()
    for number, (height, width) in enumerate(sizes):
        pixels = np.full((height, width, 3), number * 7 % 256, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    recipe = RecipeSettings(model="stub", resolutions=(64,), bucket_step=16, min_side=32)
    report = build_cache(BuildSettings(data=folder, recipe=recipe))
    return open_cache(report.plan.cache)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return build(tmp_path_factory.mktemp("position") / "data", SIZES)


def keys(batches) -> list[list[str]]:
    return [batch["keys"] for batch in batches]


def interrupted(cache: Cache, steps: int, **options):
    """A loader's first batches, and its state as a checkpoint would hold it."""
    loader = cache.loader(**options)
    loader.set_epoch(3)
    passing = iter(loader)
    head = keys(next(passing) for _ in range(steps))
    return head, json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("steps", [0, 1, 4, 6])
def test_a_resumed_epoch_is_the_rest_of_it(cache: Cache, steps: int) -> None:
    whole = cache.loader(batch_size=3, seed=1)
    whole.set_epoch(3)
    expected = keys(whole)
    head, state = interrupted(cache, steps, batch_size=3, seed=1)
    resumed = cache.loader(batch_size=3, seed=77)  # the seed of the checkpoint counts
    resumed.load_state_dict(state)
    assert (len(resumed), resumed.remaining()) == (len(expected), len(expected) - steps)
    resumed.set_epoch(3)  # trainers say the epoch they resume
    assert head + keys(resumed) == expected
    assert keys(resumed) == expected  # and the pass after that is a whole epoch


def test_the_state_counts_delivered_batches(cache: Cache) -> None:
    loader = cache.loader(batch_size=3)
    for delivered, _ in enumerate(loader, start=1):
        assert loader.remaining() == len(loader) - delivered
        assert loader.state_dict()["legs"] == [[3, 1, delivered]]


def test_a_complete_epoch_is_never_resumed_to_nothing(cache: Cache) -> None:
    loader = cache.loader(batch_size=3)
    assert len(keys(loader)) == len(loader)
    again = cache.loader(batch_size=3)
    again.load_state_dict(loader.state_dict())
    assert again.remaining() == 0
    assert len(keys(again)) == len(again)


def test_another_epoch_forgets_the_place(cache: Cache) -> None:
    _, state = interrupted(cache, 2, batch_size=3)
    loader = cache.loader(batch_size=3)
    loader.load_state_dict(state)
    loader.set_epoch(4)
    assert loader.remaining() == len(loader)


def test_a_pass_that_was_broken_off_starts_again(cache: Cache) -> None:
    loader = cache.loader(batch_size=3)
    next(iter(loader))
    assert len(keys(loader)) == len(loader)


def test_a_pass_that_is_over_does_not_count_in_the_next_epoch(cache: Cache) -> None:
    loader = cache.loader(batch_size=3)
    passing = iter(loader)
    next(passing)
    loader.set_epoch(1)
    assert len(keys(passing)) == len(loader) - 1  # it serves its epoch to the end
    assert loader.state_dict()["legs"] == [[3, 1, 0]]
    assert loader.remaining() == len(loader)
    resumed = cache.loader(batch_size=3)
    resumed.load_state_dict(loader.state_dict())
    assert len(keys(resumed)) == len(loader)


def test_a_pass_does_not_count_where_a_checkpoint_was_loaded(cache: Cache) -> None:
    loader = cache.loader(batch_size=3)
    _, state = interrupted(cache, 2, batch_size=3)
    passing = iter(loader)
    next(passing)
    loader.load_state_dict(state)
    next(passing)
    assert loader.state_dict() == state


def test_of_two_passes_at_once_the_later_counts(cache: Cache) -> None:
    loader = cache.loader(batch_size=3)
    for delivered, _ in enumerate(zip(loader, loader, strict=True), start=1):
        assert loader.remaining() == len(loader) - delivered
    assert loader.state_dict()["legs"] == [[3, 1, len(loader)]]


def test_another_world_size_serves_the_rest_of_every_sample(cache: Cache) -> None:
    head, state = interrupted(cache, 3, batch_size=2, small_buckets="partial")
    ranks = [cache.loader(batch_size=1, rank=rank, world_size=3, small_buckets="partial") for rank in range(3)]
    served = Counter(key for batch in head for key in batch)
    for loader in ranks:
        loader.load_state_dict(state)
    lengths = set()
    for step in zip(*(iter(loader) for loader in ranks), strict=True):
        lengths.add(len({tuple(batch["latents"].shape) for batch in step}))
        served.update(key for batch in step for key in batch["keys"])
    assert lengths == {1}
    assert len(served) == len(cache)
    assert len({json.dumps(loader.state_dict()) for loader in ranks}) == 1


def test_a_second_interruption_after_a_change_of_size_goes_on_too(cache: Cache) -> None:
    head, state = interrupted(cache, 2, batch_size=3, small_buckets="partial")
    second = cache.loader(batch_size=2, small_buckets="partial")
    second.load_state_dict(state)
    passing = iter(second)
    middle = keys(next(passing) for _ in range(3))
    third = cache.loader(batch_size=4, small_buckets="partial")
    third.load_state_dict(second.state_dict())
    served = [key for batch in (*head, *middle, *keys(third)) for key in batch]
    assert Counter(served) == Counter(set(served))
    assert len(served) == len(cache)


def test_another_cache_is_refused_by_name(cache: Cache, tmp_path: Path) -> None:
    _, state = interrupted(cache, 1, batch_size=3)
    other = build(tmp_path / "other", SIZES[:-1]).loader(batch_size=3)
    with pytest.raises(PlanError, match="another cache") as caught:
        other.load_state_dict(state)
    assert caught.value.slug == "resume-mismatch"


def test_another_policy_is_refused_by_name(cache: Cache) -> None:
    _, state = interrupted(cache, 1, batch_size=3)
    with pytest.raises(PlanError, match="small_buckets: expected repeat, found drop"):
        cache.loader(batch_size=3, small_buckets="drop").load_state_dict(state)


def test_another_generation_with_an_equal_plan_goes_on(cache: Cache) -> None:
    """A build that changed nothing that is served, for example a caption: the same entries in the same places."""
    head, state = interrupted(cache, 2, batch_size=3)
    later = Cache(cache.layout, replace(cache.generation, number=7)).loader(batch_size=3)
    later.load_state_dict(state)
    whole = cache.loader(batch_size=3)
    whole.set_epoch(3)
    assert head + keys(later) == keys(whole)


def test_a_checkpoint_of_every_step_reads_the_columns_once(cache: Cache) -> None:
    loader = cache.loader(batch_size=3)
    first = loader.state_dict()["plan_id"]
    rows = loader._reader.generation.rows
    kept = rows.key
    other = kept.copy()  # what was loaded is read-only
    other[0, 0] ^= 1
    try:
        object.__setattr__(rows, "key", other)
        assert loader.state_dict()["plan_id"] == first
    finally:
        object.__setattr__(rows, "key", kept)


@pytest.mark.parametrize("batch_size", [3, 2])
def test_what_is_left_is_counted_as_it_is_served(cache: Cache, batch_size: int) -> None:
    _, state = interrupted(cache, 3, batch_size=3)
    loader = cache.loader(batch_size=batch_size)
    loader.load_state_dict(state)
    left = loader.remaining()
    assert len(keys(loader)) == left


# weights


@pytest.fixture(scope="module")
def halves(cache: Cache) -> list[Cache]:
    return list(cache.split(0.3))


def weighted(halves: list[Cache], weights: list[float], samples: int | None = None) -> Cache:
    return combine_caches(halves, weights=weights, samples=samples)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_weighted_epoch_is_resumed_exactly(halves: list[Cache], steps: int) -> None:
    mixed = weighted(halves, [1, 2])
    whole = mixed.loader(batch_size=3, seed=1)
    whole.set_epoch(3)
    head, state = interrupted(mixed, steps, batch_size=3, seed=1)
    assert state["datasets"] == mixed.mixture.as_json()
    resumed = weighted(halves, [0.5, 1]).loader(batch_size=3)  # the same shares in other words
    resumed.load_state_dict(state)
    assert head + keys(resumed) == keys(whole)


def test_a_weighted_epoch_goes_on_on_other_ranks(halves: list[Cache]) -> None:
    mixed = weighted(halves, [1, 2])
    head, state = interrupted(mixed, 2, batch_size=3)
    ranks = [mixed.loader(batch_size=2, rank=rank, world_size=2) for rank in range(2)]
    served = Counter(key for batch in head for key in batch)
    for loader in ranks:
        loader.load_state_dict(state)
    for step in zip(*(iter(loader) for loader in ranks), strict=True):
        assert len({tuple(batch["latents"].shape) for batch in step}) == 1
        served.update(key for batch in step for key in batch["keys"])
    times = servings(mixed.generation.rows.bucket, mixed.mixture, seed=0, epoch=3)
    for row, due in enumerate(times.tolist()):
        assert served[mixed.generation.rows.key[row].tobytes().hex()] >= due


def test_other_weights_are_refused_by_name(halves: list[Cache]) -> None:
    _, state = interrupted(weighted(halves, [1, 2]), 1, batch_size=3)
    for other in (weighted(halves, [1, 3]), weighted(halves, [1, 2], samples=50), combine_caches(halves)):
        with pytest.raises(PlanError, match="made with other weights") as caught:
            other.loader(batch_size=3).load_state_dict(state)
        assert caught.value.slug == "resume-mismatch"
        assert "servings: expected" in caught.value.why
    plain = combine_caches(halves)
    _, state = interrupted(plain, 1, batch_size=3)
    with pytest.raises(PlanError, match="expected no weights"):
        weighted(halves, [1, 2]).loader(batch_size=3).load_state_dict(state)


def test_the_length_is_that_of_every_epoch(halves: list[Cache]) -> None:
    loader = weighted(halves, [1, 3], samples=40).loader(batch_size=4)
    for epoch in range(12):
        loader.set_epoch(epoch)
        assert len(keys(loader)) == len(loader) == loader.remaining() + len(loader)


@pytest.mark.parametrize("legs", [[[3, 1, 0]], [[3, 1, 2], [5, 1, 0]]])
def test_a_size_that_served_nothing_does_not_count(cache: Cache, legs: list[list[int]]) -> None:
    """Loaded with another size, stopped, and loaded again: the second checkpoint counts in the same order."""
    state = cache.loader(batch_size=3, seed=1, small_buckets="partial").state_dict()
    served = []
    if legs[0][2]:
        begun = cache.loader(batch_size=3, seed=1, small_buckets="partial")
        served = keys(islice(begun, 2))
    middle = cache.loader(batch_size=2, small_buckets="partial")
    middle.load_state_dict(state | {"legs": legs})
    passing = iter(middle)
    served += keys(next(passing) for _ in range(3))
    last = cache.loader(batch_size=2, small_buckets="partial")
    last.load_state_dict(json.loads(json.dumps(middle.state_dict())))
    served += keys(last)
    counts = Counter(key for batch in served for key in batch)
    assert set(counts.values()) == {1}
    assert len(counts) == len(SIZES)


def test_a_rest_that_fills_no_batch_is_refused_and_not_served_again(cache: Cache) -> None:
    words = {"small_buckets": "drop", "seed": 1}
    head, state = interrupted(cache, 19, batch_size=1, **words)
    resumed = cache.loader(batch_size=5, **words)
    resumed.load_state_dict(state)
    assert resumed.remaining() == 0
    for _ in range(2):  # whoever tries again is told again
        with pytest.raises(EmptyPlanError, match="what is left of epoch 3 fills no batch of size 5 on 1 r") as caught:
            next(iter(resumed))
    most = int(caught.value.fix.split("batch_size=")[1].split(",")[0])
    assert caught.value.where.startswith("2 samples ")
    assert "set_epoch(4)" in caught.value.fix
    smaller = cache.loader(batch_size=most, **words)
    smaller.load_state_dict(state)
    rest = keys(smaller)
    assert len(rest) > 0
    assert not {key for batch in rest for key in batch} & {key for batch in head for key in batch}
    resumed.load_state_dict(state)
    resumed.set_epoch(4)
    assert len(keys(resumed)) == len(resumed)


def test_a_rest_of_dropped_samples_is_complete(cache: Cache) -> None:
    _, state = interrupted(cache, 6, batch_size=3, small_buckets="drop")  # 2 + 1 + 3 steps; 3 samples are dropped
    resumed = cache.loader(batch_size=1, small_buckets="drop")
    resumed.load_state_dict(state)
    assert len(keys(resumed)) == len(SIZES)


@pytest.mark.parametrize(
    ("change", "slug"),
    [
        ({"legs": [[3, 1, 999]]}, "resume-mismatch"),
        ({"legs": [[4, 1, 999]]}, "resume-mismatch"),
        ({"legs": [[3, 1, 2], [4, 1, 999]]}, "resume-mismatch"),
        ({"legs": [[3, 1, -1]]}, "resume-version"),
        ({"legs": []}, "resume-version"),
        ({"datasets": 5}, "resume-version"),
        ({"datasets": [5]}, "resume-version"),
    ],
)
def test_a_place_that_cannot_be_is_refused_in_words(cache: Cache, change: dict, slug: str) -> None:
    _, state = interrupted(cache, 2, batch_size=3)
    loader = cache.loader(batch_size=3)
    with pytest.raises(PlanError, match="this checkpoint's position") as caught:
        loader.load_state_dict({**state, **change})
    assert caught.value.slug == slug
    assert loader.epoch == 0  # where it was
    assert len(keys(loader)) == len(loader)
