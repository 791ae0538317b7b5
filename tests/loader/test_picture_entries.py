import pickle

import numpy as np

from latentcache.loader.cache import open_cache
from latentcache.loader.picture_entries import Pictures, ReplaceablePictures
from latentcache.store.reader import EntryReader
from latentcache.store.views import select


def test_entries_are_known_by_their_keys_and_by_their_names(shared):
    generation = open_cache(shared[1]).generation
    entries = Pictures(generation)
    keys, names = entries.identities()
    assert names.startswith("coming:")
    assert entries.drawn(0, 0, 1) is None
    rows = np.array([2, 0])
    assert entries.rows(rows).tolist() == [2, 0]
    other = Pictures(select(generation, np.array([1, 0, 2, 3])))
    assert not {keys, names} & set(other.identities())


def test_entries_of_one_sample_are_one(shared):
    cache = open_cache(shared[1]).repeated(3)
    found = ReplaceablePictures(EntryReader(cache.layout, cache.generation))
    assert (len(found.bucket), found.samples) == (12, 4)
    assert [found.sample(row) for row in range(4)] == [0, 0, 0, 1]
    assert found.name(3) == "p1.png"
    assert found.bucket_name(3) == str(cache.generation.buckets[int(found.bucket[3])])
    assert pickle.loads(pickle.dumps(found)).name(3) == "p1.png"
