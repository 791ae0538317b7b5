"""Settings for all tests; property tests have no deadline, because the machine may be busy."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from in_threads import in_threads

from latentcache.fields.registry import VARIABLE, field_kinds
from latentcache.store import gather

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # otherwise every child process would ignore it, too

# Child processes share compiled bytecode: this saves a third of the time of a short command.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Test processes share the cores: OpenMP threads that wait for each other slow down training.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "latentcache", max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("latentcache")


@pytest.fixture(autouse=True)
def kinds_of_this_test_only():
    """Forget field kinds that a test registered."""
    before = os.environ.get(VARIABLE)
    yield
    if os.environ.get(VARIABLE) != before:
        os.environ.pop(VARIABLE, None)
        os.environ.update({} if before is None else {VARIABLE: before})
        field_kinds.cache_clear()


@pytest.fixture
def threads():
    """Builds of this test have no worker processes."""
    with in_threads():
        yield


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Compile the library with the rule of the Makefile."""
    if not shutil.which("make") or not shutil.which("cc"):
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("native") / "_gather.so"
    subprocess.run(["make", "-s", f"NATIVE={path}", "native"], cwd=Path(__file__).parents[1], check=True)
    return path


@pytest.fixture(params=["python", "compiled"])
def each_way(request, monkeypatch):
    """Run the test without and with the compiled library."""
    found = gather.compiled(request.getfixturevalue("library")) if request.param == "compiled" else None
    monkeypatch.setattr(gather, "LIBRARY", found)
    return request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests, and those that need a GPU or trainers, unless ``-m`` or a test name selects them."""
    if config.getoption("-m") or any("::" in word for word in config.args):
        return
    items[:] = [
        item
        for item in items
        if not {"slow", "gpu", "peers", "browser"} & {mark.name for mark in item.iter_markers()}
    ]


def pytest_collection_finish() -> None:
    """Freeze the imported objects: each garbage collection takes a second less."""
    gc.collect()
    gc.freeze()
