"""The GPU benchmark runs without a GPU; figures are of no account here, their places are."""

import json

import numpy as np
import pytest
import torch
from bench_gpu import BUDGETS, bars, main, run_part, table
from gpu_encoders import attention
from gpu_models import MODELS, Scene, encoder_half, images, latents_of
from gpu_text import lengths, sorted_batches
from gpu_timing import chunked

TINY = Scene(device="cpu", tiny=True)
EMPTY = {name: {"rows": [], "error": None, "seconds": 0.0} for name in BUDGETS}


def test_the_parts_chosen_leave_rows_and_the_others_say_so(tmp_path):
    chosen = "calibrate,attention,text"
    assert main(["--tiny", "--parts", chosen, "--json", str(tmp_path / "g.json"), "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "g.json").read_text())
    assert (found["schema"], found["tiny"]) == (1, True)
    assert list(found["parts"]) == list(BUDGETS)
    for name, part in found["parts"].items():
        if name in chosen:
            assert part["error"] is None, part["error"]
            assert part["rows"]
        else:
            assert part["error"] == "not chosen"
    assert {bar["reached"] for bar in found["bars"]} == {None}


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


def test_without_a_device_nothing_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert "nothing measured" in capsys.readouterr().out


def test_a_part_that_fails_is_reported():
    def fails(left):
        raise RuntimeError("no such kernel")

    assert run_part(fails, 5)["error"] == "RuntimeError: no such kernel"


def test_a_part_that_does_not_end_is_stopped():
    def hangs(left):
        while True:
            pass

    assert run_part(hangs, 0.05)["error"].startswith("PartTimeoutError")


def test_bars_are_read_from_the_rows():
    sdxl = {"model": "SDXL KL", "side": 1024, "batch": 4, "variant": "bf16", "img/s": 90.0, "% of ceiling": 55.0}
    qwen = [
        {"model": "Qwen-Image", "side": 1024, "batch": 4, "variant": name, "img/s": rate}
        for name, rate in (("bf16, channels last", 10.0), ("bf16, folded", 25.0))
    ]
    build = {"images": "2 MP", "system": "latentcache", "img/s": 80.0, "efficiency": 0.88}
    loop = {"images": "2 MP", "system": "DataLoader, file per latent", "img/s": 20.0}
    found = EMPTY | {"encoders": {"rows": [sdxl, *qwen]}, "builds": {"rows": [build, loop]}}
    found["memory"] = {"rows": [{"lost": 0}, {"lost": 1}]}
    assert [(bar["found"], bar["reached"]) for bar in bars(found)] == [
        (90.0, True),
        (55.0, True),
        (2.5, True),
        (0.88, False),
        (None, None),
        (4.0, True),
        (1, False),
    ]


def test_a_table_has_every_column():
    assert table([{"a": 1}, {"b": 2.5}]).splitlines() == ["| a | b |", "|---|---|", "| 1 |  |", "|  | 2.5 |"]


def test_chunked_attention_is_attention():
    q, k, v = torch.randn(3, 2, 1, 20, 8)
    assert torch.allclose(chunked(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5)


def test_attention_says_what_a_backend_refuses():
    rows = attention(TINY)
    assert all("ms" in row or "failed" in row for row in rows)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_model_encodes_and_folds(model):
    with torch.inference_mode():
        found = [
            latents_of(
                model,
                encoder_half(model, TINY, torch.float32, last=not fold, fold=fold),
                images(TINY, 1, 64, torch.float32, last=True),
            )
            for fold in (False, model.folds)
        ]
    assert torch.allclose(*found, atol=1e-4)


def test_captions_are_batched_by_length():
    tokens = lengths(500)
    plan = list(sorted_batches(tokens, 4096))
    assert sum(count for count, _ in plan) == 500
    assert all(count * longest <= 4096 for count, longest in plan)
    assert [longest for _, longest in plan] == sorted((longest for _, longest in plan), reverse=True)
    assert np.max(tokens) == plan[0][1]
