import json
import shlex

import pytest
from made_templates import CHATML, untagged
from made_tokenizers import byte_level, save
from small_tokens import opened, texts, write_texts

LINES = texts(200, longest=4000)


@pytest.fixture
def data(run, tmp_path):
    records = write_texts(tmp_path / "a.jsonl", LINES)
    assert run("build", records, "--tokenizer", "stub", "--workers", "0").status == 0
    return records


@pytest.fixture
def cache(data):
    return data.with_name("a.jsonl.latentcache")


def found_by(run, cache, *words):
    done = run("verify", cache, *words, "--json")
    value = done.json
    return done.status, {name: number for name, number in value["counts"].items() if number}, value["items"]


def test_a_changed_tokenizer_is_reported_by_part(run, tmp_path):
    model = save(byte_level(), tmp_path / "model", roles={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    run("build", write_texts(tmp_path / "a.jsonl", ["one"]), "--tokenizer", model, "--out", tmp_path / "cache")
    changes = {"tokenizer": {"normalizer": {"type": "NFC"}}, "tokenizer_config": {"pad_token": "<|im_end|>"}}
    for name, change in changes.items():
        path = model / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")
    done = run("verify", tmp_path / "cache", "--json").json
    assert [difference["setting"] for difference in done["recipe_diff"]] == ["normalizer", "special_tokens"]
    (item,) = done["items"]
    assert item["reason"] == "recipe:normalizer"
    assert "special_tokens" in item["expected"]
    assert "special_tokens" in item["found"]


def test_the_fix_for_another_tokenizer_names_it_and_works(run, data, cache, tmp_path):
    model = save(byte_level(), tmp_path / "a model", roles={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    status, counts, items = found_by(run, cache, "--tokenizer", model)
    assert (status, counts) == (1, {"stale": 200})
    assert shlex.join(["--tokenizer", str(model)]) in items[0]["fix"]
    assert run(*shlex.split(items[0]["fix"])[1:]).status == 0
    assert found_by(run, cache, "--tokenizer", model)[:2] == (0, {"ok": 200})


@pytest.fixture
def part(run, data):
    cache = data.with_name("part")
    assert run("build", data, "--tokenizer", "stub", "--workers", "0", "--part", "1/3", "--out", cache).status == 0
    return cache


def test_new_records_of_other_parts_are_not_missing(run, data, part, cache):
    held = len(opened(part)[0].samples)
    write_texts(data, [*LINES, *(f"new {number}" for number in range(30))])
    status, counts, items = found_by(run, part)
    assert (status, counts["ok"]) == (1, held)
    assert 0 < counts["missing"] == len(items) < 20
    assert {item["reason"] for item in items} == {"not-built"}
    write_texts(data, ["other"] * 3)
    assert found_by(run, part)[1]["stale"] == held
    assert run("verify", cache, "--json").json["part"] == ""


def test_a_missing_tokenizer_or_template_is_named(run, tmp_path):
    tokenizer, template = (
        save(byte_level(), tmp_path / "tok", roles={"eos_token": "<|im_end|>"}),
        tmp_path / "t.jinja",
    )
    template.write_text(untagged(CHATML))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}))
    words = ("--tokenizer", tokenizer, "--chat-template", template)
    assert run("build", tmp_path / "a.jsonl", *words, "--workers", "0").status == 0
    cache = tmp_path / "a.jsonl.latentcache"
    assert run("verify", cache, "--json").json["not_compared"] == []
    lost = (
        (template, f"the chat template cannot be read: {template}); give another one with --chat-template=FILE"),
        (tokenizer, "no such file or folder); check the path; --tokenizer takes a folder"),
    )
    for path, why in lost:
        path.rename(path.with_name(f"moved {path.name}"))
        done = run("verify", cache)
        assert done.status == 0
        assert f"input_ids: tokenizer {tokenizer} was not checked ({why}" in done.out
    moved = [tmp_path / f"moved {path.name}" for path in (tokenizer, template)]
    words = ("--tokenizer", moved[0], "--chat-template", moved[1])
    assert run("verify", cache, *words, "--json").json["not_compared"] == []


def test_a_rejected_line_that_moved_or_is_gone_is_no_finding(run, tmp_path):
    records = write_texts(tmp_path / "a.jsonl", ["one", "", "two", ""])
    assert run("build", records, "--tokenizer", "stub", "--allow-failed", "2").status == 0
    write_texts(records, ["", "one", "two", ""])
    status, counts, _ = found_by(run, tmp_path / "a.jsonl.latentcache")
    assert (status, counts) == (0, {"quarantined": 2, "touched": 1, "ok": 1})
    write_texts(records, ["", "one", "two"])
    status, counts, _ = found_by(run, tmp_path / "a.jsonl.latentcache")
    assert (status, counts) == (0, {"quarantined": 1, "touched": 1, "ok": 1})
