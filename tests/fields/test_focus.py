"""Focus crops follow the rule of sd-scripts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from latentcache.fields.clips import focus_steps
from latentcache.geometry.placement import FOCUS_STEPS, place_in
from latentcache.geometry.sizes import Size

sides, fractions = st.integers(16, 400), st.floats(0, 1, width=32)


def step(image: Size, bucket: Size, point: tuple[float, float]) -> int:
    rows = (np.array([[one.height, one.width]]) for one in (image, bucket))
    return int(focus_steps(*rows, np.array([point], dtype=np.float32))[0])


def kohya_start(length: int, side: int, point: float) -> int:
    """Start of the crop as ``crop_target`` computes it (sd-scripts 48d368f, ``library/train_util.py``)."""
    return max(0, min(int(point + 0.5) - side // 2, length - side))


@given(st.builds(Size, sides, sides), st.builds(Size, sides, sides), fractions, fractions)
def test_a_point_is_in_the_middle_of_its_crop(image, bucket, x, y):
    placed = place_in(image, bucket, "focus", step(image, bucket, (x, y)))
    resize = placed.resize
    for length, side, start, point in (
        (resize.height, bucket.height, placed.top, y),
        (resize.width, bucket.width, placed.left, x),
    ):
        assert abs(start - kohya_start(length, side, point * length)) <= 2 + (length - side) / FOCUS_STEPS


def test_pixels_and_fractions_agree_and_the_default_is_centered():
    image, bucket = Size(100, 400), Size(100, 100)
    assert step(image, bucket, (300, 20)) == step(image, bucket, (0.75, 0.2)) == round((300 - 50) / 300 * 126)
    assert step(image, bucket, (-1, -1)) == FOCUS_STEPS // 2
    assert step(image, bucket, (0, 0)) == 0
    assert step(image, bucket, (1, 1)) == step(image, bucket, (5000, 1)) == FOCUS_STEPS
    assert step(image, Size(50, 200), (1, 1)) == FOCUS_STEPS // 2  # nothing is cut
