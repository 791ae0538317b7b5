from itertools import pairwise

import numpy as np
import pytest
from small_cache import build, draw_four
from small_tokens import build as build_tokens
from small_tokens import opened, texts, write_texts

from latentcache.store.generation import open_generation
from latentcache.store.index import open_index
from latentcache.store.layout import CacheLayout
from latentcache.verify import portions
from latentcache.verify.portions import by_content, by_place, counts, of_rows, of_shard


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Two shards of 4 and 8 entries; two resolutions, mirrored, and every picture twice."""
    folder = tmp_path_factory.mktemp("mixed")
    draw_four(folder / "data")
    build(folder / "data", folder / "cache", resolutions=(64,))
    draw_four(folder / "data" / "again")
    build(folder / "data", folder / "cache", resolutions=(64, 128), flip=True)
    return folder / "cache"


@pytest.fixture(params=[1, 3, 1 << 17])
def most(request, monkeypatch):
    """Rows of a portion at the most, as far as a content hash can part them."""
    monkeypatch.setattr(portions, "_ROWS", request.param)
    monkeypatch.setattr(portions, "_PORTIONS", 1 << 10)
    return request.param


def test_every_row_is_in_one_portion_of_its_shard(mixed, most):
    generation = open_generation(mixed)
    met, shards = [], []
    for shard, several in by_content(generation):
        shards.append(shard)
        for one in several:
            assert (one.portion.shard == shard).all()
            assert (one.portion.content == generation.samples.content[one.portion.sample]).all()
            for name in ("key", "offset", "bucket", "sample", "crop", "resize", "pixel_hash"):
                expected = getattr(generation.rows, name)[one.portion.row]
                assert np.array_equal(getattr(one.portion, name), expected)
            met += one.portion.row.tolist()
    assert shards == list(range(len(generation.shards)))
    assert sorted(met) == list(range(len(generation.rows.shard)))


def test_a_portion_meets_its_entries_in_the_index_and_no_others(mixed, most):
    generation, layout = open_generation(mixed), CacheLayout(mixed)
    for shard, several in by_content(generation):
        index, seen = open_index(layout.shards / generation.shards[shard]), 0
        for one in several:
            parts = list(index.slices(2, one.contents))
            keys = {key.tobytes() for part in parts for key in part["key"]}
            assert {key.tobytes() for key in one.portion.key} <= keys
            seen += sum(map(len, parts))
        assert seen == index.entries


def test_rows_are_read_once_from_the_front_of_the_shard_on(mixed, most):
    generation = open_generation(mixed)
    for shard in range(len(generation.shards)):
        several = list(by_place(generation, shard, None))
        rows = np.concatenate([one.row for one in several])
        assert sorted(rows.tolist()) == np.flatnonzero(generation.rows.shard[:] == shard).tolist()
        ends = [(int(one.offset.min()), int(one.offset.max())) for one in several if len(one)]
        assert ends == sorted(ends)
        assert all(first[1] < second[0] for first, second in pairwise(ends))
        chosen = np.arange(len(generation.rows.shard)) % 2 == 0
        some = np.concatenate([one.row for one in by_place(generation, shard, chosen)])
        assert sorted(some.tolist()) == [row for row in sorted(rows.tolist()) if row % 2 == 0]


def test_the_rows_of_one_shard_are_those_of_all(mixed, most):
    generation = open_generation(mixed)
    found = [sorted(row for one in of_shard(generation, s) for row in one.portion.row.tolist()) for s in (0,)]
    assert found == [np.flatnonzero(generation.rows.shard[:] == 0).tolist()]
    assert counts(generation).tolist() == np.bincount(generation.rows.shard[:]).tolist()


def test_rows_follow_their_samples(mixed):
    generation = open_generation(mixed)
    chosen = np.arange(len(generation.samples.names)) % 3 == 0
    assert np.array_equal(of_rows(generation, chosen), chosen[generation.rows.sample[:]])


def test_blocks_of_tokens_are_met_like_entries_of_pictures(tmp_path, most):
    build_tokens(write_texts(tmp_path / "a.jsonl", texts(200, longest=4000)), tmp_path / "cache")
    generation, layout = opened(tmp_path / "cache")[0], CacheLayout(tmp_path / "cache")
    assert len(generation.blocks) > 3
    for shard, several in by_content(generation):
        index, met = open_index(layout.shards / generation.shards[shard]), []
        for one in several:
            keys = {key.tobytes() for part in index.slices(2, one.contents) for key in part["key"]}
            assert {key.tobytes() for key in one.portion.key} <= keys
            assert (one.portion.content == one.portion.key[:, 8:24]).all()
            met += one.portion.row.tolist()
        own = np.flatnonzero(generation.blocks.shard == shard)
        assert sorted(met) == own.tolist()
        read = np.concatenate([portion.row for portion in by_place(generation, shard, None)])
        assert read.tolist() == own[np.argsort(generation.blocks.offset[own])].tolist()
