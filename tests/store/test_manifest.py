"""The manifest's own checksum, and which version a cache needs."""

import pytest
from small_cache import build, draw_four

from latentcache.errors import CacheFormatError
from latentcache.store.durable import write_json
from latentcache.store.generation import load_generation
from latentcache.store.manifest import FORMAT_VERSION, format_version, is_whole, load_manifest, signed


def test_a_signed_object_is_whole_until_it_is_changed():
    value = signed({"a": 1.5, "b": [None]})
    assert is_whole(value)
    assert not is_whole({**value, "a": 1.25})
    assert not is_whole({"a": 1.5})


def test_only_mirror_images_need_the_newer_version(tmp_path):
    data = draw_four(tmp_path / "data")
    for flip in (False, True):
        build(data, tmp_path / str(flip), flip=flip)
        generation = load_generation(tmp_path / str(flip))
        assert format_version(generation.recipe) == generation.manifest["format"]["version"] == 1 + flip


def test_a_manifest_is_read_without_its_columns_and_a_newer_one_is_refused_as_such(tmp_path):
    write_json(tmp_path / "manifest.json", signed({"format": {"version": FORMAT_VERSION}, "a": 1}))
    assert load_manifest(tmp_path)["a"] == 1
    write_json(tmp_path / "manifest.json", {"format": {"version": FORMAT_VERSION + 1}, "checksum": "of another rule"})
    with pytest.raises(CacheFormatError, match=f"reads up to {FORMAT_VERSION}"):
        load_manifest(tmp_path)
