import copy
import json

import pytest
from tokenizers import Tokenizer, models

from latentcache.errors import EncoderError, ModelNotFoundError, UnsupportedModelError, UsageError
from latentcache.fields.settings import differing
from latentcache.fields.tokenizer import (
    CLOCK,
    pin_clock,
    read_template,
    read_tokenizer,
    template_hash,
    tokenizer_fingerprint,
    tokenizer_parts,
)

TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 4, "content": "<s>", "special": True, "lstrip": False, "normalized": False},
        {"id": 5, "content": "<e>", "special": True, "lstrip": False, "normalized": False},
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    "post_processor": {"type": "ByteLevel"},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "abb": 3}, "merges": [["a", "b"], ["ab", "b"]]},
}
SPECIAL = {"bos_token": "<s>"}


def fingerprint(tokenizer, special=SPECIAL):
    return tokenizer_fingerprint(tokenizer_parts(tokenizer, special))


def changed(**changes):
    tokenizer = copy.deepcopy(TOKENIZER)
    for path, value in changes.items():
        *outer, last = path.split("__")
        part = tokenizer
        for name in outer:
            part = part[name]
        part[last] = value
    return tokenizer


@pytest.mark.parametrize(
    "same",
    [
        changed(truncation={"max_length": 512, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}),
        changed(padding={"strategy": "BatchLongest", "pad_id": 0}),
        changed(version="2.0"),
        changed(decoder=None),
        changed(model__merges=["a b", "ab b"]),
        changed(model__vocab={"abb": 3, "ab": 2, "b": 1, "a": 0}),
        changed(model__dropout=None, model__ignore_merges=False, model__unk_token=None),
        changed(added_tokens=TOKENIZER["added_tokens"][::-1]),
    ],
)
def test_spelling_and_runtime_state_are_ignored(same):
    assert fingerprint(same) == fingerprint(TOKENIZER)


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (changed(model__vocab={"a": 1, "b": 0, "ab": 2, "abb": 3}), "vocab"),
        (changed(model__merges=[["ab", "b"], ["a", "b"]]), "merges"),
        (changed(model__ignore_merges=True), "model"),
        (changed(normalizer=None), "normalizer"),
        (changed(pre_tokenizer__add_prefix_space=True), "pre_tokenizer"),
        (changed(post_processor=None), "post_processor"),
        (changed(added_tokens=TOKENIZER["added_tokens"][:1]), "added_tokens"),
        (changed(added_tokens=[{**token, "lstrip": True} for token in TOKENIZER["added_tokens"]]), "added_tokens"),
    ],
)
def test_changes_are_named_by_part(other, part):
    before, after = tokenizer_parts(TOKENIZER, SPECIAL), tokenizer_parts(other, SPECIAL)
    assert [name for name, _, _ in differing(before, after)] == [part]
    assert fingerprint(other) != fingerprint(TOKENIZER)


def test_scores_are_compared_as_float32():
    pieces = [["<unk>", 0.0], ["a", -1.5], ["b", -2.25]]
    first = changed(model={"type": "Unigram", "unk_id": 0, "vocab": pieces})
    two = changed(model={"type": "Unigram", "unk_id": 0, "vocab": [pieces[0], pieces[2], pieces[1]]})
    three = changed(model={"type": "Unigram", "unk_id": 0, "vocab": [*pieces[:2], ["b", -2.250001]]})
    assert len({fingerprint(tokenizer) for tokenizer in (first, two, three)}) == 3
    spelled = changed(model={"type": "Unigram", "unk_id": 0, "vocab": [*pieces[:2], ["b", -2.2500000000000004]]})
    assert fingerprint(spelled) == fingerprint(first)  # the library formats the last digits differently


def template(*single):
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": list(single), "pair": pair, "special_tokens": {}}


def test_an_empty_post_processor_is_ignored():
    text, token = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
    none = fingerprint(changed(post_processor=None))
    assert fingerprint(changed(post_processor=template(text))) == none
    assert fingerprint(changed(post_processor=template(token, text))) != none
    assert fingerprint(changed(post_processor=template(token))) != none


def test_the_fingerprint_is_pinned():
    assert fingerprint(TOKENIZER) == "9db08e0c04e7b271f1906f9c1cffdcac"


DAY = {CLOCK: '"2024-07-26"'}


def test_a_time_whose_format_is_not_written_out_is_rejected():
    with pytest.raises(UsageError, match="asks for the time, and the format"):
        pin_clock("{{ strftime_now(form) }}", DAY)


def test_the_template_hash_is_pinned():
    template = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    assert template_hash(pin_clock(template, DAY)) == "9e3fc0a5f89e137b3445cb2f84321f01"
    assert pin_clock(template, {CLOCK: '"2024-07-27"'}) != pin_clock(template, DAY)
    assert pin_clock("plain", DAY) == "plain"
    assert pin_clock(template, {}) == template
    assert template_hash("") == ""


ENGINE = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<e>": 3}, [("a", "b")]))


@pytest.fixture
def folder(tmp_path):
    ENGINE.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "chat_template": "t"}))
    return tmp_path


def test_folder_and_file_are_equal(folder):
    loaded = read_tokenizer(folder)
    assert loaded == read_tokenizer(folder / "tokenizer.json")
    assert (loaded.special, loaded.chat_template) == ({"eos_token": "<e>"}, "t")
    assert loaded.id_of("eos_token") == 3


def test_a_file_without_a_tokenizer_is_rejected(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"has no tokenizer\.json"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.json"):
        read_tokenizer(tmp_path / "tokenizer.model")
    with pytest.raises(EncoderError, match="cannot be read"):
        read_tokenizer(tmp_path / "none.json")
    with pytest.raises(ModelNotFoundError):
        read_template(tmp_path / "none.jinja")
