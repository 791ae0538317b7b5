import json

import pytest
from datasets import load_from_disk

from latentcache.export.folder import FILES, METADATA
from latentcache.export.settings import FORMATS

KEYS = {
    "schema", "command", "exit_code", "error", "cache", "out", "format", "for", "layout", "length", "rows",
    "packing_efficiency", "tokens", "tokens_dropped", "part",
}  # fmt: skip


@pytest.fixture
def tokens(run, tmp_path):
    texts = [f"text {number} " * (number % 5 + 1) for number in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert run("build", tmp_path / "data.jsonl", "--tokenizer", "stub", "--out", tmp_path / "cache").status == 0
    return tmp_path / "cache"


def test_json_keys(run, tokens, tmp_path):
    value = run("export", tokens, tmp_path / "out", "--pad", 64, "--validation", 0.2, "--json").json
    assert set(value) == KEYS
    assert value["rows"]["train"] + value["rows"]["validation"] == 40
    found = load_from_disk(str(tmp_path / "out"))
    assert {name: len(rows) for name, rows in found.items()} == value["rows"]
    assert {len(row) for row in found["train"]["input_ids"]} == {64}


@pytest.mark.parametrize(
    ("words", "summary", "last_line"),
    [
        (("--to", "megatron"), "train: 40 documents", "--train-data-path {out}/train"),
        (("--to", "datatrove"), "every document ends with id 257", "'{out}/train', seq_len=N, token_size=2)"),
        (("--to", "mds", "--chunk", 64), "rows of 64 tokens", "local: {out}, split: train, max_seq_len: 64"),
        (("--to", "mds", "--pad", 64), "rows of up to 64 tokens", "max_seq_len: 64"),
    ],
)
def test_the_text_ends_with_the_next_step(run, tokens, tmp_path, words, summary, last_line):
    done = run("export", tokens, tmp_path / "out", *words)
    assert done.status == 0
    assert summary in done.out
    assert last_line.format(out=tmp_path / "out") in done.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (
            ("--to", "csv"),
            "--to hf-disk|megatron|datatrove|mds|safetensors|webdataset|kohya|onetrainer|simpletuner|musubi"
            "|ai-toolkit",
        ),
        (("--pad", "60"), "rows of 56 or 64 tokens"),
        (("--pad", "64", "--pack", "64"), "--pad N or --pack N or --chunk N"),
        (("--for", "nobody"), "--for plain|llama-factory|trl|axolotl|unsloth"),
        (("--for", "axolotl", "--pack", "64"), "--pad N"),
        (("--chunk", "64", "--overflow", "drop"), "leave it out"),
    ],
)
def test_invalid_values_are_rejected_before_writing(run, tokens, tmp_path, words, fix):
    length = () if {"--pad", "--pack", "--chunk"} & set(words) else ("--pad", 64)
    done = run("export", tokens, tmp_path / "out", *length, *words, "--json")
    assert done.status == 2
    assert done.error["fix"] == fix
    assert not (tmp_path / "out").exists()


VALUES = {"pad": 64, "pack": 64, "for": "plain", "overflow": "drop"}


@pytest.mark.parametrize("form", ["megatron", "datatrove", "mds"])
@pytest.mark.parametrize("flag", VALUES)
def test_a_flag_of_another_format_is_rejected(run, tokens, tmp_path, form, flag):
    length = ("--pad", 64) if form == "mds" and flag not in ("pad", "pack") else ()
    done = run("export", tokens, tmp_path / "out", "--to", form, *length, f"--{flag}", VALUES[flag], "--json")
    if flag in FORMATS[form]:
        assert done.status == 0
        return
    what = f"--{flag}: not available with --to {form}"
    assert (done.status, done.error["what"], done.error["fix"]) == (2, what, f"leave --{flag} out")
    assert not (tmp_path / "out").exists()


def test_a_missing_pyarrow_is_reported_before_anything_starts(run, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr("latentcache.export.settings.find_spec", lambda name: None)
    done = run("export", tokens, tmp_path / "out", "--pad", 64, "--json")
    assert (done.status, done.error["slug"]) == (2, "extra-missing")
    assert "latentcache[hf]" in done.error["fix"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "data.jsonl"]
    assert run("export", tokens, tmp_path / "out", "--to", "megatron").status == 0
    assert "needs pyarrow" in " ".join(run("export", "--help").out.split())


def test_an_image_cache_is_rejected_with_a_command(run, cache, tmp_path):
    error = run("export", cache, tmp_path / "out", "--pad", 64, "--json").error
    assert error["what"].endswith(": holds no tokens")
    assert error["fix"] == "export a cache of `latentcache build DATA --tokenizer PATH`"


def test_only_a_folder_that_export_wrote_is_offered_for_deletion(run, tokens, tmp_path):
    mine, words = tmp_path / "my images", ("--pad", 64, "--json")
    mine.mkdir()
    (mine / "a.png").write_bytes(b"an image")
    assert run("export", tokens, mine, *words).error["fix"] == "give another folder"
    (mine / METADATA).write_text("{}")
    assert run("export", tokens, mine, *words).error["fix"] == "give another folder"
    out = tmp_path / "out"
    run("export", tokens, out, *words)
    fix = run("export", tokens, out, *words).error["fix"]
    assert fix == f"latentcache export --undo {out}, or give another folder"
    (out / "notes.txt").write_text("of the user")
    assert run("export", "--undo", out).status == 0
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_verify_knows_the_folder_of_rows(run, tokens, tmp_path):
    out = tmp_path / "out"
    assert run("export", tokens, out, "--to", "megatron").status == 0
    assert run("verify", out).status == 0
    assert "does not list images" in run("verify", out, "--data", tmp_path / "data.jsonl", "--json").error["what"]
    (out / "train.idx").write_bytes(b"")
    found = run("verify", out, "--json")
    assert (found.status, found.json["findings"][0]["path"]) == (1, "train.idx")
    assert FILES not in [finding["path"] for finding in found.json["findings"]]
