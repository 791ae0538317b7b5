import json

import bench_read
import numpy as np
import pytest
import read_limits
import torch

from latentcache import open_cache


@pytest.mark.parametrize("cache", ["cache", "three"])
def test_the_synthetic_caches_have_bytes_and_scale(cache, tmp_path):
    data = read_limits.payloads(32, 40)
    read_limits.write_caches(tmp_path, 32, data)
    opened = open_cache(tmp_path / cache)
    assert len(opened.buckets) == (3 if cache == "three" else 1)
    assert opened.recipe().read_time.affine["kind"] == "scale-shift"
    served = {}
    for batch in opened.read(scaled=False).loader(batch_size=8, remainder="partial"):
        served |= dict(zip(batch["names"], batch["latents"], strict=True))
    assert len(served) == 40
    for name, latents in served.items():
        found = latents.view(torch.uint8).numpy().reshape(-1)
        assert np.array_equal(found, data[int(name[-10:-4])][: len(found)])


@pytest.mark.parametrize("trimmed", [False, True])
def test_embeddings_beside_latents_are_padded_to_the_length_of_the_model(trimmed, tmp_path):
    prompts = read_limits.Prompts(kib=32, tokens=20, width=6, trimmed=trimmed)
    read_limits.write_prompts(tmp_path / "cache", prompts, 24)
    for batch in open_cache(tmp_path / "cache").loader(batch_size=8):
        assert batch["latents"].nbytes + batch["prompt_embeds"].nbytes == 8 * prompts.size
        assert ("prompt_embeds_mask" in batch) == trimmed
        if trimmed:
            mask = batch["prompt_embeds_mask"]
            assert 8 <= int(mask.sum(1).min()) < 20
            assert not batch["prompt_embeds"][~mask].any()
            assert batch["prompt_embeds"][mask].any(1).all()


@pytest.mark.slow
def test_every_candidate_is_measured(tmp_path, capsys):
    words = ["--kib", "32", "--megabytes", "4", "--rounds", "1", "--json", str(tmp_path / "times.json")]
    bench_read.main(words)
    found = json.loads((tmp_path / "times.json").read_text())["kib"]["32"]
    assert next(iter(found["shuffled"])) == "loader()"
    assert set(found["shuffled"]) > {*read_limits.WAYS, "memcpy", "LMDB get and copy"}
    assert set(found["sequential"]) > {"memcpy", "loader.batch()", "LMDB get and copy"}
    assert {"loader()", "cat, loader()", "LMDB get and copy"} <= set(found["cold"])
    assert all(len(times) == 1 for order in ("shuffled", "sequential") for times in found[order].values())
    printed = capsys.readouterr().out
    assert "| memcpy | 1.00 (1.00 to 1.00) |" in printed
    assert "packed rows" in printed
