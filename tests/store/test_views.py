"""Parts, repeats and combinations of generations: the same entries, found in the same places."""

from __future__ import annotations

import numpy as np
import pytest
from small_cache import build, draw

from latentcache.errors import UsageError
from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader
from latentcache.store.views import combine, folder_repeats, select


def made(folder, names, **recipe):
    """A cache of one picture per name; every picture is different."""
    for name in names:
        draw(folder / name, seed=sum(map(ord, folder.name + name)))
    cache = folder.with_suffix(".cache")
    build(folder, cache, **recipe)
    return CacheLayout(cache), load_generation(cache)


def read_all(layout, generation):
    """Payload bytes of every row, by sample name."""
    reader = EntryReader(layout, generation)
    rows = range(len(generation.rows.shard))
    return [(reader.sample_name(row), reader.read(row)[1].tobytes()) for row in rows]


def test_a_selection_keeps_entries_with_their_samples(tmp_path):
    layout, generation = made(tmp_path / "one", ["a.png", "b.png", "c.png"])
    whole = read_all(layout, generation)
    assert read_all(layout, select(generation, np.array([2, 0, 0]))) == [whole[2], whole[0], whole[0]]
    assert read_all(layout, select(generation, np.array([False, True, False]))) == [whole[1]]


def test_folders_say_how_often_their_pictures_count(tmp_path):
    names = ["10_cats/a.png", "2_dogs/sub/b.png", "cats_3/c.png", "0_none/d.png", "5_e.png", "010_birds/f.png"]
    _, generation = made(tmp_path / "one", names)
    with pytest.warns(UserWarning, match="1 of 6 entries lie in folders that count 0 times"):
        found = folder_repeats(generation)
    by_name = dict(zip(generation.samples.names, found.tolist(), strict=True))
    assert by_name == dict(zip(names, [10, 2, 1, 0, 1, 10], strict=True))


def test_a_combination_serves_the_entries_of_both(tmp_path):
    one, two = made(tmp_path / "one", ["a.png", "b.png"]), made(tmp_path / "two", ["a.png", "c.png", "d.png"])
    both = combine([one, two])
    assert read_all(CacheLayout(tmp_path), both) == read_all(*one) + read_all(*two)
    assert len(both.buckets) == len(set(both.buckets))
    assert both.samples.captions[4] == two[1].samples.captions[2]
    for row, bucket in enumerate(both.rows.bucket.tolist()):
        source = one[1] if row < 2 else two[1]
        assert both.buckets[bucket] == source.buckets[source.rows.bucket[row - (0 if row < 2 else 2)]]


def test_latents_of_two_kinds_are_not_combined(tmp_path):
    one = made(tmp_path / "one", ["a.png"])
    two = made(tmp_path / "two", ["b.png"], storage_dtype="float32")
    with pytest.raises(UsageError, match="two kinds") as caught:
        combine([one, two])
    assert "encoder.storage_dtype: float16 and float32" in caught.value.why


def test_other_resolutions_of_one_encoder_are_combined(tmp_path):
    one = made(tmp_path / "one", ["a.png"])
    two = made(tmp_path / "two", ["b.png"], resolutions=(128,))
    assert len(combine([one, two]).buckets) == 2


def test_nothing_to_combine_is_said():
    with pytest.raises(UsageError, match="no cache to combine"):
        combine([])
