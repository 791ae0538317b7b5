import os

import pytest

from latentcache.errors import CacheDamagedError, CacheNotFoundError, RecipeError
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_lock
from latentcache.store.publication import checked_shards, contradictions, find_manifest, put_generation


def put(layout, **more):
    given = {
        "version": 1,
        "about": {"shards": ["ab"]},
        "columns": {},
        "lists": {},
        "facts": {"x": 1},
        "complete": True,
    }
    return put_generation(layout, **given | more)


def test_what_is_put_is_found(tmp_path):
    layout = CacheLayout(tmp_path)
    assert [put(layout), put(layout, facts={"x": 2})] == [1, 2]
    number, manifest, folder = find_manifest(tmp_path)
    assert (number, manifest["x"], folder) == (2, 2, layout.generation(2))
    assert find_manifest(tmp_path, 1)[1]["x"] == 1


def test_a_cache_without_a_finished_build(tmp_path):
    (tmp_path / "shards").mkdir()
    with pytest.raises(CacheNotFoundError) as caught:
        find_manifest(tmp_path)
    assert caught.value.slug == "cache-unfinished"


def test_a_first_build_at_work_is_not_to_be_started_again(tmp_path):
    (tmp_path / "shards").mkdir()
    with builder_lock(tmp_path / "builder.lock"), pytest.raises(CacheNotFoundError) as caught:
        find_manifest(tmp_path)
    assert f"process {os.getpid()} on " in caught.value.why
    assert caught.value.fix.startswith("wait until it ends")
    with pytest.raises(CacheNotFoundError) as caught:
        find_manifest(tmp_path)
    assert caught.value.fix.startswith("run the same `latentcache build` again")


@pytest.mark.parametrize("error", [KeyError("a"), IndexError(), TypeError(), ValueError(), RecipeError("a")])
def test_whatever_is_wrong_is_damage(tmp_path, error):
    with pytest.raises(CacheDamagedError), contradictions(tmp_path):
        raise error


def test_shards_stay_in_their_folder():
    assert checked_shards(1, {"generation": 1, "shards": ["a1", "b-2"]}) == ("a1", "b-2")
    for bad in ({"generation": 2, "shards": []}, {"generation": 1, "shards": ["../x"]}):
        with pytest.raises(ValueError):
            checked_shards(1, bad)
