"""Settings for all tests: property tests are judged by what they find, not by how busy the machine is."""

import signal

import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else every process of a test would ignore it, too

settings.register_profile("latentcache", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("latentcache")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without ``-m`` and without a test's own name, what takes minutes or a GPU stays out."""
    if config.getoption("-m") or any("::" in word for word in config.args):
        return
    items[:] = [item for item in items if not {"slow", "gpu"} & {mark.name for mark in item.iter_markers()}]
