import made_entries
import pytest


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    made_entries.install(monkeypatch)


@pytest.fixture
def paths(tmp_path):
    return made_entries.make_cache(tmp_path / "cache")
