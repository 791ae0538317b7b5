import json

import pytest
from datasets import load_from_disk
from small_cache import build, draw_four

KEYS = {
    "schema", "command", "exit_code", "error", "cache", "out", "format", "for", "view", "max_length", "rows", "fill",
    "tokens", "tokens_left",
}  # fmt: skip


@pytest.fixture
def tokens(run, tmp_path):
    texts = [f"text {number} " * (number % 5 + 1) for number in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert run("build", tmp_path / "data.jsonl", "--tokenizer", "stub", "--out", tmp_path / "cache").status == 0
    return tmp_path / "cache"


def test_the_keys_of_the_object(run, tokens, tmp_path):
    value = run("export", tokens, tmp_path / "out", "--length", 64, "--validation", 0.2, "--json").json
    assert set(value) == KEYS
    assert value["rows"]["train"] + value["rows"]["validation"] == 40
    found = load_from_disk(str(tmp_path / "out"))
    assert {name: len(rows) for name, rows in found.items()} == value["rows"]
    assert {len(row) for row in found["train"]["input_ids"]} == {64}


@pytest.mark.parametrize("trainer", ["plain", "llama-factory", "trl", "unsloth", "axolotl"])
def test_it_says_what_comes_next(run, tokens, tmp_path, trainer):
    done = run("export", tokens, tmp_path / "out", "--length", 64, "--for", trainer)
    assert done.status == 0
    assert "train: 40 rows of 64 tokens" in done.out
    assert str(tmp_path / "out") in done.out.splitlines()[-1]


@pytest.mark.parametrize("view", ["packed", "blocks"])
def test_other_views(run, tokens, tmp_path, view):
    value = run("export", tokens, tmp_path / "out", "--length", 128, "--view", view, "--json").json
    assert value["rows"]["train"] < 40
    assert value["fill"]["train"] > 0.85
    assert "label" in load_from_disk(str(tmp_path / "out"))["train"].column_names[1] or view == "blocks"


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("--to", "csv"), "--to hf-disk|megatron|datatrove|mds"),
        (("--view", "torn"), "--view padded|packed|blocks"),
        (("--length", "60"), "--length 56 or --length 64"),
        (("--for", "nobody"), "--for plain|llama-factory|trl|axolotl|unsloth"),
        (("--for", "axolotl", "--view", "packed"), "--view padded"),
        (("--for", "trl", "--padding-side", "left"), "pad on the right, or export the packed view"),
        (("--view", "packed", "--padding-side", "left"), "leave it out: full rows have no side"),
        (("--view", "blocks", "--overflow", "drop"), "leave it out: blocks cut documents anyway"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(run, tokens, tmp_path, words, fix):
    done = run(
        "export", tokens, tmp_path / "out", *(() if "--length" in words else ("--length", 64)), *words, "--json"
    )
    assert done.status == 2
    assert done.error["fix"] == fix
    assert not (tmp_path / "out").exists()


def test_a_cache_of_pictures_has_no_rows(run, tmp_path):
    build(draw_four(tmp_path / "pictures"), tmp_path / "cache")
    done = run("export", tmp_path / "cache", tmp_path / "out", "--length", 64, "--json")
    assert done.status in (2, 3)
    assert "open_cache" in str(done.error)
