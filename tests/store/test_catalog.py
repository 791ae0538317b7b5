import numpy as np
import pytest
from damaged import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from made_entries import KINDS, entries_of, items_of, keys_of, make_shard

from latentcache.errors import StoreError
from latentcache.store.atomic_io import make_folder
from latentcache.store.catalog import load_catalog
from latentcache.store.paths import CachePaths


@settings(max_examples=12)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=60), st.integers(1, 4), st.integers(0, 2**31))
def test_every_committed_item_is_found_and_no_other(tmp_path_factory, numbers, shards, seed):
    paths = CachePaths(tmp_path_factory.mktemp("catalog"))
    make_folder(paths.shards)
    for shard in range(shards):
        for name in KINDS:  # an item may be in several shards
            some = sorted({*numbers[shard::shards], numbers[0]})
            make_shard(paths.shard(f"{name}-{shard}"), entries_of(name, some))
    catalog = load_catalog(paths)
    wanted = [item for name in KINDS for item in items_of(name, sorted({*numbers}))]
    np.random.default_rng(seed).shuffle(wanted)
    absent = [item for name in KINDS for item in items_of(name, range(61, 66))]
    numbers = catalog.find(keys_of(wanted + absent))
    assert (numbers[len(wanted) :] == -1).all()
    assert sorted({*numbers[: len(wanted)].tolist()}) == catalog.all_items().tolist()
    np.testing.assert_array_equal(catalog.keys(numbers[: len(wanted)]), keys_of(wanted))
    for item, position in zip(wanted, numbers.tolist(), strict=False):
        stored = catalog.item(position)
        assert (stored.key, stored.array.tobytes(), stored.same) == (item.key, item.array.tobytes(), item.same)


def test_equal_pixels_are_found_within_their_group_only(paths):
    catalog = load_catalog(paths)
    for item in items_of("plane", range(12)):
        other = bytearray(item.key)
        other[8:24] = bytes(16)  # another file with the same pixels
        assert catalog.find_same(item.same, bytes(other)) == catalog.find(keys_of([item]))[0]
        assert catalog.find_same(item.same[:15] + b"x", bytes(other)) == -1
        for byte in (0, 1, 7, 24):  # another kind, variant, width or recipe
            wrong = bytearray(other)
            wrong[byte] ^= 0x40
            assert catalog.find_same(item.same, bytes(wrong)) == -1


def test_a_read_error_of_a_shard_is_not_damage(paths):
    data = paths.data("shard-0")
    data.unlink()
    data.symlink_to(data.name)  # a link loop: opening it is an error for every user
    with pytest.raises(StoreError, match=r"data\.mdb cannot be read") as caught:
        load_catalog(paths)
    assert caught.value.slug == "store"


def test_an_item_whose_entry_is_damaged_is_not_given(paths):
    catalog = load_catalog(paths)
    number = int(catalog.find(keys_of(items_of("plane", [4])))[0])
    rows = catalog.locations(np.array([number]))
    data = paths.data(catalog.shards[int(rows.shard[0])])
    flip(data, int(rows.offset[0]) + 3)
    assert catalog.item(number) is None
    flip(data, int(rows.offset[0]) + 3)
    assert catalog.item(number) is not None
    flip(data, int(rows.offset[0]) - 10)
    assert catalog.item(number) is None
