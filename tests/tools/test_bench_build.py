"""The benchmark runs to its end on a few pictures and checks that builds did what it times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_build.py"


@pytest.mark.slow
def test_it_measures_every_system(tmp_path):
    command = [sys.executable, TOOL, "--count", "6", "--rounds", "1", "--json", tmp_path / "times.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("latentcache build") == 2
    results = json.loads((tmp_path / "times.json").read_text())["results"]
    assert [result["family"] for result in results] == ["demo", "AutoencoderKL"]
    assert all(len(result["seconds"]["build"]) == 1 for result in results)
