import sys

import pytest
from described import opened_tokenizer
from made_tokenizers import byte_level, save

from latentcache.encoders.text import bpe, fastcheck
from latentcache.encoders.text.fastcheck import fast_tokenizer
from latentcache.sources.records import text_record


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = save(byte_level(), tmp_path_factory.mktemp("bpe"), roles={"eos_token": "<|endoftext|>"})
    return opened_tokenizer(folder)


@pytest.fixture(autouse=True)
def few_characters(monkeypatch):
    """The whole of Unicode takes a second; one test has it."""
    monkeypatch.setattr(fastcheck, "_RANGES", ((0x20, 0x300),))


def test_equal_ids_turn_it_on(reference):
    checked = fast_tokenizer(reference, [text_record("a", 1, "hello <|endoftext|>")])
    (document,) = checked.tokenize([text_record("a", 1, "hello")])
    assert document.array[-1] == reference.recipe.eos_id


def test_every_character_is_tried(reference, monkeypatch):
    monkeypatch.undo()
    assert not isinstance(fast_tokenizer(reference, []), str)


def test_a_difference_in_the_data_turns_it_off_and_is_said(reference, monkeypatch):
    monkeypatch.setattr(fastcheck, "_RANGES", ())
    # Split otherwise than the tokenizer does: only a text with digits shows it.
    monkeypatch.setattr(bpe, "_GPT2", bpe._GPT2.replace(r"\p{N}+", r"\p{N}"))
    assert not isinstance(fast_tokenizer(reference, [text_record("a", 1, "words only")]), str)
    digits = max(range(10, 1000), key=lambda n: len(str(n)))
    words = " ".join(str(n) for n in range(digits))
    checked = fast_tokenizer(reference, [text_record("a", 1, "fine"), text_record("b.jsonl", 7, words)])
    assert "b.jsonl:7" in checked


def test_without_tiktoken_the_reference_does_all_and_says_what_to_install(reference, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.delitem(sys.modules, "latentcache.encoders.text.bpe")
    checked = fast_tokenizer(reference, [])
    assert "latentcache[tokens]" in checked


def test_a_record_of_more_than_a_megabyte_is_not_tried_with_the_reference(reference, monkeypatch):
    """It would hold hundreds of bytes a character, in the process that builds."""
    lengths = []
    monkeypatch.setattr(fastcheck, "_is_same", lambda one, other: lengths.append(len(one.array)) or True)
    fast_tokenizer(reference, [text_record("a", 1, "x" * 2_000_000), text_record("a", 2, "a b c")])
    assert lengths[-1] < 10
    assert max(lengths) < 100_000
