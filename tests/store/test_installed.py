from importlib import metadata

import numpy as np
import pytest

from latentcache.store import installed as installed_module
from latentcache.store.installed import installed_version


@pytest.fixture(autouse=True)
def _asked_anew():
    installed_version.cache_clear()
    yield
    installed_version.cache_clear()


def test_each_library_is_looked_for_once(monkeypatch):
    asked = []

    def version(name):
        asked.append(name)
        return metadata.version(name)

    monkeypatch.setattr(installed_module, "version", version)
    assert installed_version("numpy") == installed_version("numpy") == np.__version__
    assert asked == ["numpy"]


def test_what_is_not_there_has_words():
    assert installed_version("no-such-library-anywhere") == "not installed"
