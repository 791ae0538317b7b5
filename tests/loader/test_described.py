import numpy as np
import pytest
import torch

from latentcache.loader.cache import open_cache
from latentcache.loader.described import described


@pytest.fixture
def generation(cache):
    return open_cache(cache).generation


def test_it_says_of_each_row_what_the_columns_say(generation):
    rows = [3, 0, 3]
    found = described(generation, rows)
    owners = [int(generation.rows.sample[row]) for row in rows]
    assert found["keys"] == [generation.rows.key[row].tobytes().hex() for row in rows]
    assert found["names"] == [generation.samples.names[owner] for owner in owners]
    assert found["captions"] == [generation.samples.captions[owner] for owner in owners]
    assert found["original_size"].tolist() == [generation.samples.original_size[owner].tolist() for owner in owners]
    assert found["crop_top_left"].tolist() == [generation.rows.crop[row].tolist() for row in rows]
    size = generation.buckets[int(generation.rows.bucket[3])]
    assert found["target_size"].tolist() == [[size.height, size.width]] * 3


def test_lists_are_lists_and_tensors_are_their_own(generation):
    first, second = described(generation, np.array([0, 1])), described(generation, np.array([0, 1]))
    for name in ("keys", "names", "captions"):
        assert type(first[name]) is list
        assert all(type(text) is str for text in first[name])
    for name in ("original_size", "crop_top_left", "target_size"):
        assert first[name].dtype == torch.int64
        first[name].fill_(7)
        assert not torch.equal(first[name], second[name])
