import json

import pytest
from made_tokenizers import byte_level, save
from tokenizers import AddedToken

from latentcache.encoders.text.describe import describe_tokenizer
from latentcache.errors import UnsupportedModelError
from latentcache.fields.input_ids import InputIdsSettings
from latentcache.fields.tokenizer import read_tokenizer, token_ids

ROLES = {"eos_token": "<|im_end|>"}


def test_tokens_that_only_the_configuration_knows_are_added_as_transformers_adds_them(tmp_path):
    decoder = {"600": {"content": "<tool>", "special": False}, "601": {"content": "<pad>", "special": True}}
    save(byte_level(), tmp_path, roles={"pad_token": "<pad>"}, added_tokens_decoder=decoder)
    loaded = read_tokenizer(tmp_path)
    assert (loaded.id_of("pad_token"), token_ids(loaded.json)["<tool>"]) == (601, 600)
    assert [t["special"] for t in loaded.json["added_tokens"] if t["id"] >= 600] == [False, True]


def test_a_role_makes_a_token_special(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<end>")])
    save(tokenizer, tmp_path, roles={"eos_token": {"content": "<end>", "__type": "AddedToken"}})
    (end,) = [t for t in read_tokenizer(tmp_path).json["added_tokens"] if t["content"] == "<end>"]
    assert end["special"]


def test_a_role_without_a_token_is_noted(tmp_path):
    save(byte_level(), tmp_path, roles={"pad_token": "<none>"})
    loaded = read_tokenizer(tmp_path)
    assert (loaded.special, "<none>" in loaded.notes[0]) == ({}, True)


def test_the_default_of_several_templates(tmp_path):
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    save(byte_level(), tmp_path, chat_template=templates)
    assert read_tokenizer(tmp_path).chat_template == "y"


def test_roles_of_the_older_file(tmp_path):
    save(byte_level(), tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert read_tokenizer(tmp_path).special == ROLES


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"vocab.json": "{}"}, "has no tokenizer.json"),
        ({"tokenizer.json": "{"}, "JSON"),
        ({"tokenizer.json": "[]"}, "JSON object"),
        ({"tokenizer.json": "{}"}, "tokenizer"),
    ],
)
def test_a_folder_without_a_tokenizer_is_rejected(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UnsupportedModelError, match=words):
        read_tokenizer(tmp_path)


def test_a_hub_id_gives_its_commit(tmp_path, monkeypatch):
    folder = tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    save(byte_level(), folder, roles=ROLES, add_bos_token=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(folder))
    description = describe_tokenizer(InputIdsSettings(tokenizer="org/name"))
    assert (description.producer["special"], description.provenance["revision"]) == (
        [list(role) for role in ROLES.items()],
        "abc",
    )
    cached = {"tokenizer": "org/name", "revision": "abc"}
    assert describe_tokenizer(InputIdsSettings(tokenizer="org/name"), cached) == description
