import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.geometry.buckets import MAX_SIDE
from latentcache.geometry.sizes import Size
from latentcache.identity.key import KEY_BYTES, KIND_LATENTS, EntryKey

u8, u16, side = st.integers(0, 255), st.integers(0, 65_535), st.integers(1, MAX_SIDE)
keys = st.builds(
    EntryKey,
    kind=u8,
    variant=u8,
    frames=u16,
    bucket=st.builds(Size, side, side),
    content=st.binary(min_size=16, max_size=16),
    recipe=st.binary(min_size=8, max_size=8),
)


def fields(key):
    return key.kind, key.variant, key.frames, key.bucket, key.content, key.recipe


@given(keys)
def test_unpack_undoes_pack(key):
    packed = key.pack()
    assert len(packed) == KEY_BYTES
    assert EntryKey.unpack(packed) == key


@given(keys, keys)
def test_the_order_of_bytes_is_the_order_of_the_fields(first, second):
    assert (first.pack() < second.pack()) == (fields(first) < fields(second))


@given(st.lists(keys, min_size=2, max_size=20))
def test_sorted_keys_lie_bucket_by_bucket(listed):
    latents = [EntryKey(bucket=k.bucket, content=k.content, recipe=k.recipe) for k in listed]
    found = [EntryKey.unpack(packed).bucket for packed in sorted(k.pack() for k in latents)]
    assert found == sorted(found)


@given(keys, keys)
def test_different_keys_have_different_bytes(first, second):
    assert (first == second) == (first.pack() == second.pack())


def test_the_layout_is_pinned():
    key = EntryKey(content=bytes(range(16)), bucket=Size(0x0102, 0x0304), recipe=b"recipe-8")
    assert key.kind == KIND_LATENTS
    assert key.pack() == bytes.fromhex("01 00 0001 0102 0304") + bytes(range(16)) + b"recipe-8"


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_key_of_another_length_is_refused(length):
    with pytest.raises(ValueError, match=str(length)):
        EntryKey.unpack(bytes(length))


def test_a_key_without_pixels_is_refused():
    with pytest.raises(ValueError, match="0x0"):
        EntryKey.unpack(bytes(KEY_BYTES))


@pytest.mark.parametrize(("content", "recipe"), [(15, 8), (17, 8), (32, 8), (16, 7), (16, 16), (0, 0)])
def test_a_hash_of_another_length_is_never_cut_or_padded(content, recipe):
    with pytest.raises(ValueError, match=rf"{content} \+ {recipe}"):
        EntryKey(content=bytes(content), bucket=Size(8, 8), recipe=bytes(recipe))


def test_a_side_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="65536"):
        EntryKey(content=bytes(16), bucket=Size(8, MAX_SIDE + 1), recipe=bytes(8))
