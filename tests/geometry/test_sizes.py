import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.geometry.sizes import Size, latent_size


@pytest.mark.parametrize(("height", "width"), [(0, 1), (1, 0), (-8, 8)])
def test_a_size_without_pixels_is_rejected(height, width):
    with pytest.raises(ValueError, match=f"{height}x{width}"):
        Size(height, width)


@given(st.integers(1, 500), st.integers(1, 500), st.sampled_from([1, 8, 16, 32]))
def test_latent_size_divides_exactly(height, width, factor):
    assert latent_size(Size(height * factor, width * factor), factor) == Size(height, width)
