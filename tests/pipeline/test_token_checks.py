import shutil

import pytest
from small_tokens import build, opened, write_texts

from latentcache.identity.stat import RACY_NS
from latentcache.pipeline.token_checks import is_chat, nothing_changed, refused_before
from latentcache.pipeline.token_inputs import TokenBefore
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.sources.corpus import scan_records
from latentcache.sources.record_listing import Listing, list_files
from latentcache.store.layout import CacheLayout
from latentcache.token_recipe import TokenRecipe


@pytest.fixture
def built(tmp_path, monkeypatch):
    data = write_texts(tmp_path / "a.jsonl", ["one", "two"])
    monkeypatch.setattr("latentcache.sources.record_listing.RACY_NS", -RACY_NS * 10**6)
    build(data, tmp_path / "cache")
    return data, tmp_path / "cache"


def still(data, cache, **before):
    given = {"generation": opened(cache)[0]} | before
    settings = TokenSettings(data=data, out=cache)
    return nothing_changed(TokenBefore(**given), list_files(data), settings, CacheLayout(cache))


def test_nothing_changed(built):
    assert still(*built)


@pytest.mark.parametrize(
    "change",
    [
        lambda data, cache: write_texts(data, ["one", "other"]),
        lambda data, cache: (cache / "BUILDING").write_text("{}"),
        lambda data, cache: (cache / "shards" / "x.open").mkdir(),
        lambda data, cache: shutil.rmtree(next(p for p in (cache / "shards").iterdir() if p.is_dir())),
        lambda data, cache: CacheLayout(cache).retired_mark(opened(cache)[0].shards[0]).write_text("{}"),
    ],
)
def test_any_doubt_is_a_no(built, change):
    change(*built)
    assert not still(*built)


def test_other_terms_are_a_no(built):
    data, cache = built
    assert not still(data, cache, generation=None)
    assert not still(data, cache, damage="x")
    settings = TokenSettings(data=data, out=cache, text_lines=True)
    before = TokenBefore(generation=opened(cache)[0])
    assert not nothing_changed(before, list_files(data), settings, CacheLayout(cache))
    other = Listing(hash="0", files=1, newest_ns=0)
    assert not nothing_changed(before, other, TokenSettings(data=data, out=cache), CacheLayout(cache))


TURNS = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


def test_the_first_record_tells_the_kind_of_a_file(tmp_path):
    texts = write_texts(tmp_path / "a.jsonl", ["one"])
    assert not is_chat(scan_records(texts))
    chat = write_texts(tmp_path / "b.jsonl", [("{bad",), (TURNS,)])
    assert is_chat(scan_records(chat))
    assert not is_chat(scan_records(write_texts(tmp_path / "c.jsonl", [("{bad",)])))


@pytest.mark.parametrize("names", [("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl")])
def test_any_file_of_conversations_makes_the_folder_one(tmp_path, names):
    write_texts(tmp_path / names[0], ["one", "two"])
    write_texts(tmp_path / names[1], [(TURNS,)])
    assert is_chat(scan_records(tmp_path))
    write_texts(tmp_path / names[1], ["three"])
    assert not is_chat(scan_records(tmp_path))


def test_a_build_by_another_rule_of_reading_is_a_no(built, monkeypatch):
    monkeypatch.setattr("latentcache.pipeline.token_settings.RECORD_RULE", 99)
    assert not still(*built)


def test_refusals_of_another_recipe_do_not_count(built):
    generation, _ = opened(built[1])
    assert refused_before(None, generation.recipe) == {}
    assert refused_before(generation, TokenRecipe(tokenizer="x", num_ids=3)) == {}
