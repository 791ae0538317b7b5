import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.identity.key import CONTENT_AT, KEY_BYTES, MAX_DIM, EntryKey

u8, side = st.integers(0, 255), st.integers(1, MAX_DIM)
keys = st.builds(
    EntryKey,
    kind=u8,
    variant=u8,
    dims=st.tuples(side, side, side),
    content=st.binary(min_size=16, max_size=16),
    recipe=st.binary(min_size=8, max_size=8),
)


def fields(key):
    return key.kind, key.variant, key.dims, key.content, key.recipe


@given(keys)
def test_unpack_undoes_pack(key):
    packed = key.pack()
    assert len(packed) == KEY_BYTES
    assert EntryKey.unpack(packed) == key


@given(keys, keys)
def test_the_order_of_bytes_is_the_order_of_the_fields(first, second):
    assert (first.pack() < second.pack()) == (fields(first) < fields(second))


def test_the_layout_is_pinned():
    key = EntryKey(kind=1, content=bytes(range(16)), dims=(1, 0x0102, 0x0304), recipe=b"recipe-8")
    assert key.pack()[CONTENT_AT : CONTENT_AT + 16] == bytes(range(16))
    assert key.pack() == bytes.fromhex("01 00 0001 0102 0304") + bytes(range(16)) + b"recipe-8"


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_key_of_another_length_is_refused(length):
    with pytest.raises(ValueError, match=str(length)):
        EntryKey.unpack(bytes(length))
