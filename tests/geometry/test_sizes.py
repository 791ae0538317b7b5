"""Sizes, buckets and placement."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from latentcache.errors import RecipeError
from latentcache.geometry.sizes import (
    MAX_SIDE,
    Size,
    bucket_table,
    explicit_table,
    flipped,
    kept,
    latent_size,
    place_in,
    unusable,
)

sides = st.integers(1, 20_000)
sizes = st.builds(Size, sides, sides)


def is_inside(placement):
    bucket, resize = placement.bucket, placement.resize
    low = placement.top >= 0 and placement.left >= 0
    return low and placement.top + bucket.height <= resize.height and placement.left + bucket.width <= resize.width


@pytest.mark.parametrize(("height", "width"), [(0, 1), (1, 0), (-8, 8)])
def test_a_size_without_pixels_is_rejected(height, width):
    with pytest.raises(ValueError, match=f"{height}x{width}"):
        Size(height, width)


@given(st.integers(1, 500), st.integers(1, 500), st.sampled_from([1, 8, 16, 32]))
def test_latent_size_divides_exactly(height, width, factor):
    assert latent_size(Size(height * factor, width * factor), factor) == Size(height, width)


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
        assert is_inside(placement)


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
    ("settings", "sides"),
    [
        ({"resolution": 32}, "resolutions=32: .* 64 to 64"),
        ({"resolution": 512, "min_side": 1024, "max_side": 768}, "min_side=1024: .* 1024 to 768"),
        ({"resolution": 512, "min_side": 1024, "max_side": 2048}, "min_side=1024: .* 1024 to 2048"),
        ({"resolution": 40_000}, "resolutions=40000: .* 20032 to 80000"),
        ({"resolution": 512, "max_side": 10**12}, "max_side=1000000000000: "),
    ],
)
def test_impossible_settings_are_rejected_by_name(settings, sides):
    with pytest.raises(RecipeError, match=sides):
        bucket_table(multiple=64, **settings)


@given(st.integers(1, 70_000), st.integers(1, 70_000), st.sampled_from(ALIGNMENTS))
def test_a_bucket_off_the_grid_is_rejected_with_one_that_works(height, width, multiple):
    size = Size(height, width)
    assume(height % multiple or width % multiple or max(height, width) > MAX_SIDE)
    with pytest.raises(RecipeError, match=str(size)) as caught:
        explicit_table([size], multiple=multiple)
    offered = Size(*map(int, caught.value.fix.rpartition("=")[2].split("x")))
    assert explicit_table([offered], multiple=multiple).sizes == (offered,)


TABLE = bucket_table(resolution=1024, multiple=64)


@given(sizes, sizes)
def test_the_crop_is_inside_and_in_the_middle(image, bucket):
    placement = place_in(image, bucket)
    resize = placement.resize
    assert is_inside(placement)
    below = resize.height - bucket.height - placement.top
    right = resize.width - bucket.width - placement.left
    assert 0 <= below - placement.top <= 1
    assert 0 <= right - placement.left <= 1


@given(sizes, sizes)
def test_placement_is_symmetric_in_height_and_width(image, bucket):
    upright = place_in(image, bucket)
    turned = place_in(Size(image.width, image.height), Size(bucket.width, bucket.height))
    assert turned.resize == Size(upright.resize.width, upright.resize.height)
    assert (turned.top, turned.left) == (upright.left, upright.top)


@given(sizes, sizes, st.sampled_from(["top", "random"]), st.integers(0, 2**64 - 1))
def test_crop_modes_change_only_the_position(image, bucket, crop, draw):
    centered, placement = place_in(image, bucket), place_in(image, bucket, crop, draw)
    assert (placement.resize, placement.bucket) == (centered.resize, bucket)
    assert is_inside(placement)
    if crop == "top":
        assert (placement.top, placement.left) == (0, centered.left)


def test_random_crops_reach_every_offset():
    image, bucket = Size(64, 80), Size(64, 64)
    lefts = {place_in(image, bucket, "random", draw).left for draw in range(200)}
    assert lefts == set(range(17))
    tops = {place_in(Size(80, 64), bucket, "random", draw << 32).top for draw in range(200)}
    assert tops == set(range(17))


SMALL_TABLES = [
    TABLE,
    bucket_table(resolution=512, multiple=64, max_side=640),
    bucket_table(resolution=256, multiple=8),
]


@given(sizes, st.sampled_from(SMALL_TABLES))
def test_upscaling_can_be_disabled(image, table):
    bucket = table.within(image)
    if bucket is None:
        assert min(image.height, image.width) < table.grid
        return
    resize = place_in(image, bucket).resize
    assert resize.fits(image)
    assert (bucket.height % table.grid, bucket.width % table.grid) == (0, 0)
    assert bucket.area <= table.area
    assert max(bucket.height, bucket.width) <= table.longest
    if table.nearest(image).fits(image):
        assert bucket == table.nearest(image)
    elif max(image.height, image.width) <= min(table.longest, table.area // min(image.height, image.width)):
        assert (image.height - bucket.height, image.width - bucket.width) < (table.grid, table.grid)


def test_explicit_buckets_add_no_smaller_ones():
    table = explicit_table([Size(512, 512), Size(256, 512), Size(128, 128)], multiple=64)
    assert table.within(Size(300, 600)) == Size(256, 512)
    assert table.within(Size(500, 500)) == Size(128, 128)
    assert table.within(Size(100, 500)) is None


@pytest.mark.parametrize(
    ("image", "word"),
    [
        (Size(512, 512), ""),
        (Size(16, 16), ""),
        (Size(15, 15), "too-small"),
        (Size(1, 1), "too-small"),
        (Size(100, 10_000), "extreme-aspect"),
        (Size(10_000, 100), "extreme-aspect"),
    ],
)
def test_reason_names_the_cause(image, word):
    assert unusable(image, TABLE.nearest(image)) == word


def test_crops_that_keep_less_than_a_quarter_are_rejected():
    table = explicit_table([Size(64, 64)], multiple=64)
    assert unusable(Size(100, 400), table.nearest(Size(100, 400))) == ""
    assert unusable(Size(100, 401), table.nearest(Size(100, 401))) == "extreme-aspect"


@given(image=sizes, bucket=sizes)
def test_a_flipped_crop_is_as_far_from_the_other_edge(image, bucket):
    placement = place_in(image, bucket)
    other = flipped(placement)
    assert is_inside(other)
    assert (other.bucket, other.resize, other.top) == (placement.bucket, placement.resize, placement.top)
    assert placement.left + bucket.width + other.left == placement.resize.width
    assert flipped(other) == placement
