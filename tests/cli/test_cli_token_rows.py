import pytest
from small_tokens import build, opened, texts, write_texts

from latentcache import open_tokens
from latentcache.cli import token_rows
from latentcache.cli.token_rows import planned_rows, row_facts
from latentcache.store.documents import MemoryTokens


def documents(lengths):
    return MemoryTokens([[1] * length for length in lengths]).documents


def test_rows_of_common_lengths():
    found = {one["max_length"]: one for one in row_facts(documents([512, 600, 5000]))}
    assert (found[512]["padded_rows"], found[512]["too_long"], found[512]["padded_fill"]) == (1, 2, 1.0)
    assert (found[512]["too_long_tokens"], found[512]["cut_tokens"]) == (5600, 88 + 4488)
    assert (found[8192]["packed_rows_at_least"], found[8192]["block_rows"], found[1024]["block_rows"]) == (1, 1, 6)
    assert (found[1024]["packed_rows"], found[1024]["packed_fill"]) == (2, round(1112 / 2048, 4))
    assert (found[8192]["packed_rows"], found[8192]["too_long_tokens"]) == (1, 0)


def test_rows_of_nothing():
    one = row_facts(documents([]))[0]
    assert (one["padded_fill"], one["packed_rows"], one["packed_fill"]) == (0.0, 0, 0.0)


def test_of_very_many_documents_a_bound_is_said(monkeypatch):
    monkeypatch.setattr(token_rows, "PACKED_DOCUMENTS", 2)
    one = row_facts(documents([300, 300, 300]))[0]
    assert (one["packed_rows"], one["packed_fill"], one["packed_rows_at_least"]) == (None, None, 2)


@pytest.fixture
def cache(tmp_path):
    build(write_texts(tmp_path / "a.jsonl", texts(200, longest=4000)), tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize("length", [512, 1024, 8192])
def test_numbers_are_those_of_the_views(cache, length):
    (one,) = [one for one in row_facts(opened(cache)[0].documents) if one["max_length"] == length]
    opened_cache = open_tokens(cache)
    packed = opened_cache.packed(length, overflow="drop")
    assert (one["packed_rows"], one["packed_fill"]) == (len(packed), round(packed.fill, 4))
    padded = opened_cache.padded(length, overflow="drop")
    assert (one["padded_rows"], one["padded_fill"]) == (len(padded), round(padded.fill, 4))
    assert one["block_rows"] == len(opened_cache.blocks(length))
    cut = opened_cache.padded(length, overflow="truncate_right")
    assert one["cut_tokens"] == sum(cut.tokens_left.values())


def test_plans_that_are_kept_are_named(cache, tmp_path):
    assert planned_rows(cache, opened(cache)[0]) == []
    opened_cache = open_tokens(cache)
    view = opened_cache.packed(1024)
    part = opened_cache.split(0.5)[0].packed(512)
    found = planned_rows(cache, opened(cache)[0])
    assert [(one["max_length"], one["whole"], one["rows"]) for one in found] == [
        (512, False, len(part)),
        (1024, True, len(view)),
    ]
    assert found[1] == {
        "kind": "packed",
        "max_length": 1024,
        "overflow": "split",
        "whole": True,
        "rows": len(view),
        "tokens": opened_cache.tokens,
        "fill": round(view.fill, 4),
    }
    build(write_texts(tmp_path / "a.jsonl", texts(201, longest=4000)), cache)
    assert planned_rows(cache, opened(cache)[0]) == []  # they are of other documents


def test_info_shows_sources_rows_and_plans(run, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_texts(data / "a.jsonl", ["one", "two"])
    write_texts(data / "b.jsonl", ["three"])
    cache = tmp_path / "data.latentcache"
    run("build", data, "--tokenizer", "stub")
    open_tokens(cache).packed(512)
    text = run("info", cache).out
    assert [line.split() for line in text.splitlines() if ".jsonl" in line] == [
        ["a.jsonl", "2", "8"],
        ["b.jsonl", "1", "6"],
    ]
    assert "planned: packed, overflow split: 1 row of 512, 2.7% filled" in text
    assert "one epoch is rows" in text
    assert run("info", cache, "--json").json["plans"][0]["rows"] == 1
