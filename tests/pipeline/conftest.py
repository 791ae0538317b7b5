import pytest

from latentcache.pipeline import build as build_module


@pytest.fixture
def use_encoder(monkeypatch):
    """Have the next builds use a given encoder."""

    def use(encoder):
        monkeypatch.setattr(build_module, "open_encoder", lambda description, **_: encoder)
        return encoder

    return use
