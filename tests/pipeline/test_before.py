import pytest
from small_tokens import build, write_texts

from latentcache.errors import CacheFormatError
from latentcache.pipeline.before import begun, newest_whole
from latentcache.store.durable import write_json
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import FORMAT_VERSION, signed
from latentcache.store.token_generation import load_tokens


@pytest.fixture
def layout(tmp_path):
    data = tmp_path / "a.jsonl"
    for lines in (["one"], ["one", "two"]):
        build(write_texts(data, lines), tmp_path / "cache")
    return CacheLayout(tmp_path / "cache")


def test_an_older_generation_stands_in_for_a_damaged_one(layout):
    assert newest_whole(layout, load_tokens)[0].number == 2
    manifest = layout.generation(2) / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_bytes(b"[]")
    found, damage = newest_whole(layout, load_tokens)
    assert (found.number, bool(damage)) == (1, True)
    layout.current.unlink()
    assert newest_whole(layout, load_tokens)[0].number == 1
    write_json(layout.building, signed({"format": 3}))
    assert newest_whole(layout, load_tokens) == (None, "")


def test_what_a_build_began(layout):
    def read(marker):
        return marker["recipe"]

    assert begun(layout, "tokens", read) is None
    write_json(layout.building, signed({"format": 3, "kind": "tokens", "recipe": 7}))
    assert begun(layout, "tokens", read) == 7
    with pytest.raises(CacheFormatError, match="a build of tokens"):
        begun(layout, None, read)
    write_json(layout.building, signed({"format": 3, "kind": "tokens"}))
    assert begun(layout, "tokens", read) is None
    write_json(layout.building, {"format": 3, "kind": "tokens", "recipe": 7, "checksum": "0"})
    assert begun(layout, "tokens", read) is None
    write_json(layout.building, signed({"format": FORMAT_VERSION + 1}))
    with pytest.raises(CacheFormatError, match="is under way here"):
        begun(layout, "tokens", read)
