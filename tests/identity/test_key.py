import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.identity.key import CONTENT_SLICE, MAX_DIM, entry_key

side = st.integers(1, MAX_DIM)
numbers = {"kind": st.integers(0, 255), "variant": st.integers(0, 255), "dims": st.tuples(side, side, side)}
hashes = {"content": st.binary(min_size=16, max_size=16), "recipe": st.binary(min_size=8, max_size=8)}
parts = st.fixed_dictionaries(numbers | hashes)


@given(parts, parts)
def test_the_order_of_bytes_is_the_order_of_the_fields(first, second):
    names = ("kind", "variant", "dims", "content", "recipe")
    order = [first[name] for name in names] < [second[name] for name in names]
    assert (entry_key(**first) < entry_key(**second)) == order


def test_the_layout_is_pinned():
    key = entry_key(kind=1, content=bytes(range(16)), dims=(1, 0x0102, 0x0304), recipe=b"recipe-8")
    assert key[CONTENT_SLICE] == bytes(range(16))
    assert key == bytes.fromhex("01 00 0001 0102 0304") + bytes(range(16)) + b"recipe-8"


@pytest.mark.parametrize("wrong", [{"content": b"short"}, {"recipe": bytes(9)}, {"dims": (1, 0, 1)}])
def test_values_too_large_for_a_key_are_rejected(wrong):
    with pytest.raises(ValueError, match="a key"):
        entry_key(**{"kind": 1, "content": bytes(16), "recipe": bytes(8), **wrong})
