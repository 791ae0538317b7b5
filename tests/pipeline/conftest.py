import pytest

from latentcache.pipeline import worker as worker_module


@pytest.fixture
def use_encoder(monkeypatch):
    """Have the next builds use a given encoder."""

    def use(encoder):
        monkeypatch.setattr(worker_module, "open_encoder", lambda description, **_: encoder)
        return encoder

    return use
