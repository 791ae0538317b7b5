import shutil
from pathlib import Path

import pytest
from small_tokens import build, opened, write_texts

from latentcache.errors import CacheFormatError, SourceNotFoundError
from latentcache.sources.corpus import scan_records
from latentcache.token_recipe import TokenRecipe
from latentcache.verify.token_run import find_records, recipe_sides, short, verify_tokens


def looked(cache, **more):
    return verify_tokens(cache, open_records=lambda data, options: scan_records(data), **more)


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "both").mkdir()
    build(write_texts(tmp_path / "both" / "a.jsonl", ["one", "two"]), tmp_path / "both" / "cache")
    return tmp_path / "both" / "cache"


def test_cache_and_data_that_moved_together(cache, tmp_path):
    (tmp_path / "both").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "cache"
    assert find_records(moved, opened(moved)[0]).resolve() == tmp_path / "moved" / "a.jsonl"
    assert looked(moved).counts["ok"] + looked(moved).counts["touched"] == 2
    (tmp_path / "moved" / "a.jsonl").unlink()
    with pytest.raises(SourceNotFoundError):
        looked(moved)


def test_what_is_read_is_counted(cache):
    fast, full = looked(cache), looked(cache, full=True)
    assert (fast.checked["payloads"], full.checked["payloads"], full.checked["records"]) == (0, 1, 2)
    assert full.exit_code() == 0


def test_a_recipe_that_differs(cache):
    recipe = opened(cache)[0].recipe
    other = TokenRecipe.from_json(recipe.as_json() | {"chat_template": "9b17" * 8, "loss": "assistant"})
    report = looked(cache, requested=other)
    assert report.counts["stale"] == 2
    assert (report.findings[0].reason, report.findings[0].expected) == ("recipe:chat_template", "9b179b17")
    assert [name for name, *_ in report.recipe_diff] == ["chat_template", "loss"]
    assert recipe_sides(recipe, None) == []
    assert (short("a"), short(True), short(""), short("ab" * 16)) == ("a", "True", "none", "abababab")


def test_a_cache_of_pictures_is_none_of_tokens(tmp_path):
    vectors = Path(__file__).parents[2] / "docs" / "format" / "vectors" / "cache"
    shutil.copytree(vectors, tmp_path / "cache")
    with pytest.raises(CacheFormatError, match="pictures"):
        looked(tmp_path / "cache")
