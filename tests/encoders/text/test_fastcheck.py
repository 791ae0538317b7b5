import sys
from dataclasses import replace

import pytest
from made_templates import CHATML, untagged
from made_tokenizers import byte_level, save

from latentcache.encoders import bpe, fastcheck
from latentcache.encoders.text.describe import describe_tokenizer
from latentcache.encoders.text.fastcheck import with_fast_path
from latentcache.encoders.text.opening import open_tokenizer
from latentcache.encoders.text.stub import stub_description
from latentcache.sources.records import Message, chat_record, text_record


@pytest.fixture(scope="module")
def description(tmp_path_factory):
    folder = save(byte_level(), tmp_path_factory.mktemp("bpe"), roles={"eos_token": "<|endoftext|>"})
    return describe_tokenizer(str(folder), chat=False)


@pytest.fixture(autouse=True)
def few_characters(monkeypatch):
    """The whole of Unicode takes a second; one test has it."""
    monkeypatch.setattr(fastcheck, "_RANGES", ((0x20, 0x300),))


def test_equal_ids_turn_it_on(description):
    checked = with_fast_path(description, [text_record("a", 1, "hello <|endoftext|>")])
    assert checked.fast
    assert "the same ids" in checked.notes[-1]
    assert replace(checked, fast=False, notes=()) == replace(description, notes=())


def test_every_character_is_tried(description, monkeypatch):
    monkeypatch.undo()
    assert with_fast_path(description, []).fast


def test_a_difference_in_the_data_turns_it_off_and_is_said(description, monkeypatch):
    monkeypatch.setattr(fastcheck, "_RANGES", ())
    monkeypatch.setattr(fastcheck, "_RANDOM_DOCUMENTS", 0)
    # Split otherwise than the tokenizer does: only a text with digits shows it.
    monkeypatch.setattr(bpe, "_GPT2", bpe._GPT2.replace(r"\p{N}+", r"\p{N}"))
    assert with_fast_path(description, [text_record("a", 1, "words only")]).fast
    digits = max(range(10, 1000), key=lambda n: len(str(n)))
    words = " ".join(str(n) for n in range(digits))
    checked = with_fast_path(description, [text_record("a", 1, "fine"), text_record("b.jsonl", 7, words)])
    assert not checked.fast
    assert "b.jsonl:7" in checked.notes[-1]


def test_random_documents_find_a_difference_that_the_data_hide(description, monkeypatch):
    monkeypatch.setattr(bpe, "_GPT2", bpe._GPT2.replace(r"'(?:[sdmt]|ll|ve|re)|", ""))
    checked = with_fast_path(description, [text_record("a", 1, "fine")])
    assert not checked.fast
    assert "random documents" in checked.notes[-1]
    monkeypatch.setattr(fastcheck, "_RANDOM_DOCUMENTS", 0)
    assert with_fast_path(description, [text_record("a", 1, "fine")]).fast


def test_without_tiktoken_the_reference_does_all_and_says_what_to_install(description, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.delitem(sys.modules, "latentcache.encoders.text.bpe")
    checked = with_fast_path(description, [])
    assert not checked.fast
    assert "latentcache[tokens]" in checked.notes[-1]
    assert open_tokenizer(checked).tokenize([text_record("a", 1, "x")])


def test_no_more_than_a_megabyte_is_looked_at(description):
    taken = []

    def records():
        for number in range(100):
            taken.append(number)
            yield text_record("a", number, "word " * 20_000)

    assert with_fast_path(description, records()).fast
    assert len(taken) == 11


def test_a_megabyte_has_what_turns_carry_beside_their_text(tmp_path):
    taken = []

    def records():
        for number in range(100):
            taken.append(number)
            fields = (("tool_calls", f'[{{"arguments": "{"word " * 20_000}"}}]'),)
            said = Message(role="assistant", content="", learned=True, fields=fields)
            yield chat_record("a", number, (Message(role="user", content="q"), said))

    folder = save(byte_level(), tmp_path, template=untagged(CHATML), roles={"eos_token": "<|im_end|>"})
    with_fast_path(describe_tokenizer(str(folder), chat=True), records())
    assert len(taken) == 11


def test_the_stub_has_no_fast_path():
    assert with_fast_path(stub_description(), []) == stub_description()


def test_a_record_of_more_than_a_megabyte_is_not_tried_with_the_reference(description, monkeypatch):
    """It would hold hundreds of bytes a character, in the process that builds."""
    tried = []
    monkeypatch.setattr(fastcheck, "_same", lambda one, other: tried.append(len(one.ids)) or True)
    with_fast_path(description, [text_record("a", 1, "x" * 2_000_000), text_record("a", 2, "a b c")])
    assert tried[-1] < 10
    assert max(tried) < 100_000
