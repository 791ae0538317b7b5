"""Commands and images of the tests of trainers."""

import pytest
from captioned_images import TEN, draw_captioned, draw_sets
from small_cache import run

__all__ = ["run"]


@pytest.fixture(scope="session")
def ten(tmp_path_factory):
    """Ten images in three buckets, with captions."""
    return draw_captioned(tmp_path_factory.mktemp("ten"), TEN)


@pytest.fixture(scope="session")
def sets(tmp_path_factory):
    """Ten images in several buckets, in two folders of kohya with repeats."""
    return draw_sets(tmp_path_factory.mktemp("sets"))
