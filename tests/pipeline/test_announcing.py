import numpy as np
import pytest
from small_builds import draw, recipe_of, settings

from latentcache.errors import UsageError
from latentcache.pipeline.announcing import Announcer, announcement, numbers_of
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.survey import Memory, survey
from latentcache.sources.resolve import scan
from latentcache.store.catalog import load_catalog
from latentcache.store.coming import announce, load_announced, log_path, read_arrivals
from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout

FACTS = {"source": {"root": "/data"}, "demo": False}


def surveyed(data, cache, **recipe):
    recipe = recipe_of(**recipe)
    memory = Memory.of(None, recipe)
    return survey(scan(data), recipe, load_catalog(CacheLayout(cache)), memory, max_pixels=10**8), recipe


@pytest.fixture
def data(tmp_path):
    for number in range(5):
        draw(tmp_path / "data" / f"{number}.png", number, height=(64, 128)[number % 2], width=64)
        (tmp_path / "data" / f"{number}.txt").write_text(f"caption {number}")
    (tmp_path / "data" / "2b.png").write_bytes(b"<html>")
    return tmp_path / "data"


def test_it_says_what_the_generation_will_say(data, tmp_path):
    work, recipe = surveyed(data, tmp_path / "none")
    coming = announcement(work, recipe, FACTS, before=0)
    generation = load_generation(build_cache(settings(data)).plan.cache)
    rows = generation.rows
    assert list(coming.names) == list(generation.samples.names)
    assert list(coming.captions) == list(generation.samples.captions)
    assert coming.buckets == generation.buckets
    for name in ("sample", "bucket", "crop", "resize"):
        assert np.array_equal(getattr(coming, name), getattr(rows, name)), name
    assert np.array_equal(coming.original_size, generation.samples.original_size)
    assert not coming.content.any()


def test_what_was_found_is_told_by_the_numbers_of_the_announcement(data, tmp_path):
    layout = CacheLayout(tmp_path / "cache")
    layout.root.mkdir()
    work, recipe = surveyed(data, layout.root)
    numbers = {item.sample.name: item.index for item in work.todo}
    with Announcer() as announcer:
        announcer.begin(announce(layout, announcement(work, recipe, FACTS, before=0)), numbers_of(work))
        announcer.looked(numbers["3.png"], b"c" * 16)
        announcer.refused(numbers["4.png"])
    log = log_path(layout, load_announced(layout).manifest["log"])
    assert numbers["3.png"] == 4, "a refused file has a number in the scan"
    assert read_arrivals(log)[0] == [(3, b"c" * 16), (4, None)]


def test_without_followers_nothing_is_written(tmp_path):
    with Announcer() as announcer:
        announcer.looked(0, b"c" * 16)
        announcer.refused(1)
    assert not (tmp_path / "cache").exists()


def test_mirrored_pictures_are_refused(data, tmp_path):
    work, recipe = surveyed(data, tmp_path / "none", flip=True)
    with pytest.raises(UsageError, match="--flip"):
        announcement(work, recipe, FACTS, before=0)
