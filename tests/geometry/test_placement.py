import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.geometry.sizes import Size, bucket_table, explicit_table, flipped, place_in, unusable

sides = st.integers(1, 20_000)
sizes = st.builds(Size, sides, sides)


def is_inside(placement):
    bucket, resize = placement.bucket, placement.resize
    low = placement.top >= 0 and placement.left >= 0
    return low and placement.top + bucket.height <= resize.height and placement.left + bucket.width <= resize.width


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
    centered, found = place_in(image, bucket), place_in(image, bucket, crop, draw)
    assert (found.resize, found.bucket) == (centered.resize, bucket)
    assert is_inside(found)
    if crop == "top":
        assert (found.top, found.left) == (0, centered.left)


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
