import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.geometry.sizes import Box, Size, ceil_div, floor_to, latent_size

sides = st.integers(1, 65_535)
sizes = st.builds(Size, sides, sides)


def test_size_is_height_first():
    size = Size(88, 136)
    assert (size.height, size.width, size.area, str(size)) == (88, 136, 11_968, "88x136")


@pytest.mark.parametrize(("height", "width"), [(0, 1), (1, 0), (-8, 8)])
def test_a_size_without_pixels_is_rejected(height, width):
    with pytest.raises(ValueError, match=f"{height}x{width}"):
        Size(height, width)


@given(sizes)
def test_a_size_cannot_be_changed(size):
    with pytest.raises((AttributeError, TypeError)):
        size.height = 1


@given(st.integers(1, 10**12), st.integers(1, 10**6))
def test_ceil_div_is_the_smallest_integer_not_below(numerator, denominator):
    quotient = ceil_div(numerator, denominator)
    assert (quotient - 1) * denominator < numerator <= quotient * denominator


@given(st.integers(0, 10**9), st.integers(1, 4096))
def test_floor_to_is_the_largest_multiple_not_above(value, multiple):
    rounded = floor_to(value, multiple)
    assert rounded % multiple == 0
    assert rounded <= value < rounded + multiple


@given(st.integers(1, 500), st.integers(1, 500), st.sampled_from([1, 8, 16, 32]))
def test_latent_size_divides_exactly(height, width, factor):
    assert latent_size(Size(height * factor, width * factor), factor) == Size(height, width)


def test_latent_size_rejects_what_never_enters_a_table():
    with pytest.raises(ValueError, match="704x1090"):
        latent_size(Size(704, 1090), 8)


@given(sizes, st.integers(-50, 50), st.integers(-50, 50), sizes)
def test_a_box_fits_when_all_its_corners_do(outer, top, left, inner):
    rows, columns = range(outer.height), range(outer.width)
    corners_inside = all(row in rows for row in (top, top + inner.height - 1)) and all(
        column in columns for column in (left, left + inner.width - 1)
    )
    assert Box(top=top, left=left, size=inner).fits(outer) is corners_inside


def test_a_box_of_the_full_image_fits_and_one_pixel_more_does_not():
    assert Box(top=0, left=0, size=Size(4, 6)).fits(Size(4, 6))
    assert not Box(top=0, left=1, size=Size(4, 6)).fits(Size(4, 6))
    assert not Box(top=1, left=0, size=Size(4, 6)).fits(Size(4, 6))
