import numpy as np
from made_tokenizers import byte_level, save
from small_tokens import build, opened, write_texts

from latentcache.pipeline.token_making import numbers_of
from latentcache.store.coming import log_path, read_arrivals
from latentcache.store.layout import CacheLayout
from latentcache.store.token_coming import load_announced_tokens

EMPTY = ('{"text": ""}',)


def test_a_record_has_the_numbers_of_all_its_documents():
    content = np.frombuffer(b"b" * 16 + b"a" * 16 + b"b" * 16, dtype=np.uint8).reshape(-1, 16)
    numbers = numbers_of(content)
    assert [sorted(numbers(one * 16)) for one in (b"a", b"b", b"c")] == [[1], [0, 2], []]


def test_what_is_announced_is_what_is_published(tmp_path, monkeypatch):
    """Looked at when the build is over: nothing withdraws it."""
    monkeypatch.setattr("latentcache.pipeline.token_build.withdraw", lambda layout: None)
    data = write_texts(tmp_path / "a.jsonl", ["one", EMPTY, "two", "one"])
    build(data, tmp_path / "cache", stream=True, allow_failed="1")
    said, made = load_announced_tokens(CacheLayout(tmp_path / "cache")), opened(tmp_path / "cache")[0]
    for name in ("content", "source", "line", "sources"):
        assert np.array_equal(getattr(said.documents, name), getattr(made.documents, name)), name
    assert (said.recipe, said.manifest["before"], said.source_root) == (made.recipe, 0, made.source_root)


def test_a_build_that_nobody_may_follow_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("latentcache.pipeline.token_build.withdraw", lambda layout: None)
    build(write_texts(tmp_path / "a.jsonl", ["one"]), tmp_path / "cache")
    assert load_announced_tokens(CacheLayout(tmp_path / "cache")) is None


def test_what_the_tokenizer_refuses_is_told_and_not_announced_again(tmp_path, monkeypatch):
    monkeypatch.setattr("latentcache.pipeline.token_build.withdraw", lambda layout: None)
    tokenizer = str(save(byte_level(), tmp_path / "model", roles={"eos_token": "<|im_end|>"}))
    layout, bad = CacheLayout(tmp_path / "cache"), "no character: \ufdd0"
    lines = ["one", bad, "two", bad]
    build(write_texts(tmp_path / "a.jsonl", lines), layout.root, stream=True, tokenizer=tokenizer, allow_failed="2")
    log = log_path(layout, load_announced_tokens(layout).manifest["log"])
    assert sorted(read_arrivals(log)[0]) == [(1, None), (3, None)]
    lines.append("three")
    build(write_texts(tmp_path / "a.jsonl", lines), layout.root, stream=True, tokenizer=tokenizer, allow_failed="2")
    assert load_announced_tokens(layout).documents.line.tolist() == [1, 3, 5]
