import json

import numpy as np
import pytest
from small_tokens import build, texts, write_texts

from latentcache import open_cache
from latentcache.cli import contents


def facts(lengths, length):
    return contents._rows_of(np.array(lengths, dtype=np.int64), length)


def test_rows_of_common_lengths():
    one = facts([512, 600, 5000], 512)
    assert (one["pad"], one["too_long"], one["pad_efficiency"], one["too_long_total"]) == (1, 2, 1.0, 5600)
    assert (facts([512, 600, 5000], 8192)["pack_at_least"], facts([512, 600, 5000], 8192)["chunk"]) == (1, 1)
    one = facts([512, 600, 5000], 1024)
    assert (one["pack"], one["pack_efficiency"], one["chunk"]) == (2, round(1112 / 2048, 4), 6)
    assert (facts([512, 600, 5000], 8192)["pack"], facts([512, 600, 5000], 8192)["too_long_total"]) == (1, 0)


def test_rows_of_nothing():
    one = facts([], 512)
    assert (one["pad_efficiency"], one["pack"], one["pack_efficiency"]) == (0.0, 0, None)


def test_of_very_many_documents_a_bound_is_given(monkeypatch):
    monkeypatch.setattr(contents, "PACKED_ITEMS", 2)
    one = facts([300, 300, 300], 512)
    assert (one["pack"], one["pack_efficiency"], one["pack_at_least"]) == (None, None, 2)


@pytest.mark.parametrize("length", [512, 1024, 8192])
def test_numbers_are_those_of_the_loader(run, tmp_path, length):
    build(write_texts(tmp_path / "a.jsonl", texts(200, longest=4000)), tmp_path / "cache")
    rows = run("info", tmp_path / "cache", "--json").json["fields"]["input_ids"]["rows"]
    (one,) = [one for one in rows if one["length"] == length]
    cache = open_cache(tmp_path / "cache")
    packed, padded = cache.rows(pack=length, overflow="drop"), cache.rows(pad=length, overflow="drop")
    assert (one["pack"], one["pack_efficiency"]) == (len(packed), round(packed.packing_efficiency, 4))
    assert (one["pad"], one["pad_efficiency"]) == (len(padded), round(padded.packing_efficiency, 4))
    assert one["chunk"] == len(cache.rows(chunk=length))


@pytest.fixture
def cache(run, tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one", "two two", ("bad",)])
    run("build", data, "--tokenizer", "stub", "--allow-failed", "1")
    return tmp_path / "a.jsonl.latentcache"


def test_info_shows_documents(run, cache):
    found = run("info", cache, "--entries", "--quarantine", "--json").json
    assert (found["complete"], found["snapshot"], found["entries_lost"]) == (True, 1, 0)
    assert found["counts"] == {"samples": 3, "entries": 2, "quarantined": 1}
    field = found["fields"]["input_ids"]
    assert (field["items"], field["entries"], field["numbers"]["tokens"]) == (2, 1, 12)
    assert field["sources"] == [{"name": "a.jsonl", "items": 2, "total": 12}]
    assert field["lengths"] == {
        "total": 12, "shortest": 4, "longest": 8,
        "up_to": [{"length": 4, "items": 1, "total": 4}, {"length": 8, "items": 1, "total": 8}],
    }  # fmt: skip
    assert sorted(path for entry in found["entries"] for path in entry["paths"]) == ["a.jsonl:1", "a.jsonl:2"]
    assert all(entry["checksum"] for entry in found["entries"])
    text = run("info", cache, "--entries", "--quarantine").out
    assert "length 4 to 8, mean 6, total 12" in text
    assert "rows of" in text


def test_the_steps_of_documents_depend_on_rows(run, cache):
    found = run("plan", cache, "--batch-size", "2", "--json")
    assert (found.status, found.error["slug"]) == (2, "usage")
    assert "--pack" in found.error["fix"]
    planned = run("plan", cache, "--batch-size", "1", "--pack", "16", "--json").json
    assert (planned["steps_per_epoch"], planned["buckets"][0]["length"]) == (1, 16)
    assert planned["steps_per_epoch"] == len(open_cache(cache).rows(pack=16).loader(batch_size=1))
    words = ["plan", cache, "--batch-size", "1", "--pack", "16", "--pad", "16", "--json"]
    assert run(*words).error["slug"] == "usage"


def test_quarantine_names_the_field(run, tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "x"}]}))
    run("build", data, "--tokenizer", "stub", "--allow-failed", "1")
    cache = tmp_path / "a.jsonl.latentcache"
    (item,) = run("info", cache, "--quarantine", "--json").json["items"]
    assert (item["path"], item["line"], item["field"]) == ("a.jsonl", 1, "messages[0].content")
    assert "a.jsonl messages[0].content: " in run("info", cache, "--quarantine").out


def test_info_shows_sources(run, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_texts(data / "a.jsonl", ["one", "two"])
    write_texts(data / "b.jsonl", ["three"])
    run("build", data, "--tokenizer", "stub")
    text = run("info", tmp_path / "data.latentcache").out
    found = [line.split() for line in text.splitlines() if ".jsonl" in line]
    assert found == [["a.jsonl", "2", "8"], ["b.jsonl", "1", "6"]]
    assert "one epoch is rows" in text
