"""The benchmark runs to its end on a few batches and says what it measured."""

import json

import bench_read
import numpy as np
import pytest
import torch

from latentcache import open_cache


def test_the_made_cache_holds_the_bytes(tmp_path):
    data = bench_read.payloads(32 << 10, 40)
    bench_read.make_cache(tmp_path / "cache", bench_read.PAYLOADS[32], data)
    served = {}
    for batch in open_cache(tmp_path / "cache").loader(batch_size=8):
        served |= dict(zip(batch["names"], batch["latents"], strict=True))
    assert len(served) == 40
    for name, latents in served.items():
        assert np.array_equal(latents.view(torch.uint8).numpy().reshape(-1), data[int(name[-10:-4])])


@pytest.mark.slow
def test_it_measures_every_candidate(tmp_path, capsys):
    words = ["--kib", "32", "--megabytes", "4", "--rounds", "1", "--json", str(tmp_path / "times.json")]
    bench_read.main(words)
    found = json.loads((tmp_path / "times.json").read_text())["kib"]["32"]
    assert set(found["shuffled"]) > {"memcpy", "loader()", "loader(mapped=True)", "LMDB get and copy"}
    assert set(found["sequential"]) > {"memcpy", "loader.batch()", "LMDB get and copy"}
    assert {"loader()", "warm(), loader()", "LMDB get and copy"} <= set(found["cold"])
    assert all(len(times) == 1 for order in ("shuffled", "sequential") for times in found[order].values())
    assert "| memcpy | 1.00 (1.00 to 1.00) |" in capsys.readouterr().out
