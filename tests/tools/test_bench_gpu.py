"""The GPU benchmark runs without a GPU; only the shape of its output is checked."""

import json

import pytest
from bench_gpu import BUDGETS, main
from gpu_models import MODELS


@pytest.mark.slow
def test_every_part_runs(tmp_path):
    assert main(["--tiny", "--json", str(tmp_path / "gpu.json"), "--markdown", str(tmp_path / "gpu.md")]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [part["error"] for part in found["parts"].values()] == [None] * len(BUDGETS)
    encoders, builds = found["parts"]["encoders"]["rows"], found["parts"]["builds"]["rows"]
    assert {row["model"] for row in encoders} == {model.name for model in MODELS}
    assert not [row for row in encoders if "failed" in row]
    assert {"encoder alone", "latentcache"} < {row["system"] for row in builds}
    assert [row["lost"] for row in found["parts"]["memory"]["rows"]] == [0, 0]
    assert all(row["halvings"] for row in found["parts"]["memory"]["rows"])
    assert "### bars" in (tmp_path / "gpu.md").read_text()
