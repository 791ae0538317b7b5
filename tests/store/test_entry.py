"""Entry heads have checksums; blocks hold their items; all values are checked."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_entries import KINDS, PLANE, PLANE_RECIPE, RECIPES, WORDS, WORDS_RECIPE, item_of, items_of

from latentcache.errors import CacheFormatError, CorruptEntryError
from latentcache.identity.content import checksum
from latentcache.store.entry import BLOCK_BYTES, CHECKSUM_BYTES, Item, pack_items, read_header


def resigned(value, head_bytes):
    stop = head_bytes - CHECKSUM_BYTES
    value[stop:head_bytes] = checksum(bytes(value[:stop])).to_bytes(8, "little")
    return value


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25)
@given(numbers=st.lists(st.integers(0, 10_000), min_size=1, max_size=300, unique=True))
def test_items_round_trip(name, numbers):
    items, stored = items_of(name, numbers), []
    for entry in pack_items(items, RECIPES[name], KINDS[name]):
        header = read_header(entry.value, entry.key)
        payload = memoryview(entry.value)[header.head_bytes :]
        assert header.head_bytes % 64 == 48
        assert checksum(payload) == header.payload_checksum
        assert [key.tobytes() for key in header.item_keys()] == list(entry.item_keys)
        assert header.recipe_id == RECIPES[name].recipe_id
        stored += [(header, payload, position) for position in range(header.items)]
        if header.packed and header.items > 1:
            assert len(entry.value) <= BLOCK_BYTES
    for item, (header, payload, position) in zip(items, stored, strict=True):
        assert header.item(payload, position).tobytes() == item.array.tobytes()
        assert header.item(payload, position).shape == item.array.shape
        assert header.same[position].tobytes() == (item.same or bytes(16))
        columns = header.item_columns(position)
        for column in KINDS[name].columns:
            expected = item.columns[column]
            np.testing.assert_array_equal(columns.get(column, np.zeros_like(expected)), expected)
        for column in KINDS[name].ragged_columns:
            np.testing.assert_array_equal(columns.get(column, np.zeros((0, 2))), item.columns[column])


def test_items_of_another_group_begin_a_block():
    sizes = {0: 48, 3: 48, 1: 24, 4: 24}
    two = [Item(key=item_of("vector", n).key, array=np.ones(size, "<f4")) for n, size in sizes.items()]
    blocks = pack_items(two, RECIPES["vector"], KINDS["vector"])
    assert [len(block.item_keys) for block in blocks] == [2, 2]
    assert read_header(blocks[0].value).shape == (2, 48)


@pytest.mark.parametrize("item", [
    Item(key=b"short", array=np.zeros(3, "<u2")),
    Item(key=bytes(32), array=np.zeros(0, "<u2")),
    Item(key=bytes(32), array=np.zeros(3, "<i8")),
])  # fmt: skip
def test_an_item_that_cannot_be_stored_is_rejected(item):
    with pytest.raises(ValueError, match=r"."):
        pack_items([item], WORDS_RECIPE, WORDS)


@pytest.mark.parametrize("name", KINDS)
def test_any_flipped_bit_of_a_head_is_found(name):
    (entry, *_) = pack_items(items_of(name, range(40)), RECIPES[name], KINDS[name])
    size = read_header(entry.value).head_bytes
    for offset in range(size):
        value = bytearray(entry.value)
        value[offset] ^= 1 << offset % 8
        with pytest.raises((CorruptEntryError, CacheFormatError)):
            read_header(value, entry.key)


@settings(max_examples=300)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_a_crafted_head_is_rejected_or_harmless(name, data):
    """The checksum is correct: every number is checked before memory is allocated."""
    (entry, *_) = pack_items(items_of(name, range(30)), RECIPES[name], KINDS[name])
    size = read_header(entry.value).head_bytes
    value = bytearray(entry.value)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, size - CHECKSUM_BYTES - 1))
        value[at] = data.draw(st.integers(0, 255))
    try:
        header = read_header(resigned(value, size))
    except (CorruptEntryError, CacheFormatError):
        return
    payload = memoryview(entry.value)[header.head_bytes :]
    if header.payload_bytes == len(payload):
        for position in range(header.items):
            header.item(payload, position)
            header.item_columns(position)


@pytest.mark.parametrize(("version", "why"), [(b"1", "older"), (b"3", "newer")])
def test_an_entry_of_another_version_is_not_called_damaged(version, why):
    (entry,) = pack_items([item_of("plane", 1)], PLANE_RECIPE, PLANE)
    value, size = bytearray(entry.value), read_header(entry.value).head_bytes
    value[3:4] = version
    with pytest.raises(CacheFormatError, match=why):
        read_header(resigned(value, size))


def test_a_swapped_entry_is_found():
    first, two = pack_items(items_of("plane", (1, 2)), PLANE_RECIPE, PLANE)
    with pytest.raises(CorruptEntryError, match=r"it is that of") as caught:
        read_header(first.value, two.key)
    assert caught.value.key == two.key.hex()
