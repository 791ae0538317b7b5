from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from latentcache.errors import RecipeError
from latentcache.geometry.sizes import MAX_SIDE, Size, bucket_table, explicit_table, kept, place_in

ALIGNMENTS = (8, 16, 32, 64)
#: 0.25, 0.5, 1, 2 and 4 megapixels, as the side of a square.
RESOLUTIONS = (512, 724, 1024, 1448, 2048)
COMBINATIONS = list(product(ALIGNMENTS, RESOLUTIONS))
PER_COMBINATION = 5_000  # 20 combinations: 10^5 sizes


def random_sizes(seed, count):
    """Half random shapes, half close to common photographs, so that ties occur."""
    rng = np.random.default_rng(seed)
    anything = rng.integers(16, 12_001, (count // 2, 2))
    usual = rng.integers(4, 64, (count - count // 2, 2)) * rng.choice([8, 16, 60, 64], (count - count // 2, 1))
    return np.concatenate([anything, usual]).astype(np.int64)


def best_by_brute_force(images, table):
    """Find the best bucket per image by brute force in exact integers."""
    listed = np.array([(b.height, b.width) for b in table.sizes], dtype=np.int64)
    best = np.zeros(len(images), dtype=np.int64)
    for candidate in range(1, len(listed)):
        more = _keeps_more(images, listed[candidate], listed[best])
        best[more] = candidate
    return best


def _keeps_more(images, new, old):
    height, width = images.T
    a = width * new[0], new[1] * height
    b = width * old[:, 0], old[:, 1] * height
    # kept = min / max; all sides are below 2^15, so the products of four stay below 2^60
    left, right = np.minimum(*a) * np.maximum(*b), np.minimum(*b) * np.maximum(*a)
    new_area, old_area = new[0] * new[1], old[:, 0] * old[:, 1]
    wins_tie = (new_area > old_area) | ((new_area == old_area) & (new[1] > old[:, 1]))
    return (left > right) | ((left == right) & wins_tie)


@pytest.mark.parametrize(("multiple", "resolution"), COMBINATIONS)
def test_nearest_is_the_best_of_all_buckets_and_its_placement_covers(multiple, resolution):
    table = bucket_table(resolution=resolution, multiple=multiple)
    images = random_sizes(multiple * resolution, PER_COMBINATION)
    for (height, width), index in zip(images.tolist(), best_by_brute_force(images, table), strict=True):
        image, expected = Size(height, width), table.sizes[index]
        placement = place_in(image, table.nearest(image))
        assert placement.bucket == expected, (image, kept(image, placement.bucket), kept(image, expected))
        assert placement.resize.height >= expected.height
        assert placement.resize.width >= expected.width
        assert 0 <= placement.top <= placement.resize.height - expected.height
        assert 0 <= placement.left <= placement.resize.width - expected.width


@pytest.mark.parametrize(("multiple", "resolution"), COMBINATIONS)
def test_a_table_stays_on_the_grid_within_the_area_and_the_limits(multiple, resolution):
    table = bucket_table(resolution=resolution, multiple=multiple)
    for size in table.sizes:
        assert size.height % multiple == size.width % multiple == 0
        assert size.area <= resolution**2
        assert resolution // 2 <= min(size.height, size.width)
        assert max(size.height, size.width) <= 2 * resolution
        assert Size(size.width, size.height) in table.sizes


def test_a_tie_goes_to_the_larger_area_then_to_the_wider():
    square = Size(512, 512)
    assert explicit_table([Size(512, 768), Size(768, 512)], multiple=64).nearest(square) == Size(512, 768)
    assert explicit_table([Size(512, 768), Size(1152, 768)], multiple=64).nearest(square) == Size(1152, 768)
    assert explicit_table([Size(560, 840), Size(1200, 800)], multiple=8).nearest(square) == Size(1200, 800)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"resolution": 32, "multiple": 64}, "--resolution"),
        ({"resolution": 512, "multiple": 0}, "--resolution"),
        ({"resolution": 512, "multiple": 64, "min_side": 1024, "max_side": 768}, "--min-side"),
        ({"resolution": 512, "multiple": 64, "min_side": 1024, "max_side": 2048}, "--resolution"),
        ({"resolution": 40_000, "multiple": 64}, "--max-side"),
    ],
)
def test_impossible_settings_are_rejected_with_the_option_to_change(settings, word):
    with pytest.raises(RecipeError) as caught:
        bucket_table(**settings)
    assert word in caught.value.fix


@given(st.integers(1, 70_000), st.integers(1, 70_000), st.sampled_from(ALIGNMENTS))
def test_a_bucket_off_the_grid_is_rejected_with_one_that_works(height, width, multiple):
    size = Size(height, width)
    assume(height % multiple or width % multiple or max(height, width) > MAX_SIDE)
    with pytest.raises(RecipeError, match=str(size)) as caught:
        explicit_table([size], multiple=multiple)
    offered = Size(*map(int, caught.value.fix.rpartition("=")[2].split("x")))
    assert explicit_table([offered], multiple=multiple).sizes == (offered,)
