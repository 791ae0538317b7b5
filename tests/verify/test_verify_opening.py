import json
import shutil

import pytest
from small_tokens import build, opened, write_texts

from latentcache.errors import CacheDamagedError, SourceNotFoundError
from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import signed
from latentcache.store.token_generation import load_tokens
from latentcache.verify.opening import find_data, limits_of, open_held
from latentcache.verify.selection import Depth, Limits

FAST, FOREIGN = Depth(), Depth(untrusted=True)


@pytest.fixture
def tokens(tmp_path):
    (tmp_path / "both").mkdir()
    build(write_texts(tmp_path / "both" / "a.jsonl", ["one", "two", ("bad",)]), tmp_path / "both" / "cache")
    return tmp_path / "both" / "cache"


def test_data_is_what_was_named_then_what_was_recorded(cache, data, tmp_path):
    generation = load_generation(cache)
    assert find_data(cache, generation, FAST) == data
    assert find_data(cache, generation, FAST, tmp_path) == tmp_path
    assert find_data(cache, generation, FOREIGN) is None
    assert find_data(cache, generation, FOREIGN, tmp_path) == tmp_path


def test_data_that_moved_with_its_cache(tokens, tmp_path):
    generation = opened(tokens)[0]
    (tmp_path / "both").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "cache"
    assert find_data(moved, generation, FAST).resolve() == tmp_path / "moved" / "a.jsonl"
    (tmp_path / "moved" / "a.jsonl").unlink()
    with pytest.raises(SourceNotFoundError) as caught:
        find_data(moved, generation, FAST)
    assert caught.value.fix == f"say where it is: latentcache verify {moved} --data DATA"


def test_a_file_in_the_place_of_a_folder_of_pictures_is_no_data(cache, data):
    generation = load_generation(cache)
    shutil.rmtree(data)
    data.write_text("")
    with pytest.raises(SourceNotFoundError):
        find_data(cache, generation, FAST)


def test_limits_are_for_strangers(cache):
    given = Limits(memory_bytes=1, cpu_s=1)
    assert limits_of(CacheLayout(cache), FAST) is None
    assert limits_of(CacheLayout(cache), Depth(untrusted=True, limits=given)) is given


@pytest.mark.parametrize("kind", ["tokens", "cache"])
@pytest.mark.parametrize(
    "change",
    [
        {"source": 3},
        {"source": {"root": 1, "relative": ".", "options": {}, "listing": {}}},
        {"source": {"root": "a\0b", "relative": "."}},
        {"provenance": []},
        {"provenance": {"libraries": [1]}},
        {"provenance": {"tokenizer": 7}, "source": {}},
    ],
)
def test_a_manifest_that_was_signed_and_says_nonsense(request, kind, change):
    cache = request.getfixturevalue(kind)
    path = cache / "generations" / "000001" / "manifest.json"
    manifest = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "checksum"}
    path.chmod(0o644)
    path.write_text(json.dumps(signed(manifest | change)))
    with pytest.raises(CacheDamagedError) as caught:
        open_held(cache, load_tokens if kind == "tokens" else load_generation)
    assert "CURRENT" in caught.value.fix
