"""Compare tokenizers with the cache they built."""

import json
import shutil

import pytest
from made_templates import CHATML, LLAMA3, untagged
from made_tokenizers import LLAMA3_SPLIT, LLAMA3_TOKENS, byte_level, save, unigram

from latentcache import BuildSettings, build_cache, open_cache
from latentcache.errors import ModelNotFoundError, StaleCacheError, UnsupportedModelError

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello you"}]}
ROLES = {"eos_token": "<|im_end|>"}
DATED = "{{- strftime_now('%d %b %Y') }}" + untagged(CHATML)


def built(folder, tokenizer, record=CHAT, **settings):
    (folder / "data.jsonl").write_text(json.dumps(record) + "\n")
    fields = {"input_ids": {"tokenizer": str(tokenizer)} | settings}
    build_cache(BuildSettings(data=folder / "data.jsonl", out=folder / "cache", fields=fields, workers=0))
    return folder / "cache"


def named(cache, tokenizer):
    with pytest.raises(StaleCacheError) as caught:
        open_cache(cache).check(tokenizer)
    return [name for name, _, _ in caught.value.differences]


@pytest.mark.parametrize(
    ("make", "template", "config"),
    [
        (byte_level, CHATML, {"roles": ROLES}),
        (byte_level, CHATML, {"roles": ROLES, "tokenizer_class": "GPT2Tokenizer"}),
        (unigram, CHATML, {"roles": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}}),
        (
            lambda: byte_level(LLAMA3_SPLIT, special=LLAMA3_TOKENS, first=False),
            LLAMA3,
            {
                "roles": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
                "bos_first": "<|begin_of_text|>",
            },
        ),
    ],
    ids=["byte level", "a class with roles of its own", "scores", "begins texts itself"],
)
def test_a_folder_its_file_and_a_copy_open_the_cache(tmp_path, make, template, config):
    folder = save(make(), tmp_path / "model", template=untagged(template), **config)
    cache = built(tmp_path, folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    for tokenizer in (folder, str(folder), folder / "tokenizer.json", copy):
        open_cache(cache).check(tokenizer)


def test_a_template_with_a_clock_is_compared_as_it_was_pinned(tmp_path):
    folder = save(byte_level(), tmp_path / "model", template=DATED, roles=ROLES)
    open_cache(built(tmp_path, folder)).check(folder)


def test_another_template_is_named_with_both_hashes(tmp_path):
    folder = save(byte_level(), tmp_path / "model", template=untagged(CHATML), roles=ROLES)
    cache = built(tmp_path, folder)
    (folder / "chat_template.jinja").write_text("other")
    with pytest.raises(StaleCacheError, match=r"chat_template: [0-9a-f]{8} -> [0-9a-f]{8}"):
        open_cache(cache).check(folder)


def test_a_template_file_of_the_build_is_compared_in_place_of_the_tokenizers_own(tmp_path):
    folder = save(byte_level(), tmp_path / "model", template="another", roles=ROLES)
    (tmp_path / "mine.jinja").write_text(untagged(CHATML))
    cache = built(tmp_path, folder, chat_template=tmp_path / "mine.jinja")
    open_cache(cache).check(folder)


def test_parts_that_differ_have_their_names(tmp_path):
    folder = save(byte_level(), tmp_path / "model", roles=ROLES)
    cache = built(tmp_path, folder, {"text": "some text"})
    open_cache(cache).check(folder)
    other = save(byte_level(nfc=True, vocab_size=500), tmp_path / "other", roles=ROLES)
    assert named(cache, other)[:3] == ["vocab", "merges", "normalizer"]
    ends = save(byte_level(), tmp_path / "ends", roles={"eos_token": "<|endoftext|>"})
    assert named(cache, ends) == ["special_tokens", "eos_id"]


def test_uncomparable_models_are_rejected_with_a_fix(tmp_path):
    cache = built(tmp_path, "stub", {"text": "some text"})
    for nowhere in ("org/model", tmp_path / "none"):
        with pytest.raises(ModelNotFoundError):
            open_cache(cache).check(nowhere)
    with pytest.raises(UnsupportedModelError, match="a dict cannot be compared"):
        open_cache(cache).check({})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedModelError, match=r"has no tokenizer\.json"):
        open_cache(cache).check(tmp_path / "empty")
