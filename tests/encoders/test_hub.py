import huggingface_hub
import pytest

from latentcache.encoders.hub import expanded, first_line, is_hub_id, snapshot
from latentcache.errors import ModelNotFoundError


def test_words_that_could_be_of_the_hub():
    assert is_hub_id("org/name.v1")
    assert not any(is_hub_id(word) for word in ("name", "./org/name", "~/x", "../a", "a/b/c", "a b/c"))
    assert expanded("~nobody-of-this-name/x").name == "x"
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


def test_what_the_local_cache_holds_is_used_and_else_the_network_is_asked_once(monkeypatch, tmp_path):
    asked = []

    def download(name, **more):
        asked.append(more)
        if more.get("local_files_only"):
            return str(tmp_path / "cached")
        raise OSError("offline\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    there = {"what": "model", "flag": "--model"}
    assert snapshot("org/name", ["*.json"], lambda folder: True, **there) == tmp_path / "cached"
    assert asked == [{"local_files_only": True}]
    with pytest.raises(ModelNotFoundError) as caught:
        snapshot("org/name", ["*.json"], lambda folder: False, **there)
    assert asked[2]["allow_patterns"] == ["*.json"]
    assert len(asked) == 3
    assert caught.value.why.endswith("closed: offline")
    assert caught.value.fix.endswith("then --model FOLDER")
