"""The benchmark runs to its end on a few batches and says what it measured."""

import json

import bench_loader
import numpy as np
import pytest
import torch

from latentcache import open_cache


def test_the_made_cache_holds_the_bytes(tmp_path):
    data = bench_loader.payloads(32 << 10, 40)
    bench_loader.make_cache(tmp_path / "cache", bench_loader.PAYLOADS[32], data)
    served = {}
    for batch in open_cache(tmp_path / "cache").loader(batch_size=8):
        served |= dict(zip(batch["names"], batch["latents"], strict=True))
    assert len(served) == 40
    for name, latents in served.items():
        assert np.array_equal(latents.view(torch.uint8).numpy().reshape(-1), data[int(name[-10:-4])])


@pytest.mark.slow
def test_it_measures_every_candidate(tmp_path, capsys):
    words = ["--kib", "32", "--megabytes", "4", "--rounds", "1", "--json", str(tmp_path / "times.json")]
    bench_loader.main(words)
    report = json.loads((tmp_path / "times.json").read_text())
    assert set(report["seconds_per_batch"]["32"]) > {"memcpy", "loader()", "loader(mapped=True)"}
    assert all(len(times) == 1 for times in report["seconds_per_batch"]["32"].values())
    assert "| memcpy | 1.00 (1.00 to 1.00) |" in capsys.readouterr().out
