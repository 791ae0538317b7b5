import numpy as np
import pytest
from made_tokenizers import byte_level, save, unigram
from small_tokens import build, opened, write_texts

from latentcache.encoders import bpe, fastcheck
from latentcache.pipeline import token_making
from latentcache.pipeline.token_build import build_tokens
from latentcache.pipeline.token_making import numbers_of
from latentcache.pipeline.token_report import SilentTokens
from latentcache.pipeline.token_settings import TokenSettings
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


class Heard(SilentTokens):
    """Remembers what it was warned of."""

    def __init__(self):
        self.warnings = []

    def warned(self, message):
        self.warnings.append(message)


def quick_and_slow(kind, monkeypatch):
    """A tokenizer that the fast engine takes, one that it does not know, and one of which it gives other ids."""
    if kind == "unknown":
        return unigram(), {"eos_token": "</s>"}
    if kind == "other":
        monkeypatch.setattr(bpe, "_GPT2", bpe._GPT2.replace(r"\p{N}+", r"\p{N}"))
    return byte_level(), {"eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    ("kind", "warnings"),
    [
        ("known", []),
        ("unknown", ["no fast tokenisation: its model is Unigram"]),
        ("other", ["no fast tokenisation: it gave other ids than the tokenizer for a.jsonl:2"]),
    ],
)
def test_a_build_that_must_go_without_the_fast_engine_says_why(tmp_path, monkeypatch, kind, warnings):
    monkeypatch.setattr(token_making, "FAST_CHARACTERS", 1)
    monkeypatch.setattr(fastcheck, "_RANGES", ())
    monkeypatch.setattr(fastcheck, "_RANDOM_DOCUMENTS", 0)
    tokenizer, roles = quick_and_slow(kind, monkeypatch)
    folder, heard = save(tokenizer, tmp_path / "model", roles=roles), Heard()
    data = write_texts(tmp_path / "a.jsonl", ["words", " ".join(map(str, range(1000)))])
    settings = TokenSettings(data=data, tokenizer=str(folder), out=tmp_path / "cache", workers=0)
    build_tokens(settings, observer=heard)
    assert [one[: len(said)] for one, said in zip(heard.warnings, warnings, strict=True)] == warnings
    made = opened(tmp_path / "cache")[0].manifest["provenance"]
    assert (made["fast"], len(made["notes"])) == (kind == "known", 1)


def test_the_stub_and_a_small_build_have_nothing_to_say(tmp_path, monkeypatch):
    heard, data = Heard(), write_texts(tmp_path / "a.jsonl", ["one"])
    folder = save(unigram(), tmp_path / "model", roles={"eos_token": "</s>"})
    build_tokens(TokenSettings(data=data, tokenizer=str(folder), out=tmp_path / "small", workers=0), observer=heard)
    monkeypatch.setattr(token_making, "FAST_CHARACTERS", 1)
    build_tokens(TokenSettings(data=data, tokenizer="stub", out=tmp_path / "stub", workers=0), observer=heard)
    assert heard.warnings == []
