import shutil

import pytest
from small_cache import build, draw

from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.pins import open_pinned
from latentcache.store.reader import EntryReader
from latentcache.verify.compact import Sparse, compact, sparse_shards


@pytest.fixture
def sparse(cache, data):
    """A cache whose first shard is needed for one of its four entries; gives its layout and that shard."""
    for number in range(3):
        draw(data / f"p{number}.png", seed=60 + number)
    build(data, cache)
    (old,) = load_generation(cache, 1).shards
    shutil.rmtree(cache / "generations" / "000001")
    return CacheLayout(cache), old


def payloads(layout, generation):
    reader = EntryReader(layout, generation)
    found = [reader.read(row)[1].tobytes() for row in range(len(generation.rows.key))]
    reader.close()
    return found


def test_what_is_sparse(sparse):
    layout, old = sparse
    generation = load_generation(layout.root)
    assert sparse_shards(layout, generation, []) == [Sparse(shard=old, live=1, entries=4)]
    assert sparse_shards(layout, generation, [old]) == []


def test_a_full_shard_is_not(shared):
    assert sparse_shards(CacheLayout(shared[1]), load_generation(shared[1]), []) == []


def test_the_same_rows_in_another_place(sparse):
    layout, old = sparse
    before = open_pinned(layout.root)
    done, damaged = compact(layout, before, sparse_shards(layout, before, []))
    assert ([item.shard for item in done], damaged) == ([old], [])
    after = load_generation(layout.root)
    assert (after.number, after.manifest["replaces"]) == (3, 2)
    assert old not in after.shards
    for name in ("key", "bucket", "sample", "crop", "resize", "pixel_hash"):
        assert (getattr(after.rows, name) == getattr(before.rows, name)).all()
    assert payloads(layout, after) == payloads(layout, before)
    assert layout.retired() == {old}


def test_nothing_sparse_publishes_nothing(sparse):
    layout, _ = sparse
    assert compact(layout, load_generation(layout.root), []) == ([], [])
    assert load_generation(layout.root).number == 2
