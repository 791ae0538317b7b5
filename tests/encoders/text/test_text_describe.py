import json

import pytest
from made_templates import CHATML, untagged
from made_tokenizers import byte_level, save

from latentcache.encoders.text.describe import describe_tokenizer
from latentcache.encoders.text.stub import stub_description
from latentcache.errors import LatentcacheError, UnsupportedModelError, UsageError
from latentcache.identity.tokenizer import tokenizer_fingerprint

ROLES = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@pytest.fixture
def folder(tmp_path):
    return save(byte_level(), tmp_path / "bpe", template=untagged(CHATML), roles=ROLES)


def test_the_recipe_says_what_was_found(folder):
    description = describe_tokenizer(str(folder), chat=False)
    recipe = description.recipe
    assert recipe.tokenizer == tokenizer_fingerprint(dict(description.parts))
    assert (recipe.num_ids, recipe.dtype) == (600, "uint16")
    assert (recipe.bos_id, recipe.eos_id, recipe.pad_id) == (0, 2, 0)
    assert (recipe.loss, recipe.chat_template, recipe.add_bos, recipe.add_eos) == ("all", "", False, True)
    assert describe_tokenizer(str(folder), chat=True).recipe.loss == "assistant"


def test_texts_begin_as_the_tokenizer_begins_them(tmp_path):
    folder = save(byte_level(), tmp_path, roles=ROLES, bos_first="<|endoftext|>")
    assert describe_tokenizer(str(folder), chat=False).recipe.add_bos
    assert not describe_tokenizer(str(folder), chat=False, add_bos=False).recipe.add_bos
    folder = save(byte_level(), tmp_path, roles=ROLES, bos_first="<|endoftext|>", add_bos_token=False)
    assert not describe_tokenizer(str(folder), chat=False).recipe.add_bos


def test_a_template_is_part_of_the_recipe_of_conversations_only(folder, tmp_path):
    one = describe_tokenizer(str(folder), chat=True)
    (tmp_path / "other").write_text(untagged(CHATML) + " ")
    other = describe_tokenizer(str(folder), chat=True, chat_template=tmp_path / "other")
    assert one.recipe.chat_template != other.recipe.chat_template
    assert describe_tokenizer(str(folder), chat=False, chat_template=tmp_path / "other").recipe.chat_template == ""


def test_options_are_sorted_json(folder):
    options = {"b": True, "a": {"y": 1, "x": None}}
    recipe = describe_tokenizer(str(folder), chat=True, template_options=options).recipe
    assert recipe.template_options == (("a", '{"x": null, "y": 1}'), ("b", "true"))


def test_a_template_that_asks_for_the_day_gets_one_that_is_in_the_recipe(folder, tmp_path):
    (tmp_path / "t").write_text("{{ strftime_now('%Y') }}")
    default = describe_tokenizer(str(folder), chat=True, chat_template=tmp_path / "t")
    assert default.recipe.template_options == (("strftime_now", '"2024-07-26"'),)
    given = describe_tokenizer(
        str(folder), chat=True, chat_template=tmp_path / "t", template_options={"strftime_now": "2025-01-02"}
    )
    assert "2025" in given.chat_template
    with pytest.raises(UsageError):
        describe_tokenizer(
            str(folder), chat=True, chat_template=tmp_path / "t", template_options={"strftime_now": "today"}
        )


def test_the_stub():
    assert describe_tokenizer("stub:delay_ms=4", chat=True) == stub_description(chat=True, delay_ms=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"loss": "some"}, "no loss"), ({"template_options": {"a": {1}}, "chat": True}, "no JSON")],
)
def test_settings_that_cannot_be(folder, options, words):
    with pytest.raises(UsageError, match=words):
        describe_tokenizer(str(folder), **{"chat": False, **options})


def test_conversations_without_a_template_are_an_error_with_the_option(tmp_path):
    folder = save(byte_level(), tmp_path, roles=ROLES)
    with pytest.raises(UsageError) as caught:
        describe_tokenizer(str(folder), chat=True)
    assert "--chat-template" in caught.value.fix


def test_texts_that_shall_end_with_a_token_that_is_not_there(tmp_path):
    folder = save(byte_level(), tmp_path)
    with pytest.raises(UsageError, match="eos_token"):
        describe_tokenizer(str(folder), chat=False)
    assert describe_tokenizer(str(folder), chat=False, add_eos=False).recipe.eos_id is None


def test_a_file_that_the_library_does_not_take_says_why(folder):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"] = {"type": "Unheard"}
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedModelError) as caught:
        describe_tokenizer(str(folder), chat=False)
    assert isinstance(caught.value, LatentcacheError)
    assert caught.value.why
