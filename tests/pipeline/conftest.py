import os
from unittest.mock import patch

import pytest
from small_builds import CASES

from latentcache.fields import registry

#: The toy kind of tests/fields, registered like that of an installed package.
EDGE_MAP = "tests.fields.edge_map:EdgeMap"


@pytest.fixture(autouse=True)
def toy_kind(monkeypatch):
    """Register the toy kind for this process and its workers."""
    monkeypatch.setenv(registry.VARIABLE, os.environ.get(registry.VARIABLE, ""))
    registry.register([EDGE_MAP])
    yield
    registry.field_kinds.cache_clear()


@pytest.fixture(params=list(CASES))
def case(request):
    return CASES[request.param]


@pytest.fixture
def trusted(monkeypatch):
    """Trust every stat memo at once, whatever the age of its file."""
    monkeypatch.setattr("latentcache.sources.known.RACY_NS", 0)


@pytest.fixture
def no_runs():
    """Inside ``with no_runs():`` a build that starts a worker fails."""
    return lambda: patch("latentcache.pipeline.build.Run", side_effect=AssertionError("a worker was started"))
