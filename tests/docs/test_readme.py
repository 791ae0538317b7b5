import json
import warnings

import pytest
import torch
from make_images import make_images
from page_blocks import ROOT, blocks

from latentcache import BuildSettings, build_cache

README = ROOT / "README.md"
LINES = [block for block in blocks(README) if block.language == "python"]


def test_the_five_lines_train_a_model(tmp_path, monkeypatch):
    block = LINES[0]
    make_images(tmp_path / "images", count=10, side=128)
    fields = {"latents": {"resolutions": (128,), "bucket_step": 16}}
    build_cache(BuildSettings(data=tmp_path / "images", fields=fields))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Conv2d(4, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses, shapes = [], []

    def train_step(latents, captions):
        assert len(latents) == len(captions) == 4
        assert all(captions)
        target = latents.float()
        loss = torch.nn.functional.mse_loss(model(target), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        shapes.append(tuple(latents.shape))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*demo encoder")
        names = {"train_step": train_step}
        exec(compile("\n" * (block.line - 1) + block.text, str(README), "exec"), names)
    assert len(losses) == 2 * len(names["loader"])
    assert len(set(shapes)) > 1
    half = len(losses) // 2
    assert sum(losses[half:]) < sum(losses[:half])


def test_the_five_lines_for_tokens_read_every_row_twice(tmp_path, monkeypatch):
    texts = [f"{number} " + "word " * 400 for number in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data, out = tmp_path / "texts.jsonl", tmp_path / "texts.latentcache"
    build_cache(BuildSettings(data=data, out=out, fields={"input_ids": {"tokenizer": "stub"}}))
    monkeypatch.chdir(tmp_path)
    shapes, seen = [], 0

    def train_step(input_ids, labels, position_ids, use_cache):
        nonlocal seen
        shapes.append(tuple(input_ids.shape))
        seen += int((labels != -100).sum())

    names = {"train_step": train_step}
    exec(compile("\n" * (LINES[1].line - 1) + LINES[1].text, str(README), "exec"), names)
    assert shapes == [(4, 4096)] * 2 * len(names["loader"])
    assert seen >= 2 * sum(
        len(text) for text in texts
    )  # and an end of text for the first token, which is not learned


@pytest.mark.parametrize("block", LINES)
def test_quick_start_has_five_lines(block):
    lines = [line for line in block.text.splitlines() if line.strip() and not line.startswith("from ")]
    assert len(lines) == 5


def test_readme_is_short():
    assert len(README.read_text("utf-8").splitlines()) <= 120
