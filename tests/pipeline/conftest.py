import os
from unittest.mock import patch

import pytest
from small_builds import CASES

from latentcache.fields import registry

#: The toy kind of the tests of fields, found as one of an installed package would be.
EDGE_MAP = "tests.fields.edge_map:EdgeMap"


@pytest.fixture(autouse=True)
def toy_kind(monkeypatch):
    """The toy kind is known to this process and its workers."""
    monkeypatch.setenv(registry.VARIABLE, os.environ.get(registry.VARIABLE, ""))
    registry.register([EDGE_MAP])
    yield
    registry.field_kinds.cache_clear()


@pytest.fixture(params=list(CASES))
def case(request):
    """One kind of field with data for it."""
    return CASES[request.param]


@pytest.fixture
def trusted(monkeypatch):
    """Every stat memo can be trusted at once, however young the file is."""
    monkeypatch.setattr("latentcache.identity.stat.RACY_NS", 0)


@pytest.fixture
def no_runs():
    """Within ``with no_runs():`` a build that starts a worker fails."""
    return lambda: patch("latentcache.pipeline.build.Run", side_effect=AssertionError("a worker was started"))
