import pytest
from small_tokens import write_texts


@pytest.fixture
def cache(run, tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one", "two two", ("bad",)])
    run("build", data, "--tokenizer", "stub", "--allow-failed", "1")
    return tmp_path / "a.jsonl.latentcache"


def test_info_says_what_is_in_it(run, cache):
    found = run("info", cache, "--entries", "--quarantine", "--json").json
    assert (found["kind"], found["complete"], found["snapshot"]) == ("tokens", True, 1)
    assert found["counts"] == {"samples": 3, "documents": 2, "entries": 1, "quarantined": 1}
    assert (found["tokens"]["tokens"], found["entries_lost"]) == (12, 0)
    assert found["sources"] == [{"name": "a.jsonl", "documents": 2, "tokens": 12}]
    (entry,) = found["entries"]
    assert (entry["documents"], entry["tokens"], entry["paths"]) == (2, 12, ["a.jsonl:1", "a.jsonl:2"])
    assert entry["checksum"]
    text = run("info", cache, "--entries", "--quarantine").out
    assert "2 documents, 12 tokens" in text
    assert "rows of" in text


def test_info_of_a_build_that_has_not_ended(run, cache):
    (cache / "CURRENT").unlink()
    (cache / "BUILDING").write_text('{"kind": "tokens", "samples": 7}')
    found = run("info", cache, "--json").json
    assert (found["complete"], found["counts"]["samples"], found["counts"]["entries"]) == (False, 7, 1)
    assert "not complete" in run("info", cache).out


def test_plans_of_tokens_are_those_of_views(run, cache):
    found = run("plan", cache, "--batch-size", "2", "--json")
    assert found.status == 2
    assert "rows" in found.error["fix"]


def test_quarantine_names_the_field(run, tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "x"}]}\n')
    run("build", data, "--tokenizer", "stub", "--allow-failed", "1")
    cache = tmp_path / "a.jsonl.latentcache"
    (item,) = run("info", cache, "--quarantine", "--json").json["items"]
    assert (item["path"], item["field"]) == ("a.jsonl:1", "messages[0].content")
    assert "a.jsonl:1 messages[0].content: " in run("info", cache, "--quarantine").out


def test_a_share_says_that_it_is_one(run, tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one", "two two"])
    cache = tmp_path / "part"
    run("build", data, "--tokenizer", "stub", "--part", "0/2", "--out", cache)
    assert run("info", cache, "--json").json["part"] == "0/2"
    assert "part 0/2 of the records" in run("info", cache).out
    (cache / "CURRENT").unlink()
    (cache / "BUILDING").write_text('{"kind": "tokens", "samples": 7, "part": "1/2"}')
    assert run("info", cache, "--json").json["part"] == "1/2"
    (cache / "BUILDING").write_text('{"kind": "tokens", "samples": 7, "part": "0/1"}')
    found = run("info", cache, "--json").json
    assert found["part"] == ""
    assert "of the records" not in run("info", cache).out
