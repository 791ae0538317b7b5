import json
from types import MappingProxyType

import pytest
from tokenizers import Tokenizer, models

from latentcache.errors import EncoderError, ModelNotFoundError, UnsupportedModelError
from latentcache.identity.tokenizer import from_loaded, read_template, read_tokenizer

ENGINE = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<e>": 3}, [("a", "b")]))


@pytest.fixture
def folder(tmp_path):
    ENGINE.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "chat_template": "t"}))
    return tmp_path


def test_a_folder_its_file_and_what_is_loaded_of_it_are_the_same(folder):
    class Loaded:
        backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        special_tokens_map = MappingProxyType({"eos_token": "<e>", "additional_special_tokens": ["a"]})
        chat_template = "t"

    found, loaded = read_tokenizer(folder), from_loaded(Loaded)
    assert found == read_tokenizer(folder / "tokenizer.json")
    assert (loaded.json, loaded.special, loaded.chat_template) == (found.json, {"eos_token": "<e>"}, "t")
    assert found.id_of("eos_token") == 3
    engine = Tokenizer.from_str(ENGINE.to_str())
    engine.enable_truncation(4)
    alone = from_loaded(engine)
    assert (alone.special, alone.chat_template, "truncation" in alone.json) == ({}, "", False)


def test_what_is_no_tokenizer_says_so(tmp_path):
    assert read_tokenizer(tmp_path) is None
    with pytest.raises(UnsupportedModelError, match="cannot be written"):
        from_loaded(object())
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.json"):
        read_tokenizer(tmp_path / "tokenizer.model")
    with pytest.raises(EncoderError, match="cannot be read"):
        read_tokenizer(tmp_path / "none.json")
    with pytest.raises(ModelNotFoundError):
        read_template(tmp_path / "none.jinja")
