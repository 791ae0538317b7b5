"""Builds that are killed, failed, stopped and cut from power; the cache is checked and completed.

``torture.py`` runs each row, because it forks; a process with torch and threads must not. It prints the failed case
and seed; ``python tests/journeys/torture.py`` with the same arguments repeats it.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import ROOT

CANNOT = 77
slow = pytest.mark.slow


@pytest.fixture
def folder():
    """In /dev/shm if available: the disk model covers power cuts."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def run_torture(folder, *words):
    command = [sys.executable, str(Path(__file__).with_name("torture.py")), words[0], str(folder), *words[1:]]
    around = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
    if done.returncode == CANNOT:
        pytest.skip(done.stdout)
    print(done.stdout)  # noqa: T201 - a figure of docs/reference/reliability.md
    return done


@pytest.mark.parametrize("words", [
    ("failpoints", "first"),
    ("kills", "6", "1"),
    ("parts", "6", "1"),
    ("signals", "2", "1"),
    ("cuts", "6", "1"),
    ("faults", "3", "1"),
    pytest.param(("failpoints", "all"), marks=slow),
    pytest.param(("kills", "200", "2"), marks=slow),
    pytest.param(("parts", "100", "2"), marks=slow),
    pytest.param(("signals", "100", "2"), marks=slow),
    pytest.param(("cuts", "152", "2"), marks=slow),
    pytest.param(("faults", "0", "2"), marks=slow),
], ids=" ".join)  # fmt: skip
def test_acknowledged_entries_survive_and_the_next_build_completes(folder, words):
    done = run_torture(folder, *words)
    assert done.returncode == 0, done.stderr
    assert " cases, 0 failed" in done.stdout


@slow
def test_a_store_without_sync_fails(folder):
    done = run_torture(folder, "careless", "40", "1")
    assert done.returncode == 1
    assert "40 cases, " in done.stdout
    assert "acknowledged keys are lost" in done.stderr
