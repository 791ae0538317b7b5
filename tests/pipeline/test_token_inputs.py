from dataclasses import replace
from pathlib import Path

import pytest
from small_tokens import build, write_texts

from latentcache.errors import CacheFormatError, UsageError
from latentcache.pipeline.token_inputs import (
    TokenBefore,
    completed,
    describe,
    is_there,
    open_records,
    read_token_before,
    token_marker,
)
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.store.durable import write_json
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import signed

SETTINGS = TokenSettings(data=Path("a.jsonl"), tokenizer="stub")
RECIPE = describe(replace(SETTINGS, add_eos=False, add_bos=True), chat=False).recipe


def test_what_was_not_said_is_that_of_the_cache():
    before = TokenBefore(recipe=RECIPE, tokenizer="stub", chat_template="/t.jinja")
    found = completed(TokenSettings(data=Path("a")), before)
    assert (found.tokenizer, found.add_bos, found.add_eos) == ("stub", True, False)
    assert found.chat_template == Path("/t.jinja")
    other = completed(TokenSettings(data=Path("a"), tokenizer="stub:delay_ms=1"), before)
    assert (other.chat_template, other.add_bos) == (None, None)
    with pytest.raises(UsageError):
        completed(TokenSettings(data=Path("a")), TokenBefore())


@pytest.mark.parametrize(
    ("chat", "said", "expected"), [(False, "all", None), (False, "assistant", "assistant"), (True, "all", "all")]
)
def test_the_loss_of_texts_alone_is_no_word_on_conversations(chat, said, expected):
    recipe = describe(replace(SETTINGS, loss=said), chat=chat).recipe
    assert completed(TokenSettings(data=Path("a")), TokenBefore(recipe=recipe, tokenizer="stub")).loss == expected


def test_a_build_that_has_not_ended_is_remembered(tmp_path):
    layout = CacheLayout(tmp_path)
    layout.shards.mkdir()
    write_json(layout.building, token_marker(RECIPE, SETTINGS, 5))
    before = read_token_before(layout)
    assert (before.recipe, before.tokenizer, before.generation) == (RECIPE, "stub", None)
    write_json(layout.building, signed({"format": 1, "recipe": {}}))
    with pytest.raises(CacheFormatError, match="pictures"):
        read_token_before(layout)
    write_json(layout.building, signed({"format": 99}))
    with pytest.raises(CacheFormatError, match="99"):
        read_token_before(layout)
    write_json(layout.building, {"format": 3, "kind": "tokens"})
    assert read_token_before(layout).recipe is None


def test_an_older_generation_stands_in_for_a_damaged_one(tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one"])
    build(data, tmp_path / "c")
    build(write_texts(data, ["one", "two"]), tmp_path / "c")
    layout = CacheLayout(tmp_path / "c")
    (layout.generation(2) / "length.npy").write_bytes(b"x")
    before = read_token_before(layout)
    assert before.generation is not None
    assert (before.generation.number, before.tokenizer) == (1, "stub")
    assert "length" in before.damage


def test_records_and_tokenizers_are_found(tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one"])
    assert [record.text for record in open_records(TokenSettings(data=data))] == ["one"]
    assert is_there("stub:delay_ms=3")
    assert is_there(str(tmp_path))
    assert not is_there(str(tmp_path / "none"))
