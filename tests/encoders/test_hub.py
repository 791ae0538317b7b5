from types import SimpleNamespace

import huggingface_hub
import pytest

from latentcache.encoders.hub import Wanted, expanded, hub_folder, is_hub_id
from latentcache.errors import ModelNotFoundError


def folder_of(*files, needed=(), revision=""):
    wanted = Wanted(what="model", argument="model", takes="", files=files, needed=needed)
    return hub_folder("org/name", wanted, revision=revision)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that can go offline, and its recorded calls."""
    calls, state = [], {"online": True}

    def download(name, **options):
        calls.append(options)
        return str(tmp_path / "snapshots" / ("local" if options.get("local_files_only") else "fresh"))

    class Api:
        def repo_info(self, name, *, timeout):
            if not state["online"]:
                raise ConnectionError("offline\nlong story")
            return SimpleNamespace(sha="fresh")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return calls, state


def test_hub_ids_are_recognized():
    assert is_hub_id("org/name.v1")
    assert not any(is_hub_id(word) for word in ("name", "./org/name", "~/x", "../a", "a/b/c", "a b/c"))
    assert expanded("~nobody-of-this-name/x").name == "x"


def test_a_known_revision_needs_no_network(hub):
    calls, _ = hub
    assert folder_of(revision="abc").name == "local"
    assert calls == [{"revision": "abc", "local_files_only": True}]
    assert folder_of(revision="abc", needed=("config.json",)).name == "fresh"


def test_a_gated_repository_is_rejected_with_the_fix(hub, monkeypatch):
    class GatedRepoError(Exception):
        pass

    def closed(name, **options):
        raise OSError if options.get("local_files_only") else GatedRepoError("403: ask for access")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", closed)
    with pytest.raises(ModelNotFoundError, match="accepted the terms") as caught:
        folder_of("*.json", "vae/*")
    assert "hf auth login" in caught.value.fix
    assert "hf download org/name --include '*.json' 'vae/*'" in caught.value.fix


def test_without_a_network_only_a_complete_cache_is_used(hub):
    _, state = hub
    state["online"] = False
    assert folder_of().name == "local"
    with pytest.raises(ModelNotFoundError) as caught:
        folder_of(needed=("config.json",))
    assert caught.value.why.endswith("closed: offline")
    assert caught.value.fix.endswith("then give FOLDER")
