import inspect
import json

import pytest
from small_tokens import build, write_texts

from latentcache.cli.build import build as command
from latentcache.cli.token_flags import holds_tokens, template_options, token_options
from latentcache.errors import UsageError


def test_what_was_not_said_is_not_there():
    assert token_options() == {}
    assert token_options(tokenizer="stub", add_eos=False, workers=0, dataset=["a"]) == {
        "tokenizer": "stub",
        "add_eos": False,
        "workers": 0,
        "datasets": ("a",),
    }


def test_build_has_the_flags_of_both_kinds_once():
    names = list(inspect.signature(command).parameters)
    assert {"data", "model", "tokenizer", "resolution", "workers", "as_json"} <= set(names)
    assert len(names) == len(set(names))


def test_options_of_templates():
    assert template_options(["b=x y", "a=false"]) == (("a", "false"), ("b", '"x y"'))
    with pytest.raises(UsageError, match="no value"):
        template_options(["a"])


def test_which_caches_are_of_tokens(tmp_path):
    assert not holds_tokens(tmp_path)
    build(write_texts(tmp_path / "a.jsonl", ["one"]), tmp_path / "c")
    assert holds_tokens(tmp_path / "c")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "BUILDING").write_text(json.dumps({"kind": "tokens"}))
    assert holds_tokens(tmp_path / "d")
    (tmp_path / "d" / "BUILDING").write_text("[]")
    assert not holds_tokens(tmp_path / "d")


def test_shares_are_of_tokens(run, tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one", "two"])
    assert token_options(shard="0/2", take_from=[tmp_path]) == {"share": "0/2", "take_from": (tmp_path,)}
    found = run("build", data, "--tokenizer", "stub", "--shard", "2/2", "--json")
    assert (found.status, found.error["slug"]) == (2, "usage")
    assert not (tmp_path / "a.jsonl.latentcache").exists()
    for number in range(2):
        done = run(
            "build", data, "--tokenizer", "stub", "--shard", f"{number}/2", "--out", tmp_path / f"part{number}"
        )
        assert (done.status, f"share {number}/2" in done.out) == (0, True)
    words = ["--take-from", tmp_path / "part0", "--take-from", tmp_path / "part1"]
    assert "2 taken over, 0 reused" in run("build", data, "--tokenizer", "stub", *words, "--dry-run").out
    done = run("build", data, "--tokenizer", "stub", *words)
    assert "0 tokenised, 2 taken over, 0 reused" in done.out
    assert "2 to take over" in done.err
