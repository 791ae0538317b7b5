import numpy as np
import pytest
from made_coming import VERSION, announced
from small_tokens import build, opened, write_texts
from test_coming import coming

from latentcache.errors import CacheDamagedError, CacheFormatError
from latentcache.store.coming import announce, load_announced, log_path, withdraw
from latentcache.store.durable import read_json, write_json
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import signed
from latentcache.store.token_coming import load_announced_tokens


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(write_texts(folder / "a.jsonl", ["one", "two", "three"]), folder / "cache")
    return folder / "cache"


def test_what_was_announced_is_loaded_again(built, tmp_path):
    layout, log = announced(built, tmp_path, before=4)
    found, generation = load_announced_tokens(layout), opened(built)[0]
    assert (found.number, found.recipe, found.source_root) == (5, generation.recipe, "/data")
    assert log == log_path(layout, str(found.manifest["log"]))
    for name in ("content", "source", "line"):
        assert np.array_equal(getattr(found.documents, name), getattr(generation.documents, name)), name
    assert (found.documents.block.tolist(), found.documents.where(1)) == ([-1] * 3, "a.jsonl:2")
    withdraw(layout)
    assert load_announced_tokens(layout) is None


def test_announcements_of_the_other_kind_say_how_they_are_opened(built, tmp_path):
    layout, _ = announced(built, tmp_path / "tokens")
    with pytest.raises(CacheFormatError, match="makes tokens") as caught:
        load_announced(layout)
    assert "open_tokens" in caught.value.fix
    pictures = CacheLayout(tmp_path / "pictures")
    pictures.root.mkdir()
    announce(pictures, coming())
    with pytest.raises(CacheFormatError, match="makes pictures"):
        load_announced_tokens(pictures)


@pytest.mark.parametrize(
    ("change", "error"),
    [({"version": VERSION + 1}, CacheFormatError), ({"before": "x"}, CacheDamagedError), ({}, None)],
)
def test_an_announcement_of_another_version_or_a_damaged_one_is_refused(built, tmp_path, change, error):
    layout, _ = announced(built, tmp_path)
    path = layout.coming / "manifest.json"
    said = {name: value for name, value in read_json(path).items() if name != "checksum"}
    write_json(path, signed({**said, **change}))
    if error is None:
        assert load_announced_tokens(layout) is not None
        return
    with pytest.raises(error):
        load_announced_tokens(layout)
