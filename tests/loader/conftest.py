import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parents[1]),
    str(Path(__file__).parents[2]),
]  # made_caches, the toy kind

SHAPES = [(64, 96), (96, 64), (80, 80)]


@pytest.fixture(autouse=True, scope="module")
def _toy_kind():
    """Register the toy kind for this module and its child processes.

    Module scope: without ``__init__.py`` a package fixture would last until the end of the session.
    """
    from latentcache.fields import registry

    before = os.environ.get(registry.VARIABLE)
    registry.register(["tests.fields.edge_map:EdgeMap"])
    yield
    os.environ.pop(registry.VARIABLE)
    if before is not None:
        os.environ[registry.VARIABLE] = before
    registry.field_kinds.cache_clear()


@pytest.fixture(scope="session")
def seventeen(tmp_path_factory):
    """A cache of 17 images in three buckets of 6, 6 and 5."""
    from made_caches import images

    return images(tmp_path_factory.mktemp("seventeen") / "cache", [SHAPES[number % 3] for number in range(17)])


@pytest.fixture
def many(seventeen):
    from made_caches import opened

    return opened(seventeen)
