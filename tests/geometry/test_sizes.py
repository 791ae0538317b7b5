import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.geometry.sizes import Box, Size, latent_size

sides = st.integers(1, 65_535)
sizes = st.builds(Size, sides, sides)


@pytest.mark.parametrize(("height", "width"), [(0, 1), (1, 0), (-8, 8)])
def test_a_size_without_pixels_is_rejected(height, width):
    with pytest.raises(ValueError, match=f"{height}x{width}"):
        Size(height, width)


@given(st.integers(1, 500), st.integers(1, 500), st.sampled_from([1, 8, 16, 32]))
def test_latent_size_divides_exactly(height, width, factor):
    assert latent_size(Size(height * factor, width * factor), factor) == Size(height, width)


@given(sizes, st.integers(-50, 50), st.integers(-50, 50), sizes)
def test_a_box_fits_when_all_its_corners_do(outer, top, left, inner):
    rows, columns = range(outer.height), range(outer.width)
    corners_inside = all(row in rows for row in (top, top + inner.height - 1)) and all(
        column in columns for column in (left, left + inner.width - 1)
    )
    assert Box(top=top, left=left, size=inner).fits(outer) is corners_inside
