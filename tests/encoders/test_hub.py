import huggingface_hub
import pytest

from latentcache.encoders.files import Wanted, download, expanded, is_hub_id
from latentcache.errors import ModelNotFoundError

WANTED = Wanted(argument="model", takes="", files=("*.json", "vae/*"))


def test_hub_ids_are_recognized():
    assert is_hub_id("org/name.v1")
    assert not any(is_hub_id(word) for word in ("name", "./org/name", "~/x", "../a", "a/b/c", "a b/c"))
    assert expanded("~nobody-of-this-name/x").name == "x"


@pytest.mark.parametrize(("revision", "offline"), [("", False), ("abc", False), ("abc", True)])
def test_the_commit_of_an_earlier_build_is_asked_for(monkeypatch, revision, offline):
    calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **words: calls.append(words) or "folder")
    assert download("org/name", WANTED, revision=revision, offline=offline).name == "folder"
    files = ["*.json", "vae/*"]
    assert calls == [{"revision": revision or None, "allow_patterns": files, "local_files_only": offline}]


def test_a_repository_that_cannot_be_downloaded_is_rejected_with_the_fix(monkeypatch):
    def closed(name, **options):
        raise ConnectionError("403: ask for access\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", closed)
    with pytest.raises(ModelNotFoundError) as caught:
        download("org/name", WANTED)
    assert caught.value.what == "--model=org/name: not in the local hub cache, and it cannot be downloaded"
    assert caught.value.why == "403: ask for access"
    assert "`hf download org/name --local-dir FOLDER`" in caught.value.fix
    assert "`hf auth login`" in caught.value.fix
