import pytest
from small_tokens import write_texts

from latentcache import open_cache


@pytest.fixture
def cache(run, tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one", "two two", ("bad",)])
    run("build", data, "--tokenizer", "stub", "--allow-failed", "1")
    return tmp_path / "a.jsonl.latentcache"


def test_info_shows_documents(run, cache):
    found = run("info", cache, "--entries", "--json").json
    assert (found["complete"], found["snapshot"]) == (True, 1)
    assert found["counts"] == {"samples": 3, "entries": 2, "quarantined": 1}
    field = found["fields"]["input_ids"]
    assert (field["items"], field["entries"], field["numbers"]["tokens"]) == (2, 1, 12)
    assert field["lengths"] == {"total": 12, "shortest": 4, "longest": 8}
    assert sorted(path for entry in found["entries"] for path in entry["paths"]) == ["a.jsonl:1", "a.jsonl:2"]
    assert all(entry["checksum"] for entry in found["entries"])
    text = run("info", cache, "--entries").out
    assert "length 4 to 8, mean 6, total 12" in text


def test_the_steps_of_documents_depend_on_rows(run, cache):
    found = run("plan", cache, "--batch-size", "2", "--json")
    assert (found.status, found.error["slug"]) == (2, "usage")
    assert "--pack" in found.error["fix"]
    planned = run("plan", cache, "--batch-size", "1", "--pack", "16", "--json").json
    assert (planned["steps_per_epoch"], planned["buckets"][0]["length"]) == (1, 16)
    assert planned["steps_per_epoch"] == len(open_cache(cache).rows(pack=16).loader(batch_size=1))
    words = ["plan", cache, "--batch-size", "1", "--pack", "16", "--pad", "16", "--json"]
    assert run(*words).error["slug"] == "usage"
